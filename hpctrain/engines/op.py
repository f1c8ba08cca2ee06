"""How values of several ranks are combined."""

from __future__ import annotations

from enum import StrEnum

from hpctrain.errors import ConfigError

__all__ = ["Op", "as_op"]


class Op(StrEnum):
    """How an allreduce or a reduce-scatter combines the ranks' values."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    ADASUM = "adasum"


def as_op(op: Op | str) -> Op:
    """The op of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Op(op)
    except ValueError:
        names = ", ".join(known.value for known in Op)
        raise ConfigError(f"op={op!r} is unknown; choose one of {names}") from None
