"""Tensors put together from blocks of files, in whatever order the blocks come. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.dtypes import named_dtype
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.tree_file import Place, TensorSpec, Tree, unpack
from hpctrain.checkpoint.unflattening import Wanted, unflatten
from hpctrain.errors import CheckpointError
from hpctrain.pieces import Region

__all__ = ["Assembly"]


class _Room:
    """Memory that bytes of files go to."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def put(self, at: int, data: np.ndarray) -> None:
        self._memory[at : at + len(data)] = data


class _Scattered:
    """A stored block of which parts are wanted that are not consecutive in it.

    It is collected and, when its last byte has come, copied onward and forgotten.
    """

    def __init__(self, stored: Region, item_bytes: int) -> None:
        self._stored = stored
        self._item_bytes = item_bytes
        self._memory: np.ndarray | None = None
        self._num_missing = stored.num_elements * item_bytes
        self._onward: list[tuple[Region, np.ndarray]] = []

    def add(self, target: Region, memory: np.ndarray) -> None:
        """What of it is wanted, and where that goes."""
        self._onward.append((target, memory))

    def put(self, at: int, data: np.ndarray) -> None:
        if self._memory is None:
            self._memory = np.empty(self._num_missing, np.uint8)
        self._memory[at : at + len(data)] = data
        self._num_missing -= len(data)
        if self._num_missing == 0:
            self._copy(self._memory.reshape(*self._stored.shape, self._item_bytes))
            self._memory = None

    def _copy(self, source: np.ndarray) -> None:
        for target, memory in self._onward:
            common = self._stored.overlap(target)
            if common is not None:
                into = memory.reshape(*target.shape, self._item_bytes)
                into[common.slices_in(target)] = source[common.slices_in(self._stored)]


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a file and where they belong."""

    start: int
    stop: int
    room: _Room | _Scattered
    at: int


class Assembly:
    """The memory for a state, filled block by block; each tensor has memory of its own."""

    def __init__(
        self,
        manifest: Manifest,
        tree: Tree,
        *,
        own_rank: int | None,
        wanted: Iterable[Wanted] | None = None,
        skeleton: object = None,
    ) -> None:
        """Make room.

        Args:
            manifest: Of the checkpoint.
            tree: Of the checkpoint.
            own_rank: Whose own state is wanted; None: nobody's.
            wanted: The tensors, or pieces of them, that are wanted; None: all tensors.
            skeleton: The tree's, with pieces where they are wanted; None: the tree's own.

        Raises:
            CheckpointError: the tree does not fit the manifest.
        """
        self._manifest = manifest
        self._skeleton = tree.skeleton if skeleton is None else skeleton
        self.tensors: dict[Wanted, Tensor] = {}
        self._spans: list[list[_Span]] = [[] for _ in manifest.parts]
        self._own: np.ndarray | None = None
        for key in tree.tensors if wanted is None else wanted:
            name = key if isinstance(key, str) else key.name
            self._add_tensor(key, name, tree.tensors[name])
        if own_rank is not None and manifest.own is not None and own_rank < len(manifest.own):
            part, start, num_bytes = manifest.own[own_rank]
            self._own = np.empty(num_bytes, np.uint8)
            self._add_span(Place(part, start, num_bytes, 0), 0, num_bytes, _Room(self._own), 0)
        for spans in self._spans:
            spans.sort(key=lambda span: span.start)
        # One stored block may be wanted several times: ends need not come in order.
        self._stops = [
            list(itertools.accumulate((span.stop for span in spans), max)) for spans in self._spans
        ]

    def _add_tensor(self, key: Wanted, name: str, spec: TensorSpec) -> None:
        dtype = named_dtype(spec.dtype)
        whole = Region.whole(spec.shape)
        targets = (whole,) if isinstance(key, str) else key.regions
        made = torch.empty(spec.shape if isinstance(key, str) else key.shape, dtype=dtype)
        self.tensors[key] = made
        item_bytes = made.element_size()
        num_bytes = made.numel() * item_bytes
        memory = made.reshape(-1).view(torch.uint8).numpy() if num_bytes else np.empty(0, np.uint8)
        rooms = []
        start = 0
        for target in targets:
            stop = start + target.num_elements * item_bytes
            rooms.append((target, memory[start:stop]))
            start = stop
        found = 0
        for stored, places in spec.places.items():
            _check_places(name, stored, places, item_bytes)
            self._add_stored(stored, places, rooms, item_bytes)
            found += stored.num_elements
        if found != whole.num_elements:
            raise CheckpointError(
                f"tensor {name} has {found * item_bytes} bytes of {whole.num_elements * item_bytes}"
            )

    def _add_stored(
        self,
        stored: Region,
        places: Iterable[Place],
        rooms: Iterable[tuple[Region, np.ndarray]],
        item_bytes: int,
    ) -> None:
        """Say where the bytes of a stored block go."""
        scattered: _Scattered | None = None
        for target, memory in rooms:
            common = stored.overlap(target)
            if common is None:
                continue
            source, into = common.run_in(stored), common.run_in(target)
            if source is None or into is None:
                scattered = scattered or _Scattered(stored, item_bytes)
                scattered.add(target, memory)
                continue
            room = _Room(memory[into.start * item_bytes : into.stop * item_bytes])
            for place in places:
                low = source.start * item_bytes
                self._add_span(place, low, source.stop * item_bytes, room, low)
        if scattered is not None:
            for place in places:
                self._add_span(place, 0, stored.num_elements * item_bytes, scattered, 0)

    def _add_span(
        self, place: Place, low: int, high: int, room: _Room | _Scattered, base: int
    ) -> None:
        """Those bytes of a place that are wanted: from `low` to `high` of the stored block."""
        parts = self._manifest.parts
        if not 0 <= place.part < len(parts):
            raise CheckpointError(f"part {place.part} of {len(parts)} is not there")
        begin = parts[place.part].data_start + place.start
        if begin + place.num_bytes > parts[place.part].num_bytes:
            raise CheckpointError(f"{parts[place.part].name} ends before what should be in it")
        low, high = max(low, place.at), min(high, place.at + place.num_bytes)
        if low < high:
            start = begin + low - place.at
            self._spans[place.part].append(_Span(start, start + high - low, room, low - base))

    def is_wanted(self, part: int, start: int, stop: int) -> bool:
        """Whether something of these bytes of a file is wanted."""
        return any(True for _ in self._wanted(part, start, stop))

    def take(self, part: int, start: int, data: np.ndarray) -> None:
        """Put the bytes of a file from `start` on where they belong."""
        stop = start + len(data)
        for span in self._wanted(part, start, stop):
            low, high = max(span.start, start), min(span.stop, stop)
            span.room.put(span.at + low - span.start, data[low - start : high - start])

    def _wanted(self, part: int, start: int, stop: int) -> Iterable[_Span]:
        first = bisect.bisect_right(self._stops[part], start)
        for span in itertools.islice(self._spans[part], first, None):
            if span.start >= stop:
                return
            if span.stop > start:
                yield span

    def state(self) -> object:
        """The whole tree, once all blocks have been taken."""
        return unflatten(self._skeleton, self.tensors)

    def own(self) -> object | None:
        """What the rank alone knew."""
        return None if self._own is None else unpack(self._own.data)


def _check_places(name: str, stored: Region, places: Iterable[Place], item_bytes: int) -> None:
    done, num_bytes = 0, stored.num_elements * item_bytes
    for place in places:
        if place.at != done:
            raise CheckpointError(f"tensor {name} has a hole at byte {done}")
        done += place.num_bytes
    if done != num_bytes:
        raise CheckpointError(f"tensor {name} has {done} bytes of {num_bytes}")
