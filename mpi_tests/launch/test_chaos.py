"""Trainings that are disturbed in every way, in real processes."""

from __future__ import annotations

import json

import pytest

from hpctrain.chaos.scenarios import SCENARIOS
from mpi_tests.full import FULL, slow
from mpi_tests.launch.commands import HPCTRAIN, run

MODULE = """
import torch

def model():
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )

def data():
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)
"""
CONFIG = """
[model]
build = "tiny:model"
[data]
build = "tiny:data"
[train]
global_batch = 16
epochs = 3
loss = "mse_loss"
[optimizer]
name = "AdamW"
lr = 0.01
"""
EVERY_DAY = "kill,nan,disk,term-launcher,byte"
"""MPI_TESTS_FULL=1 runs all, on four ranks too; docs/testing.md: what shows them in CI."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    (folder / "tiny.py").write_text(MODULE)
    (folder / "tiny.toml").write_text(CONFIG)
    return folder / "tiny.toml"


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=slow)])
def test_a_training_survives_its_scenarios(config, tmp_path, num_ranks):
    names = ",".join(SCENARIOS) if FULL else EVERY_DAY
    done = run(
        *HPCTRAIN, "chaos", "run", config, "-n", str(num_ranks), "--scenarios", names, "--json",
        "--keep", tmp_path / "kept", timeout_s=600,
    )  # fmt: skip
    rows = json.loads(done.out)
    assert {row["name"] for row in rows} == {*names.split(","), "end"}
    assert [row for row in rows if not row["good"]] == [], done.text
    assert done.code == 0, done.text


def test_a_training_that_does_not_even_run_is_told_from_one_that_is_lost(config, tmp_path):
    done = run(
        *HPCTRAIN, "chaos", "run", config, "--scenarios", "kill",
        "--set", "optimizer.name=AdmW", "--keep", tmp_path / "kept", timeout_s=120,
    )  # fmt: skip
    assert done.code == 1, done.text
    assert "undisturbed training failed (exit code 2)" in done.err
    assert "did you mean AdamW?" in done.err


@slow
@pytest.mark.parametrize(
    "words",
    [["--rounds", "1"], ["--rounds", "5", "--ranks", "3"], ["--rounds", "20", "--seed", "1"]],
)
def test_a_soak_loses_nothing(tmp_path, words):
    done = run(*HPCTRAIN, "chaos", "soak", *words, "--json", "--keep", tmp_path / "kept",
               timeout_s=1500)  # fmt: skip
    outcome = json.loads(done.out)
    assert outcome["trouble"] == [], done.text
    assert [one["trouble"] for one in outcome["rounds"] if one["trouble"]] == [], done.text
    assert outcome["accuracy"] == outcome["undisturbed_accuracy"] > 0.7
    assert outcome["same_weights"] is (True if "--ranks" in words else None)
    assert (done.code, len(outcome["rounds"])) == (0, int(words[1]) + 1), done.text


KILLED_AT_A_BARRIER = """
import os, signal, time
from mpi4py import MPI
from hpctrain.world.barrier import make_barrier

comm = MPI.COMM_WORLD
barrier = make_barrier(comm, comm.Split_type(MPI.COMM_TYPE_SHARED), sleep=True)
barrier.wait()
if comm.rank == 2:
    time.sleep(0.5)  # the others wait in the kernel, and are the first to know
    os.kill(os.getpid(), signal.SIGKILL)
barrier.wait()
"""


def test_a_death_that_the_node_sees_first_is_named_all_the_same(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(KILLED_AT_A_BARRIER)
    done = run(*HPCTRAIN, "run", "-n", "3", path, timeout_s=60)
    assert done.code == 137, done.text
    assert "hpctrain: rank 2 on" in done.err, done.text
    assert "CollectiveError" not in done.text
