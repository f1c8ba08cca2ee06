"""Which number format the forward pass runs in. Pure but for torch's own switches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Casting"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HALF = (torch.bfloat16, torch.float16)


class Casting:
    """How a precision runs a model forward.

    Args:
        precision: Its name.
        device_type: Where the model is.
    """

    def __init__(self, precision: str, device_type: str) -> None:
        self.precision = precision
        self._device_type = device_type
        self._matmul_before: str | None = None
        if precision == "tf32":  # torch has this for the whole process only
            self._matmul_before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")

    def autocast(self) -> AbstractContextManager[Any]:
        """What the forward pass runs under."""
        dtype = _AUTOCAST.get(self.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=dtype)

    def forward(
        self, model: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Run a model; half-precision outputs become float32, for the loss."""
        if self.precision in ("fp32", "tf32"):
            return model(*arguments, **named)
        if self.precision == "bf16-pure":
            arguments, named = _cast((arguments, named), _to_bfloat16)
        with self.autocast():
            result = model(*arguments, **named)
        return _cast(result, _to_float32)

    def close(self) -> None:
        """Give torch its switches back."""
        if self._matmul_before is not None:
            torch.set_float32_matmul_precision(self._matmul_before)
            self._matmul_before = None


def _cast(value: Any, to: Callable[[Tensor], Tensor]) -> Any:
    """The same containers with their floating-point tensors in another format.

    Dictionaries of any class (transformers' outputs are), dataclasses and namespaces keep their
    class and other content; so do containers that torch's pytree supports. Other objects are
    left as they are.
    """
    if isinstance(value, Tensor):
        return to(value)
    if isinstance(value, dict):
        return _copied(value, {key: _cast(item, to) for key, item in value.items()}, to)
    if type(value) in (tuple, list):
        return type(value)(_cast(item, to) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, to) for item in value))
    if isinstance(value, SimpleNamespace) or _is_dataclass(value):
        return _copied(value, {}, to)
    return pytree.tree_map(lambda leaf: to(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _copied(value: Any, items: dict[Any, Any], to: Callable[[Tensor], Tensor]) -> Any:
    """A copy with other items, and with the fields of a dataclass or namespace cast."""
    if type(value) is dict:
        return items
    made = copy.copy(value)
    for key, item in items.items():
        if item is not value[key]:
            made[key] = item
    names = [field.name for field in dataclasses.fields(value)] if _is_dataclass(value) else []
    for name in vars(value) if isinstance(value, SimpleNamespace) else names:
        if not hasattr(value, name):
            continue
        before = getattr(value, name)
        # An output that is a dictionary as well has the same tensor in both places.
        after = items[name] if name in items and value[name] is before else _cast(before, to)
        if after is not before:
            object.__setattr__(made, name, after)  # of frozen ones, too
    return made


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _to_float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in _HALF else value


def _to_bfloat16(value: Tensor) -> Tensor:
    return value.bfloat16() if value.dtype in (torch.float32, torch.float16) else value
