"""Tensors put together from blocks of files, in whatever order the blocks come. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.dtypes import named_dtype
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.tree_file import Tree, unpack
from hpctrain.checkpoint.unflattening import unflatten
from hpctrain.errors import CheckpointError

__all__ = ["Assembly"]


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a file and where they belong."""

    start: int
    stop: int
    room: np.ndarray


class Assembly:
    """The memory for a state, filled block by block; each tensor has memory of its own."""

    def __init__(
        self,
        manifest: Manifest,
        tree: Tree,
        *,
        own_rank: int | None,
        names: Collection[str] | None = None,
    ) -> None:
        """Make room.

        Args:
            manifest: Of the checkpoint.
            tree: Of the checkpoint.
            own_rank: Whose own state is wanted; None: nobody's.
            names: The tensors that are wanted; None: all.

        Raises:
            CheckpointError: the tree does not fit the manifest.
        """
        self._tree = tree
        self.tensors: dict[str, Tensor] = {}
        self._spans: list[list[_Span]] = [[] for _ in manifest.parts]
        self._own: np.ndarray | None = None
        for name in tree.tensors if names is None else names:
            self._add_tensor(manifest, name)
        if own_rank is not None and manifest.own is not None and own_rank < len(manifest.own):
            part, start, num_bytes = manifest.own[own_rank]
            self._own = np.empty(num_bytes, np.uint8)
            self._add(manifest, part, start, self._own)
        for spans in self._spans:
            spans.sort(key=lambda span: span.start)
        self._stops = [[span.stop for span in spans] for spans in self._spans]

    def _add_tensor(self, manifest: Manifest, name: str) -> None:
        spec = self._tree.tensors[name]
        made = torch.empty(spec.shape, dtype=named_dtype(spec.dtype))
        self.tensors[name] = made
        num_bytes = made.numel() * made.element_size()
        flat = made.reshape(-1).view(torch.uint8).numpy() if num_bytes else np.empty(0, np.uint8)
        done = 0
        for place in spec.places:
            if place.at != done:
                raise CheckpointError(f"tensor {name} has a hole at byte {done}")
            done += place.num_bytes
            self._add(manifest, place.part, place.start, flat[place.at : done])
        if done != num_bytes:
            raise CheckpointError(f"tensor {name} has {done} bytes of {num_bytes}")

    def _add(self, manifest: Manifest, part: int, start: int, room: np.ndarray) -> None:
        if not 0 <= part < len(manifest.parts):
            raise CheckpointError(f"part {part} of {len(manifest.parts)} is not there")
        begin = manifest.parts[part].data_start + start
        if begin + len(room) > manifest.parts[part].num_bytes:
            raise CheckpointError(f"{manifest.parts[part].name} ends before what should be in it")
        if len(room):
            self._spans[part].append(_Span(begin, begin + len(room), room))

    def is_wanted(self, part: int, start: int, stop: int) -> bool:
        """Whether something of these bytes of a file is wanted."""
        spans = self._spans[part]
        first = bisect.bisect_right(self._stops[part], start)
        return first < len(spans) and spans[first].start < stop

    def take(self, part: int, start: int, data: np.ndarray) -> None:
        """Put the bytes of a file from `start` on where they belong."""
        stop = start + len(data)
        spans = self._spans[part]
        for span in spans[bisect.bisect_right(self._stops[part], start) :]:
            if span.start >= stop:
                break
            low, high = max(span.start, start), min(span.stop, stop)
            span.room[low - span.start : high - span.start] = data[low - start : high - start]

    def state(self) -> object:
        """The whole tree, once all blocks have been taken."""
        return unflatten(self._tree.skeleton, self.tensors)

    def own(self) -> object | None:
        """What the rank alone knew."""
        return None if self._own is None else unpack(self._own.data)
