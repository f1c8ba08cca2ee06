"""Shuffled orders, and which of the measured blocks count. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import ConfigError

__all__ = ["Kept", "choose_blocks", "more_are_needed", "shuffled_order"]


def shuffled_order(variants: Sequence[str], *, seed: int, case: str, block: int) -> list[str]:
    """The order of the variants in a block: random, and the same whenever it is asked for.

    No variant is always first or always after a certain other one, so what a neighbour leaves
    behind (caches, clock rates) does not fall on the same variant each time.
    """
    order = list(variants)
    random.Random(f"{seed}/{case}/{block}").shuffle(order)
    return order


def more_are_needed(loads: Sequence[float], *, wanted: int, retries: int, limit: float) -> bool:
    """Whether to measure another block after those that had these foreign loads."""
    quiet = sum(load <= limit for load in loads)
    return quiet < wanted and len(loads) < wanted + retries


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Blocks that count."""

    indices: tuple[int, ...]
    num_noisy: int
    """How many of them were measured under too much foreign load, for want of quiet ones."""


def choose_blocks(loads: Sequence[float], *, wanted: int, limit: float) -> Kept:
    """Choose the quiet blocks, and where they are too few, the least disturbed of the others.

    The choice looks at the load alone, never at the times: leaving out slow blocks because they
    are slow would be cheating.
    """
    if wanted < 1 or len(loads) < wanted:
        raise ConfigError(f"{len(loads)} blocks were measured and {wanted} are wanted")
    quiet = [index for index in range(len(loads)) if loads[index] <= limit][:wanted]
    noisy = sorted(set(range(len(loads))) - set(quiet), key=lambda index: loads[index])
    filled = noisy[: wanted - len(quiet)]
    return Kept(indices=tuple(sorted([*quiet, *filled])), num_noisy=len(filled))
