"""Killed on one grid, resumed on another: every sample once, and the weights of one process."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from hpctrain.checkpoint import list_checkpoints
from hpctrain.cli import main
from mpi_tests.launch.commands import HPCTRAIN, run
from mpi_tests.launch.grid_run import BATCH, EPOCHS, SAMPLES

STEPS = EPOCHS * -(-SAMPLES // BATCH)
CHAINS = {
    # kind, ranks, who dies in which step
    "from stages to shards": [("stages", 4, (2, 5)), ("sharded", 2, (1, 9)), ("alone", 1, None)],
    "from shards to layers": [("sharded", 3, (0, 5)), ("tensor", 2, None)],
}


def job(folder, kind, num_ranks, death=None):
    """Run it to its end; what its ranks have been given, step by step."""
    folder.mkdir(exist_ok=True)
    words = [folder, kind, *(death or ())]
    program = ["-m", "mpi_tests.launch.grid_run", *map(str, words)]
    done = run(*HPCTRAIN, "run", "-n", str(num_ranks), *program, timeout_s=120)
    if death is None:
        assert done.code == 0, done.text
        assert f"has done {STEPS} steps" in done.out
    else:
        assert done.code == 137, done.text
        assert f"rank {death[0]} on" in done.err, done.text
    files = folder.glob(f"seen-{kind}-*.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def weights(folder, file):
    """The newest checkpoint as a plain file, which torch reads without hpctrain."""
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert main(["checkpoint", "export", str(folder), str(file)]) == 0
    return torch.load(file, weights_only=True)


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    return max((found[name] - tensor).abs().max().item() for name, tensor in expected.items())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one process makes of it that nobody kills."""
    folder = tmp_path_factory.mktemp("alone")
    job(folder / "run", "alone", 1)
    return weights(folder / "run" / "checkpoints", folder / "alone.pt")


@pytest.mark.parametrize("chain", CHAINS)
def test_killed_on_one_grid_and_resumed_on_others(tmp_path, expected, chain):
    folder = tmp_path / "run" / "checkpoints"
    first, records = 0, []
    for kind, num_ranks, death in CHAINS[chain]:
        given = job(tmp_path / "run", kind, num_ranks, death)
        assert min(one["step"] for one in given) == first  # where the job before was saved
        newest = list_checkpoints(folder)[-1]
        assert newest.manifest.num_ranks == num_ranks
        assert newest.step > first
        first = newest.step
        # What came after the last checkpoint was lost with the job, and is done again.
        records += [one for one in given if one["step"] < first]
        found = weights(folder, tmp_path / f"{kind}.pt")
        assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in expected.items()}
    assert first == STEPS
    seen = Counter((one["epoch"], number) for one in records for number in one["seen"])
    assert seen == {(epoch, number): 1 for epoch in range(EPOCHS) for number in range(SAMPLES)}
    assert largest_difference(found, expected) <= 1e-11
