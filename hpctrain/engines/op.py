"""How values of several ranks are combined."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Op"]


class Op(StrEnum):
    """How an allreduce or a reduce-scatter combines the ranks' values."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    ADASUM = "adasum"
