"""What the ranks of a group are about to do, compared before they do it; small tensors go along.

Every collective begins with one message of fixed size from each rank to all: a digest of the call,
and behind it the values, where they fit. A small collective has ended then; a rank that makes
another call is refused on all ranks, whatever the sizes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.errors import CollectiveError, ConfigError, HpcTrainError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.engines import Engine

__all__ = ["Comparer", "digest", "in_words", "room_for"]

_TROUBLE = -1
_HEAD = 16  # a multiple of every element's size, as older versions of torch want it
_MOST_BYTES = 4096
_MOST_OF_ALL_BYTES = 32768
_MOST_VIEWS = 256


def room_for(num_ranks: int) -> int:
    """How many bytes of values go along with a comparison. Pure."""
    return max(64, min(_MOST_BYTES, _MOST_OF_ALL_BYTES // num_ranks // 64 * 64))


class Comparer:
    """Compares the calls of a group's ranks.

    Args:
        comm: The ranks.
        engine: Over the same ranks; its watchdog is told.
        where: The group in words.
        members: These ranks in the world.
    """

    def __init__(self, comm: Comm, engine: Engine, where: str, members: Sequence[int]) -> None:
        self._comm = comm
        self._engine = engine
        self._where = where
        self._members = tuple(members)
        self._room = room_for(len(self._members))
        width = _HEAD + self._room
        self._sent = torch.zeros(width, dtype=torch.uint8)
        self._came = torch.zeros(len(self._members), width, dtype=torch.uint8)
        self._own = self._sent.numpy().view("int64")
        self._heads = self._came.numpy().view("int64")[:, 0]
        self._buffers = [_bytes_of(self._sent, width), _bytes_of(self._came, width)]
        self._views: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor's values go along; the same where shapes and dtypes are."""
        return tensor.device.type == "cpu" and tensor.nbytes <= self._room

    def compare(self, text: str, trouble: str | None = None) -> None:
        """Collective: raise on all ranks unless all are about to do the same.

        Args:
            text: This rank's call.
            trouble: Why its arguments do not fit together, or None.

        Raises:
            CollectiveError: calls, shapes, dtypes or operations differ.
            ConfigError: some rank's arguments do not fit together.
        """
        self._own[0] = digest(text) if trouble is None else _TROUBLE

        def exchange() -> None:
            self._comm.Allgather(*self._buffers)
            heads: list[int] = self._heads.tolist()
            if heads[0] == _TROUBLE or heads.count(heads[0]) != len(heads):
                self.refuse(text, trouble)

        self._engine.meet(exchange, f"{text} in the {self._where}", "", None)

    def swap(self, text: str, tensor: Tensor, trouble: str | None = None) -> Tensor:
        """Collective: compare, and return every rank's values as rows, valid until the next call.

        Args:
            text: This rank's call; it says shape and dtype.
            tensor: Such that `fits`.
            trouble: As for `compare`.
        """
        key = tensor.dtype, tensor.numel()
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            stop = _HEAD + tensor.nbytes
            views = self._sent[_HEAD:stop].view(key[0]), self._came[:, _HEAD:stop].view(key[0])
            self._views[key] = views
        views[0].copy_(tensor.detach().reshape(-1))
        self.compare(text, trouble)
        return views[1]

    def refuse(self, text: str, trouble: str | None = None) -> NoReturn:
        """Collective: raise what differs between the ranks' calls, on all of them."""
        raise self._difference(self._comm.allgather((text, trouble)))

    def _difference(self, told: list[tuple[str, str | None]]) -> HpcTrainError:
        where, members = self._where, self._members
        for rank, (text, trouble) in enumerate(told):
            if trouble is not None:
                return ConfigError(f"rank {members[rank]}, {where}: {text}: {trouble}")
        first = told[0][0]
        odd = next((rank for rank, (text, _) in enumerate(told) if text != first), None)
        if odd is None:
            return CollectiveError(
                f"{where}: the ranks call {first} for different models, or not equally often; all "
                "ranks of a group must make the same calls in the same order"
            )
        return CollectiveError(
            f"{where}: rank {members[0]} calls {first}, rank {members[odd]} calls {told[odd][0]}; "
            "all ranks of a group must make the same calls in the same order, with equal shapes, "
            "dtypes and operations"
        )


def _bytes_of(tensor: Tensor, count: int) -> list[object]:
    return [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), count, MPI.BYTE]


@functools.lru_cache(maxsize=4096)
def digest(text: str) -> int:
    """A number of 56 bits that differs, as good as always, when texts do."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def in_words(*tensors: Tensor) -> str:
    """Dtypes and shapes."""
    return ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in tensors
    )
