"""Worker processes of a loader in a real job, with a script of one's own."""

from __future__ import annotations

import pytest

from mpi_tests.launch.commands import HPCTRAIN, run

LIMIT_S = 120.0
SCRIPT = """
from mpi4py import MPI  # workers read this again, and must not join

import hpctrain as hpc
from mpi_tests.datasets import Fragile


class Mine(Fragile):
    pass


def main():
    with hpc.init(seed=1, device="cpu", num_threads=1) as world:
        data = Mine(40, "raise")
        loader = hpc.Loader(world, data, global_batch=4, shuffle=False, num_workers=1)
        seen = sum(loader.num_samples for _ in loader)
        print("seen", world.comm.allreduce(seen))


GUARD
"""
GUARD = 'if __name__ == "__main__":\n    main()'


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        (GUARD, ["OSError: sample 20 is unreadable", "in __getitem__", "datasets.py"]),
        ("main()", ["worker processes read train.py again", "it has no `if __name__"]),
    ],
)
def test_a_worker_that_fails_ends_the_job_with_its_traceback(tmp_path, guard, words):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("GUARD", guard))
    done = run(*HPCTRAIN, "run", "-n", "2", script, timeout_s=LIMIT_S)
    assert done.code == 1, done.text
    assert "seen" not in done.out
    assert "failed; ending all ranks" in done.err
    for word in words:
        assert word in done.err, done.text
    assert "use fewer workers" not in done.err  # which cures neither


MISTAKES = """
import threading

import hpctrain as hpc
from mpi_tests.datasets import Noisy


class Locked(Noisy):
    def __init__(self, size):
        super().__init__(size)
        self.inside = threading.Lock()


def main():
    def local(samples):
        return samples

    with hpc.init(seed=1, device="cpu", num_threads=1) as world:
        for data, collate in ((Noisy(9), lambda s: s), (Noisy(9), local), (Locked(9), None)):
            try:
                list(hpc.Loader(world, data, global_batch=4, num_workers=1, collate=collate))
            except hpc.errors.ConfigError as error:
                world.rank or print("told:", error, flush=True)


if __name__ == "__main__":
    main()
"""
INSIDE = """
import hpctrain as hpc
from mpi_tests.datasets import Noisy

if __name__ == "__main__":

    class Mine(Noisy):
        pass

    with hpc.init(seed=1, device="cpu", num_threads=1) as world:
        list(hpc.Loader(world, Mine(9), global_batch=4, num_workers=1))
"""


def test_what_cannot_be_sent_to_workers_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(MISTAKES)
    done = run(*HPCTRAIN, "run", "-n", "2", script, timeout_s=LIMIT_S)
    assert done.code == 0, done.text
    told = [line for line in done.out.splitlines() if "told:" in line]
    for line, words in zip(
        told,
        (
            ["collate (main.<locals>.<lambda>, train.py line 19)", "with def at the top level"],
            ["collate (main.<locals>.local, train.py line 15)", "with def at the top level"],
            ["dataset.inside (a _thread.lock) cannot be sent", "in __getitem__ when"],
        ),
        strict=True,
    ):
        for word in words:
            assert word in line, done.text
    assert "set_start_method" not in done.err, done.err


def test_a_data_set_that_workers_cannot_find_says_where_it_belongs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(INSIDE)
    done = run(*HPCTRAIN, "run", "-n", "2", script, timeout_s=LIMIT_S)
    assert done.code == 1, done.text
    assert "Can't get attribute 'Mine'" in done.err
    assert "must be defined at the top level of a module, outside" in done.err
    assert "use fewer workers" not in done.err
