"""A state must be the same on all ranks: where it is not, the place is named.

Several ranks write, each a part of the tensors: statistics that each rank has kept for itself, as
those of batch normalisation, would be stored as a mixture that no rank has ever had. So places,
shapes, plain values and the first bytes of every tensor are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from hpctrain.checkpoint.flattening import Flat
from hpctrain.checkpoint.preparing import Prepared
from hpctrain.errors import CheckpointError
from hpctrain.world import World

__all__ = ["NOTHING", "Mark", "first_difference", "heads_of", "mark_of", "refuse_differences"]

_HEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Mark:
    """What must be equal on all ranks, in short."""

    step: int
    has_own: bool
    num_leaves: int
    leaves: int
    heads: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """As what ranks compare."""
        return self.step, int(self.has_own), self.num_leaves, self.leaves, self.heads


NOTHING = Mark(0, False, 0, 0, 0)
"""Of a rank that has nothing to save, because it has trouble."""


def mark_of(prepared: Prepared) -> Mark:
    """The mark of what a rank brings to a save. No communication."""
    flat = prepared.flat
    heads = heads_of(flat.tensors)
    return Mark(
        prepared.step,
        prepared.own is not None,
        len(flat.leaves),
        flat.fingerprint(),
        sum(zlib.crc32(name.encode(), head) for name, head in heads.items()),
    )


def heads_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of the first bytes of each tensor. Those of a GPU come over in one message."""
    elsewhere: dict[torch.device, list[str]] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            found[name] = _head(tensor)
            if tensor.device.type != "cpu":
                elsewhere.setdefault(tensor.device, []).append(name)
    for names in elsewhere.values():
        together = torch.cat([found[name] for name in names]).cpu()
        start = 0
        for name in names:
            stop = start + len(found[name])
            found[name] = together[start:stop]
            start = stop
    return {name: zlib.crc32(head.numpy().data) for name, head in found.items()}


def _head(tensor: Tensor) -> Tensor:
    most = max(1, _HEAD_BYTES // tensor.element_size())
    while tensor.ndim > 1 and tensor.numel() > most:
        tensor = tensor[0]  # flattening all of one that is not contiguous would copy it
    flat = tensor.reshape(-1)[:most].resolve_conj().resolve_neg().contiguous()
    return flat.view(torch.uint8)


def first_difference(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """The first place where two states are not alike, in words; None: there is none. Pure."""
    for place, what in theirs.items():
        if place not in mine:
            return f"{place} is not there"
        if mine[place] != what:
            return f"{place} is {mine[place]} and on rank 0 {what}"
    extra = next((place for place in mine if place not in theirs), None)
    return None if extra is None else f"{extra} is not on rank 0"


def refuse_differences(world: World, flat: Flat, mark: Mark) -> NoReturn:
    """Collective: say where the ranks differ, after they have found that they do.

    Raises:
        CheckpointError: on all ranks, with the first difference of the first rank that differs.
    """
    heads = heads_of(flat.tensors)
    first_mark, first_leaves, first_heads = world.comm.bcast((mark, flat.leaves, heads), root=0)
    trouble = None
    if mark.step != first_mark.step:
        trouble = f"step is {mark.step} and on rank 0 {first_mark.step}"
    elif mark.has_own != first_mark.has_own:
        trouble = "own is given and on rank 0 not, or the other way round"
    elif flat.leaves != first_leaves:
        trouble = first_difference(flat.leaves, first_leaves)
    else:
        names = [name for name, head in heads.items() if head != first_heads[name]]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            trouble = f"tensor {names[0]}{more} has other values than on rank 0"
    told: list[str | None] = world.comm.allgather(trouble)
    rank = next((rank for rank, text in enumerate(told) if text), 0)
    raise CheckpointError(
        f"the state to be saved differs between ranks: on rank {rank} {told[rank]}; make it equal, "
        "or put what differs by rank into own="
    )
