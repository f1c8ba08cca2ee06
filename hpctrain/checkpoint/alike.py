"""A state must be the same on all ranks: where it is not, the place is named."""

from __future__ import annotations

from typing import NoReturn

from hpctrain.checkpoint.flattening import Flat
from hpctrain.errors import CheckpointError
from hpctrain.world import World

__all__ = ["first_difference", "refuse_differences"]


def first_difference(mine: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first place where two states are not alike, in words; None: there is none. Pure."""
    for place, what in theirs.items():
        if place not in mine:
            return f"{place} is not there"
        if mine[place] != what:
            return f"{place} is {mine[place]} and on rank 0 {what}"
    extra = next((place for place in mine if place not in theirs), None)
    return None if extra is None else f"{extra} is not on rank 0"


def refuse_differences(world: World, flat: Flat, step: int, has_own: bool) -> NoReturn:
    """Collective: say where the ranks differ, after they have found that they do.

    Raises:
        CheckpointError: on all ranks, with the first difference of the first rank that differs.
    """
    first = world.comm.bcast((step, has_own, flat.leaves), root=0)
    trouble = None
    if step != first[0]:
        trouble = f"step is {step} and on rank 0 {first[0]}"
    elif has_own != first[1]:
        trouble = "own is given on some ranks only"
    else:
        trouble = first_difference(flat.leaves, first[2])
    told: list[str | None] = world.comm.allgather(trouble)
    rank = next((rank for rank, text in enumerate(told) if text), 0)
    raise CheckpointError(
        f"the state to be saved differs between ranks: on rank {rank} {told[rank]}; what differs "
        "by rank belongs into own="
    )
