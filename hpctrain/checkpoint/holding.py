"""Who holds which pieces: asked when it changes, checked, and remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpctrain.checkpoint.alike import heads_of
from hpctrain.checkpoint.flattening import Flat
from hpctrain.checkpoint.meeting import most
from hpctrain.errors import CheckpointError
from hpctrain.pieces import Region, trouble_with_cover
from hpctrain.world import World

__all__ = ["Holdings", "refuse_gaps"]

_Key = tuple[str, Region]
_NOT_HERE = -(1 << 40)


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
        found = most(world, np.concatenate([first, last]), "comparing pieces", timeout_s=timeout_s)
        wrong = [key for i, key in enumerate(shared) if found[i] != -found[len(shared) + i]]
        if wrong:
            (name, region), ranks = wrong[0], self.holders[wrong[0]]
            raise CheckpointError(
                f"tensor {name}: ranks {', '.join(map(str, ranks))} hold {region}, with different "
                "values; make them equal before saving"
            )
