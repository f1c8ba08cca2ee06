"""What an exception of a user's model means: which line raised it, and whether it needed data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor

__all__ = ["describe_raised", "line_of", "needs_values", "quiet_fake_tensors", "shown_tensors"]

_TORCH = Path(torch.__file__).parent
_HPCTRAIN = Path(__file__).parents[1]
_PYTHON = Path(os.__file__).parent
_VALUE_ERRORS = tuple(
    getattr(fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException")
    if hasattr(fake_tensor, name)
)
_VALUE_WORDS = ("GuardOnDataDependentSymNode", "UnsupportedFakeTensorException")
_ONE_ROW = "Expected more than 1 value per channel when training"


def needs_values(error: BaseException) -> bool:
    """Whether torch says that a value was needed of a tensor that has none. Pure."""
    return isinstance(error, _VALUE_ERRORS) or type(error).__name__ in _VALUE_WORDS


def describe_raised(error: BaseException) -> str:
    """An exception with its first line, and where it was raised. Pure.

    BatchNorm with one row says what to do.
    """
    told = next(iter(str(error).strip().splitlines()), "") or "no message"
    text = f"{type(error).__name__}: {told.rstrip('.')}"
    where = line_of(error)
    text += f" ({where})" if where else ""
    if _ONE_ROW in told:
        text += (
            "; BatchNorm has nothing to average over in a micro-batch of one row: use fewer "
            "micro-batches, or drop_last=True in the loader"
        )
    return text


def line_of(error: BaseException) -> str:
    """The innermost line of the user's that it came from; without any, the innermost. Pure."""
    trace, found, is_own = error.__traceback__, "", False
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        mine = _is_users(path)
        if mine or not is_own:
            found, is_own = f"{path.name}:{trace.tb_lineno}", mine
        trace = trace.tb_next
    return found


def _is_users(path: Path) -> bool:
    if path.is_relative_to(_TORCH) or path.is_relative_to(_HPCTRAIN) or path.name.startswith("<"):
        return False
    return "site-packages" in path.parts or not path.is_relative_to(_PYTHON)


def shown_tensors(values: Sequence[Any]) -> str:
    """Dtypes and shapes, in words. Pure."""
    return ", ".join(
        f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}"
        if isinstance(one, Tensor)
        else type(one).__name__
        for one in values
    )


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Torch logs a traceback of its own where a shape does not fit; the exception says it too."""
    logger = logging.getLogger(fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
