"""torch's process groups over MPI in jobs of their own: launchers, and ranks that do not come."""

from __future__ import annotations

import re
import sys

import pytest

from mpi_tests.full import slow
from mpi_tests.launch.commands import HPCTRAIN, run
from mpi_tests.launch.test_deaths import mpirun

LAUNCHERS = {
    "hpctrain run": [*HPCTRAIN, "run", "-n", "2"],
    "mpirun": [*mpirun(2), sys.executable],
}
SCRIPT = """
import os
import time

import torch
import torch.distributed as dist

import hpctrain as hpc

with hpc.init(seed=7, device="cpu", num_threads=1) as world:
    grid = hpc.Grid(world, timeout_s=3)
    dist.all_reduce(torch.ones(2))
    if world.rank == 1:
        {late}
    {call}
    print("ended", world.rank, dist.get_world_size(), flush=True)
"""
NOBODY_CAME = {
    "dist.all_reduce(torch.ones(3))": "all_reduce SUM float32 (3,) in the group of ranks 0-1",
    "dist.barrier()": "barrier in the group of ranks 0-1",
    "dist.new_group([0, 1])": "making a process group of these ranks",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_default_group_needs_no_environment(tmp_path, launcher):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(late="pass", call="dist.barrier()"))
    done = run(*LAUNCHERS[launcher], path, timeout_s=90)
    assert done.code == 0, done.text
    assert sorted(re.findall(r"ended \d 2", done.out)) == ["ended 0 2", "ended 1 2"]


@pytest.mark.parametrize(
    "call", [next(iter(NOBODY_CAME)), *(pytest.param(c, marks=slow) for c in [*NOBODY_CAME][1:])]
)
def test_a_rank_that_never_comes_is_named_with_the_line(tmp_path, call):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(late="time.sleep(60)", call=call))
    done = run(*LAUNCHERS["mpirun"], path, timeout_s=90)
    assert done.code == 124, done.text
    said = re.escape(NOBODY_CAME[call])
    assert re.search(rf"rank 0 has waited .* in '{said}' #\d+ for rank 1", done.text), done.text
    line = path.read_text().splitlines().index(f"    {call}") + 1
    assert f"rank 0 waits at {path}:{line}" in done.text, done.text


def test_a_message_that_never_comes_ends_the_job(tmp_path):
    path = tmp_path / "train.py"
    call = "world.rank or dist.recv(torch.ones(3), 1)"
    path.write_text(SCRIPT.format(late="time.sleep(60)", call=call))
    done = run(*LAUNCHERS["mpirun"], path, timeout_s=90)
    assert done.code == 124, done.text
    assert "TimedOutError: recv of float32 (3,) from rank 1" in done.text
