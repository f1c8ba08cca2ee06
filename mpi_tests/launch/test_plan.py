"""`hpctrain plan` from a configuration, a machine from this machine, and hosts on slow links."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from hpctrain.predict import find_machine, read_profile
from mpi_tests.cluster.nodes import Nodes
from mpi_tests.full import slow
from mpi_tests.launch.commands import HPCTRAIN, ROOT

MODULE = """
import torch

from hpctrain.predict.profiling import Subject


def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def load():
    return torch.randn(96, 8), torch.arange(96) % 3


def subject():
    model = build()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = load()
    loss = torch.nn.functional.cross_entropy
    return Subject(model=model, optimizer=optimizer, loss=lambda: loss(model(x), y), batch=96)
"""
CONFIG = """
model.build = "own:build"
data.build = "own:load"
train.global_batch = 24
train.loss = "cross_entropy"
optimizer.lr = 0.1
"""


def hpctrain(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*HPCTRAIN, *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "own.toml").write_text(CONFIG)
    return tmp_path


def test_profiles_from_a_configuration_and_from_a_function(folder):
    words = [
        "plan",
        "own.toml",
        "--machine",
        "cpu-ethernet-10g",
        "--ranks",
        "4,8",
        "--repeats",
        "3",
    ]
    done = hpctrain(*words, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["predictions"]
    assert [(each["batch"], each["global_batch"]) for each in found] == [(6, 24), (3, 24)]
    done = hpctrain(*words, "--rehearse", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4, 4 an epoch" in done.stdout  # 96 samples in batches of 24
    words = ["plan", "--measure-profile", "p.json", "--subject", "own.py:subject", "--repeats", "3"]
    done = hpctrain(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    profile = read_profile(folder / "p.json")
    # In the order of backward, and without what is not trained.
    assert {layer.name for layer in profile.layers[:2]} == {"2.weight", "2.bias"}
    assert [layer.name for layer in profile.layers[2:]] == ["0.bias"]
    assert profile.gradient_bytes == 4 * (3 * 16 + 3 + 16)
    assert profile.compute_s > 0


def test_grids_of_a_configuration_and_of_a_function(folder):
    words = ["plan", "--memory", "own.toml", "--ranks", "2,4", "--memory-per-rank", "1GB"]
    done = hpctrain(*words, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "step times are not predicted" in done.stderr
    for plan in json.loads(done.stdout)["plans"]:
        assert plan["proposal"]["shape"] == {"data": plan["num_ranks"], "pipeline": 1, "tensor": 1}
        assert plan["proposal"]["micro_batches"] * plan["proposal"]["micro_batch"] == (
            24 // plan["num_ranks"]
        )
    words = ["plan", "--memory", "--subject", "own.py:subject", "--ranks", "2"]
    timed = [*words, "--machine", "perlmutter-gpu", "--tflops", "1e-3"]
    done = hpctrain(*timed, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SIMULATED: Sequential")
    assert "take it by Grid(world, data=2, pipeline=1, tensor=1)" in done.stdout


@slow
def test_this_machine_becomes_a_file(tmp_path):
    done = hpctrain("bench", "fit", "--ranks", "1,2", "--repeats", "2", "mine.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    machine = find_machine(tmp_path / "mine.toml")
    assert machine.measured
    assert machine.ranks_per_node == 2
    assert [count for count, _ in machine.contention] == [1, 2]
    assert 1e7 < machine.engines["mpi"].intra.bytes_per_s < 1e12


@pytest.mark.skipif(not os.environ.get("MPI_TESTS_FULL"), reason="a minute, and quiet cores")
def test_steps_of_hosts_on_slow_links_are_predicted():
    from benchmarks.predict import predict_hosts

    if reason := Nodes.why_not():
        pytest.skip(reason)
    rows = predict_hosts([2, 4], ["100mbit"], "mlp-256", "mpi", 8)
    assert [row["ranks"] for row in rows] == [2, 4]
    assert all(abs(float(str(row["error_percent"]))) <= 15 for row in rows), rows
