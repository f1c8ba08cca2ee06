"""A sharded state goes from 4 ranks to 3 to 1 and is the same, in another job each time."""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file

from hpctrain.checkpoint import list_checkpoints, read_checkpoint
from mpi_tests.checkpoints import bits, damage
from mpi_tests.launch.commands import HPCTRAIN, run
from mpi_tests.sharding import whole_state


def job(num_ranks, folder, *steps):
    program = [sys.executable, "-m", "mpi_tests.launch.resharding", folder, *map(str, steps)]
    done = run("mpirun", "-n", str(num_ranks), *program, timeout_s=300.0)
    assert done.code == 0, done.text
    assert f"{num_ranks} ranks saved step {steps[-1]}" in done.out
    return done


def test_four_ranks_then_three_then_one(tmp_path):
    folder = tmp_path / "checkpoints"
    job(4, folder, 1)
    job(3, folder, 1, 2)
    (before, newest) = list_checkpoints(folder)
    job(1, folder, 2, 3)
    assert [entry.step for entry in list_checkpoints(folder)] == [2, 3]  # retention
    damage("flipped", next(list_checkpoints(folder)[-1].path.glob("*.safetensors")))
    assert "is refused" in job(1, folder, 2, 4).err
    job(4, folder, 4, 5)
    path = list_checkpoints(folder)[-1].path
    assert bits(read_checkpoint(path)) == bits(
        {"pieces": whole_state(), "whole": torch.arange(4.0)}
    )
    assert before.step == 1
    assert newest.step == 2


def test_the_command_line_reads_pieces(tmp_path):
    folder = tmp_path / "checkpoints"
    job(3, folder, 1)
    listed = json.loads(run(*HPCTRAIN, "checkpoint", "list", folder, "--json").out)
    assert [(each["step"], each["num_ranks"], each["is_complete"]) for each in listed] == [
        (1, 3, True)
    ]
    assert "1 checkpoints, 0 damaged" in run(*HPCTRAIN, "checkpoint", "verify", folder).out
    file = tmp_path / "rows.safetensors"
    done = run(*HPCTRAIN, "checkpoint", "export", folder, file, "--key", "pieces/rows")
    assert done.code == 0, done.text
    whole = {name: tensor for name, tensor in whole_state()["rows"].items()}
    assert bits(dict(sorted(load_file(file).items()))) == bits(dict(sorted(whole.items())))
    (entry,) = list_checkpoints(folder)
    damage("flipped", next(entry.path.glob("*.safetensors")))
    assert run(*HPCTRAIN, "checkpoint", "verify", folder).code == 1
