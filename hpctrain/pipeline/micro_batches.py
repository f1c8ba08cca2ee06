"""How a batch becomes micro-batches, and what each of them weighs. Pure but for the slicing.

torch's schedules want micro-batches of one shape. A batch that does not divide evenly is cut into
micro-batches whose sizes differ by one, and those of one size make one run of the schedule: nothing
is padded and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hpctrain.errors import ConfigError

__all__ = ["Run", "divide_batch", "num_rows_of", "rows_of", "trouble_with_batch"]


class Run(NamedTuple):
    """Micro-batches of one size, one after the other."""

    start: int
    """The first row of the batch that is in it."""
    size: int
    """Rows in each micro-batch."""
    num: int
    """How many micro-batches."""

    @property
    def stop(self) -> int:
        """The row after its last."""
        return self.start + self.size * self.num


def divide_batch(num_rows: int, micro_batches: int) -> tuple[Run, ...]:
    """Cut a batch into micro-batches whose sizes differ by at most one row, the larger ones first.

    Args:
        num_rows: Of the batch. With fewer rows than micro-batches, each row is one.
        micro_batches: How many are wanted.

    Returns:
        At most two runs; none for an empty batch.
    """
    count = min(num_rows, micro_batches)
    if count == 0:
        return ()
    size, num_larger = divmod(num_rows, count)
    runs = [Run(0, size + 1, num_larger), Run(num_larger * (size + 1), size, count - num_larger)]
    return tuple(run for run in runs if run.num)


def num_rows_of(tensors: Sequence[Any]) -> int:
    """How many rows a batch has, by its first tensor."""
    return next((int(t.shape[0]) for t in tensors if isinstance(t, Tensor) and t.dim()), 0)


def rows_of(tensors: Sequence[Any], start: int, stop: int) -> tuple[Any, ...]:
    """Some rows of every tensor."""
    return tuple(tensor[start:stop] for tensor in tensors)


def trouble_with_batch(inputs: Sequence[Any], target: Any = None) -> str | None:
    """Why a batch cannot be cut into micro-batches, in words; None: it can."""
    if not inputs:
        return "there are no inputs; give the model's inputs before the target"
    named = {f"input {n}": one for n, one in enumerate(inputs)}
    if target is not None:
        named["the target"] = target
    rows: dict[str, int] = {}
    for name, one in named.items():
        if not isinstance(one, Tensor):
            return (
                f"{name} is {type(one).__name__}; a pipeline cuts a batch into micro-batches by "
                "rows, so give tensors"
            )
        if one.dim() == 0:
            return f"{name} has no dimension; a pipeline cuts the first dimension of each tensor"
        rows[name] = int(one.shape[0])
    first = rows["input 0"]
    odd = next((name for name, count in rows.items() if count != first), None)
    if odd is not None:
        return f"{odd} has {rows[odd]} rows and input 0 has {first}; give as many of each"
    return None


def check_micro_batches(micro_batches: int) -> None:
    """Refuse a number of micro-batches that is none.

    Raises:
        ConfigError: with what to give.
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(f"micro_batches={micro_batches!r}; give a whole number of at least 1")
