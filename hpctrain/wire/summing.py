"""How encoded gradients are added up where they must be decoded first; for any carrier."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpctrain.wire.wire import Wire

__all__ = ["add_decoded"]


def add_decoded(
    flat: Tensor,
    wire: Wire,
    key: str,
    *,
    counts: list[int],
    rank: int,
    alltoall: Callable[[Tensor, list[int], list[int]], Tensor],
    allgather: Callable[[Tensor, list[int]], Tensor],
) -> None:
    """Collective: add up a flat tensor over peers in place; all of them get the same bits.

    Everybody gets one slice of all others, decodes and adds it up in the order of the peers, and
    encodes the sum again for all: for itself as well.

    Args:
        flat: As many elements everywhere.
        wire: The same kind everywhere.
        key: What this is, the same in every step.
        counts: The elements of each peer's slice.
        rank: This one's place among the peers.
        alltoall: Collective: sends bytes, so many to each peer, and returns what came, so many from
            each.
        allgather: Collective: joins everybody's bytes, so many of each.
    """
    sizes = [wire.num_bytes(count) for count in counts]
    come = [sizes[rank]] * len(counts)
    terms = [
        wire.encode(part, f"{key}/{peer}") for peer, part in enumerate(torch.split(flat, counts))
    ]
    arrived = torch.split(alltoall(torch.cat(terms), sizes, come), come)
    total, term = flat.new_empty(counts[rank]), flat.new_empty(counts[rank])
    wire.decode(arrived[0], total)
    for part in arrived[1:]:
        wire.decode(part, term)
        total += term
    joined = allgather(wire.encode(total, f"{key}/sum"), sizes)
    for part, target in zip(torch.split(joined, sizes), torch.split(flat, counts), strict=True):
        wire.decode(part, target)
