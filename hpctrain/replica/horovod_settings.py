"""How a replica trains on the `horovod` engine, as one typed value. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from hpctrain.engines import HorovodOptions
from hpctrain.errors import ConfigError

__all__ = ["HorovodTraining", "cut_into_groups"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class HorovodTraining:
    """What `hpctrain.distribute(..., horovod=...)` takes; the same on every rank."""

    fusion: Literal["arena", "horovod"] = "arena"
    """Who fuses gradients: `arena` passes fused buckets to Horovod, which avoids its two memory
    copies; `horovod` leaves it to Horovod's own `DistributedOptimizer` and tensor fusion. The
    options below, but for the last, are those of `horovod`."""
    num_groups: int = 0
    """Divide the parameters into this many groups, each sent as a whole; 0: no groups."""
    compression: Literal["none", "fp16"] = "none"
    """`fp16`: gradients are sent in half precision."""
    op: Literal["average", "adasum"] = "average"
    """How gradients are combined. `adasum` adds what is orthogonal and averages what is parallel:
    not what one process would do, so results differ from one process."""
    gradient_predivide_factor: float = 1.0
    """Gradients are divided by this before they are summed, and by the rest afterwards."""
    options: HorovodOptions | None = None
    """How Horovod works inside: fusion threshold, cycle time, autotune, hierarchical... They are
    read once, when Horovod starts."""

    def __post_init__(self) -> None:
        """Refuse what is out of range and what does not go together."""
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                listed = " or ".join(repr(value) for value in known)
                raise _refuse(f"{name}={getattr(self, name)!r} is unknown; use {listed}")
        if self.num_groups < 0:
            raise _refuse(f"num_groups={self.num_groups} must be 0 (no groups) or more")
        if not 0 < self.gradient_predivide_factor < math.inf:
            raise _refuse(
                f"gradient_predivide_factor={self.gradient_predivide_factor} must be above 0"
            )
        if self.fusion == "arena":
            self._check_arena()
        predivided = self.gradient_predivide_factor != 1.0
        if predivided and self.num_groups:
            raise _refuse(
                f"gradient_predivide_factor={self.gradient_predivide_factor} is silently ignored "
                f"by Horovod when there are groups; leave out num_groups={self.num_groups} or it"
            )
        if predivided and self.op == "adasum":
            raise _refuse(
                "gradient_predivide_factor is for averages, not for op='adasum'; leave out one of "
                "them"
            )
        if self.compression == "fp16" and self.op == "adasum":
            raise _refuse(
                "Horovod has no op='adasum' for compression='fp16'; leave out one of them"
            )

    def _check_arena(self) -> None:
        for name, default in _HOROVOD_ONLY.items():
            value = getattr(self, name)
            if value != default:
                raise _refuse(
                    f"{name}={value!r} is an option of Horovod's own fusion; use it with "
                    "fusion='horovod', or leave it out"
                )


_KNOWN = {
    "fusion": ("arena", "horovod"),
    "compression": ("none", "fp16"),
    "op": ("average", "adasum"),
}
_HOROVOD_ONLY = {
    "num_groups": 0,
    "compression": "none",
    "op": "average",
    "gradient_predivide_factor": 1.0,
}


def cut_into_groups(members: Sequence[tuple[T, str]], num_groups: int) -> list[list[T]]:
    """Cut members into that many runs of about equal length, of one kind each.

    Where kinds meet inside a run it is cut further, since a message has one dtype.

    Args:
        members: In order, each with its kind.
        num_groups: At least 1; no more groups are made than there are members.
    """
    groups: list[list[T]] = []
    count = max(1, min(num_groups, len(members)))
    for number in range(count):
        start, stop = (len(members) * (number + edge) // count for edge in (0, 1))
        by_kind: dict[str, list[T]] = {}
        for member, kind in members[start:stop]:
            by_kind.setdefault(kind, []).append(member)
        groups.extend(by_kind.values())
    return groups


def _refuse(text: str) -> ConfigError:
    return ConfigError(f"HorovodTraining: {text}")
