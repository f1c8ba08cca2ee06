"""Which rank's weights are the odd ones, and how they differ. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.log import format_ranges

__all__ = ["Odd", "describe_difference", "find_odd", "render"]

_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """A tensor that is not the same on all ranks."""

    name: str
    reference: int
    """The lowest rank of the most frequent version."""
    ranks: tuple[int, ...]
    """Those that have another version than most; where there is no majority, than the reference."""
    majority: bool
    """Whether most ranks have one version, so that the others are the odd ones."""


def find_odd(name: str, digests: Sequence[Hashable]) -> Odd:
    """Find the ranks whose digest is not what most ranks have.

    Args:
        name: Of the tensor.
        digests: Of all ranks, in rank order.
    """
    groups: dict[Hashable, list[int]] = {}
    for rank, one in enumerate(digests):
        groups.setdefault(one, []).append(rank)
    usual, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    return Odd(
        name=name,
        reference=usual[0],
        ranks=tuple(sorted(rank for ranks in others for rank in ranks)),
        majority=2 * len(usual) > len(digests),
    )


def describe_difference(mine: Tensor | None, theirs: Tensor | None) -> str:
    """How a tensor differs from the reference's; nothing where it does not."""
    if mine is None or theirs is None:
        return "" if mine is theirs else "is no longer there on one side"
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"is {_kind(mine)} instead of {_kind(theirs)}"
    size = mine.element_size()
    own, other = (t.reshape(-1).view(torch.uint8).view(-1, size) for t in (mine, theirs))
    changed = (own != other).any(1).nonzero().view(-1)
    if not len(changed):
        return ""
    first = int(changed[0])
    flipped = sum(int(byte).bit_count() for byte in (own[first] ^ other[first]).tolist())
    bits = f"{flipped} bit{'s' if flipped > 1 else ''}"
    values = f"{mine.reshape(-1)[first].item()!r} instead of {theirs.reshape(-1)[first].item()!r}"
    where = f"element {first} is {values}, {bits} apart"
    return f"{len(changed)} of {mine.numel()} elements differ, {where}"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def render(
    odd: Sequence[Odd],
    details: Sequence[str],
    hosts: Sequence[str],
    *,
    step: int,
    num_more: int = 0,
) -> str:
    """The message of the error, the same on all ranks.

    Args:
        odd: What differs, at least one.
        details: Of all ranks, how the first of them differs from the reference's.
        hosts: Of all ranks.
        step: At which it was seen.
        num_more: How many tensors differ besides.
    """
    first = odd[0]
    names = [one.name for one in odd[1:_MOST_NAMED]]
    more = len(odd) - 1 - len(names) + num_more
    also = f"; also {', '.join(names)}" if names else ""
    also += f" and {more} more" if more else ""
    s = "s" if len(first.ranks) > 1 else ""
    who = f"rank{s} {format_ranges(first.ranks, limit=16)} of {len(hosts)}"
    whose = [f"rank {r} on {hosts[r]}: {details[r]}" for r in first.ranks[:_MOST_NAMED]]
    against = "the others" if first.majority else f"rank {first.reference}"
    doubt = "" if first.majority else " (no majority tells which of them is right)"
    one_bit = all("1 bit apart" in details[r] and "1 of " in details[r] for r in first.ranks)
    cause = (
        "one flipped bit points to memory: have the node looked at"
        if one_bit
        else "look for updates, or changes of weights in the script, that not all ranks make alike"
    )
    return (
        f"step {step}: {first.name} of {who} differs from that of {against}{doubt}; "
        f"{'; '.join(whose)}{also}; {cause}, and go on from a checkpoint before this step"
    )
