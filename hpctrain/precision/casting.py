"""Which number format the forward pass runs in. Pure but for torch's own switches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
        if precision == "tf32":  # torch knows this for the whole process alone
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
        """Run a model; what comes back in half precision becomes float32, for the loss."""
        if self.precision in ("fp32", "tf32"):
            return model(*arguments, **named)
        if self.precision == "bf16-pure":
            arguments, named = pytree.tree_map(_to_bfloat16, (arguments, named))
        with self.autocast():
            result = model(*arguments, **named)
        return _to_float32(result) if isinstance(result, Tensor) else _all_to_float32(result)

    def close(self) -> None:
        """Give torch its switches back."""
        if self._matmul_before is not None:
            torch.set_float32_matmul_precision(self._matmul_before)
            self._matmul_before = None


def _all_to_float32(result: Any) -> Any:
    return pytree.tree_map(_to_float32, result)


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _to_bfloat16(value: Any) -> Any:
    wide = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16)
    return value.bfloat16() if wide else value
