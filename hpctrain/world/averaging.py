"""The mean of a number or a small tensor over all ranks: `world.mean`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError
from hpctrain.log import name_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Comm
    from torch import Tensor

__all__ = ["mean_over_ranks", "trouble_with_values"]

_NUMBER = "a number"


def mean_over_ranks(comm: Comm, value: float | Tensor, weight: float) -> float | Tensor:
    """Collective: the weighted mean of every rank's value; kind and shape must match.

    All ranks learn what each brings before anything is summed, so that all of them raise together.
    Numbers are summed in the order of the ranks: the same bits everywhere.

    Raises:
        ConfigError: on all ranks; see `trouble_with_values`.
    """
    import torch

    tensor = value if isinstance(value, torch.Tensor) else None
    number, kind = 0.0, _NUMBER
    if tensor is not None:
        complex_ = "complex " if tensor.is_complex() else ""
        kind = f"a {complex_}tensor of shape {tuple(tensor.shape)}"
    else:
        try:
            number = float(value)  # numpy's numbers and those of other libraries, too
        except (TypeError, ValueError):
            kind = type(value).__name__
    told: list[tuple[str, float, float]] = comm.allgather((kind, _as_weight(weight), number))
    kinds, weights, numbers = zip(*told, strict=True)
    trouble = trouble_with_values(kinds, weights)
    if trouble is not None:
        raise ConfigError(f"world.mean: {trouble}")
    total = sum(weights)
    if tensor is None:
        return float(sum(n * w for n, w in zip(numbers, weights, strict=True) if w) / total)
    own = tensor.detach().to("cpu", torch.float64, copy=True).contiguous()
    own = own * float(weight) if weight else torch.zeros_like(own)  # 0 times NaN is NaN
    summed = torch.empty_like(own)
    comm.Allreduce(own.numpy(), summed.numpy())
    dtype = tensor.dtype if tensor.is_floating_point() else torch.float64
    mean: Tensor = (summed / total).to(tensor.device, dtype)
    return mean


def _as_weight(weight: float) -> float:
    """A weight as a number; NaN, which is refused on all ranks, where it is none."""
    try:
        return float(weight)
    except (TypeError, ValueError):
        return math.nan


def trouble_with_values(kinds: Sequence[str], weights: Sequence[float]) -> str | None:
    """Why there is no mean of these values, from what all ranks told; None: there is. Pure."""
    first = kinds[0]
    odd = [rank for rank, kind in enumerate(kinds) if kind != first]
    if odd:
        return (
            f"rank 0 gave {first} and {name_ranks(odd)} {kinds[odd[0]]}; give "
            "the same kind and shape on every rank"
        )
    if first != _NUMBER and not first.startswith("a tensor"):
        return f"the value is {first}; give a number, or a tensor of real numbers"
    bad = [rank for rank, w in enumerate(weights) if not (0 <= w < math.inf)]
    if bad:
        return f"weight={weights[bad[0]]} on rank {bad[0]}; give a finite number of at least 0"
    if not any(weights):
        return "weight=0 on every rank, so there is nothing to average"
    return None
