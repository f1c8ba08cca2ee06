"""A checkpoint store from outside the package: one file a checkpoint, which rank 0 writes.

Just enough to be one: it shows what the protocol asks for.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hpctrain.checkpoint import Entry, Loaded


class PlainStore:
    """Checkpoints as `STEP.pt`, the state whole on all ranks."""

    is_saving = False
    failed = None

    def __init__(self, world, directory, **options):
        self.directory = Path(directory)
        self._world = world
        self._last = None
        if world.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
        world.comm.Barrier()

    def save(self, state, *, step, own=None, note=None, metrics=None, wait=False):
        owns = self._world.comm.gather(own, root=0)
        self._last = self.directory / f"{step}.pt"
        if self._world.rank == 0:
            draft = self._last.with_suffix(".draft")
            torch.save({"state": state, "own": owns, "note": note, "metrics": metrics}, draft)
            os.replace(draft, self._last)
        self._world.comm.Barrier()

    def wait(self):
        return self._last

    def load(self, path=None, *, like=None):
        entries = self.entries(self.directory)
        if not entries:
            return None
        entry = entries[-1]
        told = torch.load(entry.path, weights_only=False)
        same = len(told["own"]) == self._world.size
        return Loaded(
            state=told["state"],
            own=told["own"][self._world.rank] if same else None,
            step=entry.step,
            note=told["note"],
            path=entry.path,
            num_ranks=len(told["own"]),
            metrics=told["metrics"],
        )

    def list(self):
        return self.entries(self.directory)

    def claim(self):
        pass

    def close(self):
        pass

    @staticmethod
    def entries(directory):
        steps = sorted(int(path.stem) for path in Path(directory).glob("*.pt"))
        return [
            Entry(path=directory / f"{n}.pt", number=n, step=n, manifest=None, trouble=None)
            for n in steps
        ]

    @staticmethod
    def verify(path):
        return [] if path.stat().st_size else [f"{path} is empty"]

    @staticmethod
    def read(path):
        return torch.load(path, weights_only=False)["state"]


def install(folder):
    """Make a folder that, on the path, offers the store as an installed package would."""
    info = folder / "plain_store-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hpctrain.checkpoint_stores]\nplain = mpi_tests.plain_store:PlainStore\n"
    )
    return folder
