"""A rank's side of `data_movement`: the same rows from rank 0 to all, in several ways."""

from __future__ import annotations

import gc
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import hpctrain as hpc
from hpctrain.bench import Measurable, parse_size
from hpctrain.data import CHUNK_BYTES, split_bytes
from hpctrain.errors import CollectiveError
from hpctrain.world import World

__all__ = ["make"]

_COLUMNS = 3072
_MESSAGE_BYTES = 2**30
_held: dict[str, np.ndarray] = {}


def _rows(world: World, case: str) -> np.ndarray | None:
    """Rank 0's data set, made once for all subjects of a case."""
    if world.rank != 0:
        return None
    if case not in _held:
        _held.clear()
        num_rows = parse_size(case) // (4 * _COLUMNS)
        _held[case] = np.random.default_rng(1).random((num_rows, _COLUMNS), np.float32)
    return _held[case]


def _memory(field: str) -> int:
    """Bytes of this process: VmRSS or VmHWM, or Pss."""
    name = "smaps_rollup" if field == "Pss" else "status"
    text = Path(f"/proc/self/{name}").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise CollectiveError(f"/proc/self/{name} has no {field}")
    return int(found[1]) * 1024


class Moving:
    """What all ways have in common."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows: np.ndarray | None = None
        self.moved_bytes = 0

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: get the data."""
        self.rows = _rows(self.world, case)
        num_rows = parse_size(case) // (4 * _COLUMNS)
        self.moved_bytes = 4 * _COLUMNS * (num_rows // self.world.size) * (self.world.size - 1)
        self.ready()
        return {}

    def ready(self) -> None:
        """Get whatever is not to be timed."""

    def once(self) -> object:
        """Collective: move the data."""
        raise NotImplementedError

    def run(self, repeats: int) -> None:
        """Collective: so many times."""
        for _ in range(repeats):
            self.once()

    def counts(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def finish(self) -> dict[str, object]:
        """Let the memory go."""
        self.rows = None
        return {}


class Memcpy(Moving):
    """One copy of the bytes that move, on rank 0, into memory that is there already."""

    def ready(self) -> None:
        """Touch the target."""
        self.target = np.zeros(self.moved_bytes if self.rows is not None else 0, np.uint8)

    def once(self) -> object:
        """Copy."""
        if self.rows is not None:
            np.copyto(self.target, self.rows.reshape(-1).view(np.uint8)[: self.moved_bytes])
        return None

    def finish(self) -> dict[str, object]:
        """Let the memory go."""
        self.target = np.empty(0, np.uint8)
        return super().finish()


class Send(Moving):
    """One MPI_Send to each rank of its part of the bytes, unshuffled.

    Args:
        world: The ranks.
        fresh: Receive into memory that is new each time, as what `scatter` gives is.
    """

    def __init__(self, world: World, *, fresh: bool) -> None:
        super().__init__(world)
        self.fresh = fresh

    def ready(self) -> None:
        """Touch the target."""
        self.part = self.moved_bytes // max(1, self.world.size - 1)
        self.target = np.zeros(self.part if self.world.rank else 0, np.uint8)

    def once(self) -> object:
        """Send, or receive."""
        comm = self.world.comm
        if self.rows is not None:
            whole = self.rows.reshape(-1).view(np.uint8)
            for rank in range(1, self.world.size):
                for start, stop in split_bytes(self.part, _MESSAGE_BYTES):
                    first = (rank - 1) * self.part
                    comm.Send(whole[first + start : first + stop], dest=rank)
            return None
        target = np.empty(self.part, np.uint8) if self.fresh else self.target
        for start, stop in split_bytes(self.part, _MESSAGE_BYTES):
            comm.Recv(target[start:stop], source=0)
        return target

    def finish(self) -> dict[str, object]:
        """Let the memory go."""
        self.target = np.empty(0, np.uint8)
        return super().finish()


class Scatter(Moving):
    """`hpctrain.scatter`.

    Args:
        world: The ranks.
        shuffle: In the epoch's order; or in the order of the data.
    """

    def __init__(self, world: World, *, shuffle: bool) -> None:
        super().__init__(world)
        self.shuffle = shuffle

    def once(self) -> object:
        """Scatter."""
        return hpc.scatter(self.world, self.rows, shuffle=self.shuffle)

    def finish(self) -> dict[str, object]:
        """Collective: check the rows, and measure the memory that one scatter takes at its peak."""
        gc.collect()
        self.world.comm.Barrier()
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        shard = self.once()
        extra = _memory("VmHWM") - before
        if not isinstance(shard, hpc.Shard):
            raise CollectiveError("scatter gave no shard")
        own = 4 * _COLUMNS * shard.num_rows if self.world.rank else 0
        extras = self.world.comm.allgather(extra - own)
        self._check(shard)
        super().finish()
        chunk = CHUNK_BYTES / 2**20
        return {
            "root beside data MiB": extras[0] / 2**20,
            "others beside share MiB": max(extras[1:], default=0) / 2**20,
            "chunk MiB": chunk,
        }

    def _check(self, shard: hpc.Shard) -> None:
        indices = self.world.comm.gather(shard.indices[:64], root=0)
        sent = None
        if self.rows is not None and indices is not None:
            sent = [self.rows[part] for part in indices]
        wanted = self.world.comm.scatter(sent, root=0)
        if not np.array_equal(shard.take(np.arange(min(64, shard.num_rows))), wanted):
            raise CollectiveError("scatter gave other rows than it should")


class Pickled(Moving):
    """mpi4py's `comm.scatter`: one object for each rank, pickled.

    Args:
        world: The ranks.
        lists: Lists of samples; or one array for each rank.
    """

    def __init__(self, world: World, *, lists: bool) -> None:
        super().__init__(world)
        self.lists = lists

    def ready(self) -> None:
        """Cut the data, which is not timed."""
        self.parts: list[object] | None = None
        if self.rows is not None:
            cut = [self.rows[rank :: self.world.size] for rank in range(self.world.size)]
            self.parts = [list(part) for part in cut] if self.lists else list(cut)

    def once(self) -> object:
        """Scatter."""
        return self.world.comm.scatter(self.parts, root=0)

    def finish(self) -> dict[str, object]:
        """Let the memory go."""
        self.parts = None
        return super().finish()


class Share(Moving):
    """`hpctrain.share` of a file, and the memory of all ranks of the node together."""

    def ready(self) -> None:
        """Collective: write the file."""
        self.folder = tempfile.TemporaryDirectory() if self.world.rank == 0 else None
        name = None if self.folder is None else f"{self.folder.name}/rows.npy"
        self.path: str = self.world.comm.bcast(name, root=0)
        if self.rows is not None:
            np.save(self.path, self.rows)
        self.world.comm.Barrier()

    def once(self) -> object:
        """Share the file; what was shared before goes."""
        return hpc.share(self.world, self.path)

    def finish(self) -> dict[str, object]:
        """Collective: read everything on all ranks, then see what the node has more than before."""
        before = self._node_bytes()
        source = self.once()
        if not isinstance(source, hpc.data.Shared):
            raise CollectiveError("share gave no source")
        total = float(source.data.sum())
        size = source.data.nbytes
        if len(set(self.world.comm.allgather(total))) > 1:
            raise CollectiveError("the ranks read different data")
        more = self._node_bytes() - before
        if self.folder is not None:
            self.folder.cleanup()
        super().finish()
        return {"PSS of the node, copies": more / size}

    def _node_bytes(self) -> int:
        gc.collect()
        self.world.comm.Barrier()
        total: int = self.world.comm.allreduce(_memory("Pss"))
        self.world.comm.Barrier()
        return total


def make(world: World, variant: str) -> Measurable:
    """The subject of a variant."""
    ways: dict[str, Callable[[], Measurable]] = {
        "memcpy": lambda: Memcpy(world),
        "mpi-send": lambda: Send(world, fresh=False),
        "mpi-send-fresh": lambda: Send(world, fresh=True),
        "scatter": lambda: Scatter(world, shuffle=True),
        "scatter-stored": lambda: Scatter(world, shuffle=False),
        "pickled-arrays": lambda: Pickled(world, lists=False),
        "pickled-lists": lambda: Pickled(world, lists=True),
        "share": lambda: Share(world),
    }
    return ways[variant]()
