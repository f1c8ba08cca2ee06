"""`hpctrain bench`: sweeps that go on, layouts that `run -n auto` takes, launches in jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from hpctrain.bench.results import validate
from hpctrain.install.mpi import loaded_mpi, matching_mpirun
from hpctrain.launch.command import launch_command
from mpi_tests.full import slow
from mpi_tests.launch.commands import HPCTRAIN, clean_environment, run

SCRIPT = """
import pathlib
import sys

import torch

import hpctrain as hpc

with hpc.init(seed=7, device="cpu") as world:
    if world.size == 2 and not pathlib.Path("mended").exists():
        sys.exit("the second rank is broken")
    share = world.bench.global_batch(16) // world.size
    model = torch.nn.Linear(64, 64)
    fused = world.bench.value("fused", False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    replica = hpc.distribute(world, model, optimizer)
    for _ in range(10_000 if world.bench.is_active else 1):
        loss = replica(torch.randn(share, 64)).square().mean()
        replica.backward(loss, num_samples=share)
        replica.step()
    print(f"{world.size} ranks of {torch.get_num_threads()} threads, {share} samples each")
"""
QUICK = ["--repeats", "1", "--steps", "4", "--warmup", "1", "--load-limit", "1"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def bench(folder, *words, **environ):
    env = {"XDG_STATE_HOME": str(folder / "state"), **environ}
    return run(*HPCTRAIN, *words, cwd=folder, env=env, timeout_s=300)


def test_a_sweep_keeps_what_fails_and_goes_on(folder):
    words = ["bench", "scale", "--ranks", "2", "--threads", "1", *QUICK, "train.py"]
    first = bench(folder, *words)
    assert first.code == 1, first.text
    assert "auto 2x1 failed: exit code 1" in first.err
    assert "the second rank is broken" in first.err
    (folder / "mended").touch()
    second = bench(folder, *words)
    assert second.code == 0, second.text
    assert second.err.count("repeat 1:") == 1  # what was measured is not measured again
    result = json.loads((folder / "bench-scale" / "result.json").read_text())
    assert validate(result) == []
    rows = {row["name"]: row for row in result["scale"]["points"]}
    alone, both = rows["alone 1x1"], rows["auto 2x1"]
    assert (alone["samples_per_step"], both["samples_per_step"]) == (16, 32)  # weak scaling
    assert both["counts"]["messages"] == 1
    assert both["counts"]["bytes"] >= 4 * (64 * 64 + 64)
    assert alone["counts"]["messages"] == 0
    assert both["efficiency"] == pytest.approx(both["speedup"] / 2)
    assert sum(both["split_s"].values()) == pytest.approx(both["step_s"], rel=0.5)
    assert both["memory_bytes"] > 1 << 20
    if len(os.sched_getaffinity(0)) > 1:
        node = next(row for row in rows.values() if row["role"] == "node")
        assert node["is_fused"]
        assert not alone["is_fused"]
        (note,) = result["scale"]["notes"]
        assert "has a fused optimizer, the other points do not" in note


def test_an_interrupted_sweep_ends_its_launch_and_says_how_to_go_on(folder):
    (folder / "train.py").write_text(
        "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(120)"
    )
    words = ["bench", "scale", "--ranks", "1", "--threads", "1", *QUICK, "train.py"]
    with subprocess.Popen(
        [*HPCTRAIN, *words],
        cwd=folder,
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        ending = time.monotonic() + 60
        while not (folder / "pid").exists() or not (folder / "pid").read_text():
            assert time.monotonic() < ending
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "kept in bench-scale; the same command resumes there" in said
    assert not psutil.pid_exists(int((folder / "pid").read_text()))
    assert not list((folder / "bench-scale" / "measured").iterdir())


@slow
def test_the_best_layout_is_what_run_takes(folder):
    (folder / "mended").touch()
    early = bench(folder, "run", "-n", "auto", "train.py")
    assert early.code == 2
    assert "bench layout train.py` first" in early.err
    words = ["bench", "layout", "--cores", "2", "--ranks", "2", "--batch", "8", *QUICK]
    found = bench(folder, *words, "--repeats", "2", "train.py")
    assert found.code == 0, found.text
    (layout,) = json.loads((folder / "state/hpctrain/layouts.json").read_text())["layouts"]
    ranks, threads = layout["num_ranks"], layout["num_threads"]
    assert ranks * threads == 2
    assert f"best: {ranks} x {threads}" in found.err
    taken = bench(folder, "run", "-n", "auto", "train.py")
    assert taken.code == 0, taken.text
    assert f"{ranks} ranks of {threads} threads, {16 // ranks} samples each" in taken.out
    assert f"-n auto: {ranks} x {threads} (ranks x threads)" in taken.err
    refused = bench(folder, "run", "-n", "auto", "train.py", OMP_NUM_THREADS="1")
    assert refused.code == 2
    assert "OMP_NUM_THREADS is set to 1" in refused.err


@slow
def test_a_launch_of_a_job_measures_under_the_launcher_that_started_it(folder):
    (folder / "mended").touch()
    words = ["bench", "scale", "--ranks", "2", "--threads", "1", *QUICK]
    # The plan alone: every launch of it runs into the limit at once.
    bench(folder, *words, "--timeout", "0.01", "train.py")
    mpirun, version = matching_mpirun(loaded_mpi(), clean_environment()["PATH"])
    command = launch_command(mpirun, version, num_ranks=2, root=os.geteuid() == 0)
    keys = {
        json.loads(path.read_text())["point"]: path.stem
        for path in Path(folder / "bench-scale" / "measured").glob("*.json")
    }
    done = run(*command, *HPCTRAIN, "bench", "measure", "bench-scale", keys["auto 2x1"], cwd=folder)
    assert done.code == 0, done.text
    kept = json.loads((folder / "bench-scale/measured" / f"{keys['auto 2x1']}.json").read_text())
    assert kept["why"] == ""
    assert len(kept["report"]["step_s"]) == 4
    collected = bench(folder, "bench", "collect", "bench-scale")
    assert collected.code == 1  # the others are still as they were
    assert "alone 1x1 failed: ran past 0.01 s" in collected.err
