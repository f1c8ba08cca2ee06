"""How torch's reduce operations are done by an engine's. Pure.

An engine has sum, average, min and max. PREMUL_SUM multiplies before the sum. What is left (product
and the bitwise ones) is rare: every rank's values are gathered and folded in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from hpctrain.engines import Op
from hpctrain.errors import ConfigError

__all__ = ["Reduction", "add_rows", "as_reduction", "check_fold", "fold"]

_c10d: Any = distributed_c10d
_RedOp: Any = _c10d.ReduceOp

_ENGINE_OPS = {
    "SUM": Op.SUM,
    "AVG": Op.AVERAGE,
    "PREMUL_SUM": Op.SUM,
    "MIN": Op.MIN,
    "MAX": Op.MAX,
}
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_EXACT = (torch.float32, torch.float64)
_WHOLE = (torch.int32, torch.int64)
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """One of torch's reduce operations."""

    name: str
    op: Op | None
    """The engine's; None: values are gathered and folded."""
    factor: float | Tensor = 1.0
    """What PREMUL_SUM multiplies by, before the sum."""

    def adds(self, dtype: torch.dtype) -> bool:
        """Whether it is a sum, or an average, that rounds as rows are added."""
        return (self.name in ("SUM", "AVG") and dtype in _EXACT) or (
            self.name == "SUM" and dtype in _WHOLE
        )


def as_reduction(given: Any, call: str) -> Reduction:
    """Read a ReduceOp.

    Raises:
        ConfigError: hpctrain does not know it.
    """
    for name in (*_ENGINE_OPS, *_FOLDS):
        if given == getattr(_RedOp, name, None):
            factor = given.__getstate__()[1] if name == "PREMUL_SUM" else 1.0
            return Reduction(name=name, op=_ENGINE_OPS.get(name), factor=factor)
    names = ", ".join((*_ENGINE_OPS, *_FOLDS))
    raise ConfigError(f"{call}: the reduce operation {given} is unknown; use one of {names}")


def add_rows(rows: Tensor, total: Tensor, divisor: int) -> None:
    """Add the rows, one for each rank, in rank order into a tensor of their size, and divide."""
    first, *others = rows.unbind(0)
    plain = total.detach()
    so_far = first.view(plain.shape)
    for other in others:
        so_far = torch.add(so_far, other.view(plain.shape), out=plain)
    if so_far is not plain:
        plain.copy_(so_far)
    if divisor != 1:
        plain.div_(divisor)


def check_fold(name: str, dtype: torch.dtype, call: str) -> str | None:
    """Why a folded operation means nothing for the dtype, or None."""
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if name == "PRODUCT" or whole:
        return None
    return f"{call}: {name} of {dtype} means nothing; use whole numbers or bool"


def fold(name: str, parts: Tensor) -> Tensor:
    """Combine the rows of `parts`, one for each rank, in rank order; rounds once."""
    wide = parts.to(_WIDER.get(parts.dtype, parts.dtype))
    if name == "PRODUCT" and parts.dtype is torch.bool:
        return parts.all(0)
    return reduce(_FOLDS[name], wide.unbind(0)).to(parts.dtype)
