"""A rank's side of `checkpoint`: copies, saves, and training with and without saves."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hpctrain as hpc
from benchmarks.step_subjects import Distributed
from hpctrain.bench import Measurable
from hpctrain.checkpoint import flatten
from hpctrain.world import World

__all__ = ["make"]

_NUM_TENSORS = 64
_TENSOR_BYTES = 4 << 20
_CHUNK_BYTES = 2 << 20
_WORKLOAD = "512-adamw-fused"


def _big_state() -> dict[str, Tensor]:
    """256 MiB in 64 tensors, as a model with its moments might be."""
    return {f"w{i}": torch.full((_TENSOR_BYTES // 4,), float(i)) for i in range(_NUM_TENSORS)}


class _Folder:
    """A directory that all ranks see, gone at the end."""

    def __init__(self, world: World) -> None:
        self.path = Path(world.comm.bcast(tempfile.mkdtemp() if world.rank == 0 else None))
        self._is_mine = world.rank == 0

    def remove(self) -> None:
        """Once nobody uses it."""
        if self._is_mine:
            shutil.rmtree(self.path, ignore_errors=True)


class _Uncounted:
    def counts(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}


class Memcpy(_Uncounted):
    """Each rank copies its share of the state into memory that is in use already."""

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, case: str) -> dict[str, object]:
        """Make both, and copy once."""
        share = _NUM_TENSORS * _TENSOR_BYTES // self.world.size
        self.source = torch.ones(share, dtype=torch.uint8)
        self.target = torch.zeros(share, dtype=torch.uint8)
        self.run(1)
        return {"state_bytes": _NUM_TENSORS * _TENSOR_BYTES}

    def run(self, repeats: int) -> None:
        """Copy."""
        for _ in range(repeats):
            self.target.copy_(self.source)
        self.world.comm.Barrier()

    def finish(self) -> dict[str, object]:
        """Let both go."""
        del self.source, self.target
        return {}


class Checksum(_Uncounted):
    """Each rank computes the checksum of its share of the state, block by block."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        hashes: dict[str, Callable[[Any], object]] = {
            "sha256": hashlib.sha256,
            "blake2b": hashlib.blake2b,
        }
        self.compute = hashes.get(name, zlib.crc32)

    def prepare(self, case: str) -> dict[str, object]:
        """Make the bytes."""
        self.data = torch.ones(_NUM_TENSORS * _TENSOR_BYTES // self.world.size, dtype=torch.uint8)
        return {"state_bytes": _NUM_TENSORS * _TENSOR_BYTES}

    def run(self, repeats: int) -> None:
        """Compute."""
        view = self.data.numpy().data
        for _ in range(repeats):
            for start in range(0, len(view), _CHUNK_BYTES):
                self.compute(view[start : start + _CHUNK_BYTES])

    def finish(self) -> dict[str, object]:
        """Let the bytes go."""
        del self.data
        return {}


class Save(_Uncounted):
    """An asynchronous save: the time until training may go on. `run(0)` waits for the disk."""

    waits = False

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, case: str) -> dict[str, object]:
        """Make a state and save it once: the first time the memory for copies is made."""
        self.folder = _Folder(self.world)
        self.store = hpc.Store(self.world, self.folder.path, keep=hpc.Keep(last=1))
        self.state = _big_state()
        self.run(1)
        return {"state_bytes": _NUM_TENSORS * _TENSOR_BYTES}

    def run(self, repeats: int) -> None:
        """Collective: save, or wait for the last save."""
        if not repeats:
            self.store.wait()
            os.sync()
        for step in range(repeats):
            self.store.save(self.state, step=step, wait=self.waits)

    def finish(self) -> dict[str, object]:
        """Collective: see that it is there, and let go."""
        loaded = self.store.load()
        assert_equal(loaded.state if loaded else {}, self.state)
        self.store.close()
        self.folder.remove()
        del self.state, self.store
        return {}


class SaveAndWait(Save):
    """A save until it is complete: copied, checksummed, written, synced and renamed."""

    waits = True


class Disk(_Uncounted):
    """As many bytes, by as many ranks, in one file each, with `write` and `fsync` alone."""

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, case: str) -> dict[str, object]:
        """Make the bytes."""
        self.folder = _Folder(self.world)
        self.data = torch.ones(_NUM_TENSORS * _TENSOR_BYTES // self.world.size, dtype=torch.uint8)
        self.run(1)
        return {"state_bytes": _NUM_TENSORS * _TENSOR_BYTES}

    def run(self, repeats: int) -> None:
        """Write."""
        if not repeats:
            os.sync()
        path = self.folder.path / f"{self.world.rank}"
        for _ in range(repeats):
            path.unlink(missing_ok=True)
            with path.open("wb", buffering=0) as file:
                view = self.data.numpy().data
                for start in range(0, len(view), _CHUNK_BYTES):
                    file.write(view[start : start + _CHUNK_BYTES])
                os.fsync(file.fileno())
        self.world.comm.Barrier()

    def finish(self) -> dict[str, object]:
        """Let go."""
        self.world.comm.Barrier()
        self.folder.remove()
        del self.data
        return {}


class Steps(Distributed):
    """Training steps, in the middle of which there may be a save."""

    def __init__(self, world: World, how: str) -> None:
        super().__init__(world, _engine(world))
        self.how = how
        self.number = 0

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: train a little, and save once."""
        self.folder = _Folder(self.world)
        self.store = hpc.Store(self.world, self.folder.path, keep=hpc.Keep(last=1))
        super().prepare(_WORKLOAD)
        self.run(4)
        num_bytes = sum(
            t.numel() * t.element_size() for t in flatten(self.state()).tensors.values()
        )
        return {"state_bytes": num_bytes}

    def state(self) -> dict[str, Any]:
        """What a user saves."""
        return self.replica.state_dict()

    def run(self, repeats: int) -> None:
        """Collective: train; save in the middle."""
        if not repeats:
            self.store.wait()
            os.sync()
        for step in range(repeats):
            self.backward()
            self.step()
            if step == repeats // 2:
                self.save()
            self.store.poll()

    def save(self) -> None:
        """Collective: save as the variant says."""
        if self.how in ("steps-saving", "steps-waiting"):
            self.number += 1
            self.store.save(self.state(), step=self.number, wait=self.how == "steps-waiting")
        elif self.how == "steps-torch-save":
            if self.world.rank == 0:
                with (self.folder.path / "all.pt").open("wb") as file:
                    torch.save(self.state(), file)
                    os.fsync(file.fileno())
            self.world.comm.Barrier()

    def counts(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def finish(self) -> dict[str, object]:
        """Collective: see that the weights agree, and let go."""
        self.store.close()
        self.world.comm.Barrier()
        self.folder.remove()
        return super().finish()


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Raise where a state did not come back as it was."""
    for name, tensor in wanted.items():
        if not torch.equal(found[name], tensor):
            raise hpc.errors.CheckpointError(f"{name} did not come back as it was saved")


_engines: dict[World, Any] = {}


def _engine(world: World) -> Any:
    if world not in _engines:
        _engines[world] = hpc.connect(world, "mpi").engine
    return _engines[world]


def make(world: World, variant: str) -> Measurable:
    """The subject of a variant."""
    kinds: dict[str, type] = {
        "memcpy": Memcpy,
        "save": Save,
        "save-and-wait": SaveAndWait,
        "disk": Disk,
    }
    if variant in ("crc32", "sha256", "blake2b"):
        return Checksum(world, variant)
    if variant in kinds:
        made: Measurable = kinds[variant](world)
        return made
    return Steps(world, variant)
