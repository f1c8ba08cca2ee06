"""A program for tests: a training on some grid, which one rank may not survive.

hpctrain run -n N -m mpi_tests.launch.grid_run FOLDER KIND [RANK STEP]

KIND is a name of `KINDS`. With RANK and STEP, that rank kills itself (SIGKILL) in that step, while
the others compute. The samples that a rank gets are written down, with their step and epoch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc

EPOCHS, SAMPLES, BATCH, FEATURES = 3, 22, 6, 8
KINDS = {
    "alone": ({}, {}, {}),
    "stages": ({"pipeline": 2}, {"stages": "auto", "shard": "parameters"}, {"micro_batches": 3}),
    "sharded": ({}, {"shard": "parameters"}, {}),
    "tensor": ({"tensor": 2}, {"tensor": {"*.up": "column", "*.down": "row"}}, {}),
}
"""Arguments of the grid, of `split` and of `distribute`; alone: none of them is called."""


class Block(nn.Module):
    """A residual block whose two layers can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build() -> nn.Module:
    """The same first weights in every job."""
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(FEATURES, 1)).double()


def data() -> dict[str, torch.Tensor]:
    """Samples that know their number."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1)).double()
    return {"number": torch.arange(SAMPLES), "x": x, "y": x.sin().sum(1, keepdim=True)}


def main(folder: str, kind: str, *deadly: str) -> None:
    """Resume, train to the end of the last epoch or of this process, and save."""
    layout, division, options = KINDS[kind]
    rank, last = map(int, deadly or (-1, -1))
    with hpc.init(seed=7, device="cpu", num_threads=1) as world:
        grid, model = None, build()
        if kind != "alone":
            grid = hpc.Grid(world, **layout)
            model = hpc.split(grid, model, **division)
            options = options | {"grid": grid}
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        replica = hpc.distribute(world, model, optimizer, clip_norm=0.5, **options)
        loader = hpc.Loader(world, data(), global_batch=BATCH, grid=grid)
        saver = hpc.Saver(
            world, Path(folder) / "checkpoints", replica, loader, every_s=None, every_steps=2
        )
        place = grid.coordinate if grid is not None else None
        is_counted = place is None or (place.pipeline, place.tensor) == (0, 0)
        with (Path(folder) / f"seen-{kind}-{world.rank}.jsonl").open("a") as seen:
            for batch in saver.resume(num_epochs=EPOCHS):
                step, numbers = saver.step, batch["number"].tolist()
                if is_counted:
                    told = {"kind": kind, "step": step, "epoch": loader.epoch, "seen": numbers}
                    print(json.dumps(told), file=seen, flush=True)
                if (world.rank, step) == (rank, last):
                    os.kill(os.getpid(), signal.SIGKILL)
                replica.learn(mse_loss, batch["x"], batch["y"], num_samples=len(numbers))
        world.print(f"{kind} on {world.size} ranks has done {saver.step} steps")
        saver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
