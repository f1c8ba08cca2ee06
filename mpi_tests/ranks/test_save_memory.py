"""Saving a sharded model takes no more memory than what is written: measured, on every rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc
from mpi_tests.ranks.test_saver import common

MIB = 2**20
WIDTH, LAYERS = 1024, 6
TOTAL = 3 * LAYERS * WIDTH * WIDTH * 4  # weights and two moments of AdamW
SLACK = 10 * MIB  # the interpreter, MPI's buffers, a message on its way


def status(key):
    (line,) = [
        one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(key)
    ]
    return int(line.split()[1]) * 1024


def growth_of(call):
    """Bytes by which this process was larger at its largest than before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("all_write", [True, False])
def test_no_rank_holds_more_than_what_it_writes_or_sends(world, tmp_path, all_write):
    folder = common(world, tmp_path)
    with hpc.Grid(world) as grid:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        model = hpc.split(grid, model, shard="parameters")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        replica = hpc.distribute(world, model, optimizer, grid=grid)
        x = torch.ones(2, WIDTH)
        replica.learn(mse_loss, x, x)
        writers = world.size if all_write else 1
        saver = hpc.Saver(world, folder, replica, every_s=None, writers_per_node=writers)
        largest = growth_of(lambda: saver.save(wait=True))
        saver.close()
        replica.close()
    share = TOTAL / world.size
    held = TOTAL if not all_write and world.rank == 0 else share
    assert largest <= held + SLACK, f"{largest / MIB:.0f} MiB for {held / MIB:.0f}"
    if all_write or world.rank == 0:
        assert largest >= held / 2  # it was measured: the buffer is there
