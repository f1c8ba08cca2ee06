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
        ("main()", ["put what starts the training under if __name__ == '__main__':"]),
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
