"""What ranks compare before a save: that they bring the same state, and who holds which pieces.

Several ranks write, each a part of the tensors: statistics that each rank has kept for itself, as
those of batch normalisation, would be stored as a mixture that no rank has ever had. So places,
shapes, plain values and the first bytes of every tensor are compared, in one message.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.tree import Flat
from hpctrain.errors import CheckpointError, TimedOutError
from hpctrain.pieces import Region, trouble_with_cover
from hpctrain.world import World, poll, roll_call

__all__ = [
    "NO_MARKS",
    "Holdings",
    "first_difference",
    "heads_of",
    "largest_of_all",
    "marks_of",
    "refuse_differences",
    "refuse_gaps",
    "same_on_all",
]

_LONGEST_NAP_S = 0.0005
_MARGIN_S = 60.0
_HEAD_BYTES = 1024
_Key = tuple[str, Region]
_NOT_HERE = -(1 << 40)


def same_on_all(world: World, numbers: Sequence[int], what: str, *, timeout_s: float) -> list[bool]:
    """Collective: for each number, whether it is the same on all ranks.

    All sleep in between, so that ranks that still copy have the cores.

    Raises:
        TimedOutError: some ranks did not arrive in time; they are named.
    """
    mine = np.array([*numbers, *(-number for number in numbers)], np.int64)
    found = largest_of_all(world, mine, what, timeout_s=timeout_s)
    half = len(numbers)
    return [bool(found[i] == -found[half + i]) for i in range(half)]


def largest_of_all(world: World, mine: np.ndarray, what: str, *, timeout_s: float) -> np.ndarray:
    """Collective: the largest of each number on all ranks.

    Raises:
        TimedOutError: some ranks did not arrive in time; they are named.
    """
    if world.size == 1:
        return mine
    from mpi4py import MPI

    found = np.empty_like(mine)
    with world.watching.announce(what, timeout_s=timeout_s):
        request = world.comm.Iallreduce(mine, found, op=MPI.MAX)
        # Where there is a watchdog, it speaks first: it can tell what the missing ranks do.
        limit_s = timeout_s if world.watching.watchdog is None else 2 * timeout_s + _MARGIN_S
        if not poll(request.Test, timeout_s=limit_s, spin_s=0.0, longest_nap_s=_LONGEST_NAP_S):
            roll_call(world.comm, what, timeout_s=1.0)  # names those who are missing
            raise TimedOutError(f"timed out after {limit_s:g} s waiting for all ranks at: {what}")
    return found


NO_MARKS = (0, 0, 0, 0, 0)
"""The marks of a rank that has nothing to save because of an error there."""


def marks_of(flat: Flat, *, step: int, has_own: bool) -> tuple[int, ...]:
    """What must be equal on all ranks, in short. No communication."""
    heads = heads_of(flat.tensors)
    return (
        step,
        int(has_own),
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
    """A description of the first place where two states differ; None: there is none. Pure."""
    for place, what in theirs.items():
        if place not in mine:
            return f"{place} is not there"
        if mine[place] != what:
            return f"{place} is {mine[place]} and on rank 0 {what}"
    extra = next((place for place in mine if place not in theirs), None)
    return None if extra is None else f"{extra} is not on rank 0"


def refuse_differences(world: World, flat: Flat, marks: tuple[int, ...]) -> NoReturn:
    """Collective: say where the ranks differ, after they have found that they do.

    Raises:
        CheckpointError: on all ranks, with the first difference of the first rank that differs.
    """
    heads = heads_of(flat.tensors)
    (step, has_own, *_), leaves, first_heads = world.comm.bcast((marks, flat.leaves, heads), root=0)
    trouble = None
    if marks[0] != step:
        trouble = f"step is {marks[0]} and on rank 0 {step}"
    elif marks[1] != has_own:
        trouble = "own is given and not on rank 0, or vice versa"
    elif flat.leaves != leaves:
        trouble = first_difference(flat.leaves, leaves)
    else:
        names = [name for name, head in heads.items() if head != first_heads[name]]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            trouble = f"tensor {names[0]}{more} has different values than on rank 0"
    told: list[str | None] = world.comm.allgather(trouble)
    rank = next((rank for rank, text in enumerate(told) if text), 0)
    raise CheckpointError(
        f"the state to be saved differs between ranks: on rank {rank} {told[rank]}; make it "
        "equal, or put rank-specific state into own="
    )


def refuse_gaps(flat: Flat, holders: Mapping[_Key, Sequence[int]]) -> None:
    """Check that the pieces of every tensor make up the whole. Pure.

    Raises:
        CheckpointError: they overlap in part, or some are missing; the tensor is named.
    """
    by_name: dict[str, dict[Region, Sequence[int]]] = {name: {} for name in flat.pieces}
    for (name, region), ranks in holders.items():
        by_name[name][region] = ranks
    for name, held in sorted(by_name.items()):
        trouble = trouble_with_cover(flat.pieces[name].shape, held)
        if trouble is not None:
            raise CheckpointError(f"tensor {name}: {trouble}")


class Holdings:
    """What all ranks hold of the tensors that are in pieces, as of the last save."""

    def __init__(self) -> None:
        self._mine: frozenset[tuple[str, tuple[Region, ...]]] | None = None
        self.holders: dict[_Key, tuple[int, ...]] = {}
        """By tensor and block: the ranks that hold it."""

    def has_changed(self, flat: Flat) -> bool:
        """Whether this rank holds other pieces than at the last save. No communication."""
        mine = frozenset((name, piece.regions) for name, piece in flat.pieces.items())
        return mine != self._mine

    def ask(self, world: World, flat: Flat) -> None:
        """Collective: learn who holds what; the names of pieces must match.

        Raises:
            CheckpointError: on all ranks: pieces of a tensor overlap in part, or some are missing.
        """
        names = sorted(flat.pieces)
        told = world.comm.allgather([flat.pieces[name].regions for name in names])
        holders: dict[_Key, list[int]] = {}
        for rank, regions in enumerate(told):
            for name, held in zip(names, regions, strict=True):
                for region in held:
                    holders.setdefault((name, region), []).append(rank)
        refuse_gaps(flat, holders)
        self.holders = {key: tuple(ranks) for key, ranks in holders.items()}
        self._mine = frozenset((name, piece.regions) for name, piece in flat.pieces.items())

    def compare(self, world: World, flat: Flat, *, timeout_s: float) -> None:
        """Collective: compare the first bytes of what several ranks hold.

        Raises:
            CheckpointError: on all ranks: a block has other values on one rank than on another.
        """
        shared = [key for key, ranks in self.holders.items() if len(ranks) > 1]
        if not shared:
            return
        held = flat.held()
        here = {key: held[key] for key in shared if key in held}
        heads = heads_of({str(i): tensor for i, tensor in enumerate(here.values())})
        mine = {key: heads[str(i)] for i, key in enumerate(here)}
        first = np.array([mine.get(key, _NOT_HERE) for key in shared], np.int64)
        last = np.array([-mine[key] if key in mine else _NOT_HERE for key in shared], np.int64)
        found = largest_of_all(
            world, np.concatenate([first, last]), "comparing pieces", timeout_s=timeout_s
        )
        wrong = [key for i, key in enumerate(shared) if found[i] != -found[len(shared) + i]]
        if wrong:
            (name, region), ranks = wrong[0], self.holders[wrong[0]]
            raise CheckpointError(
                f"tensor {name}: ranks {', '.join(map(str, ranks))} hold {region}, with different "
                "values; make them equal before saving"
            )
