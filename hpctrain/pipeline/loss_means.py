"""Whether a loss is a mean over its rows: only such a one is the same in micro-batches.

It is tried with the rows of a real micro-batch twice over: a mean stays as it is, a sum doubles.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hpctrain.errors import ConfigError

__all__ = ["LossMeans", "trouble_with_mean"]

LossFn = Callable[[Any, Any], Tensor]
_MOST = 8
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 2e-2
"""Of 16-bit losses."""
_EXACT = (torch.float32, torch.float64)


class LossMeans:
    """Tries each loss function once, at its first use.

    A script may make a new function for every step: the first few are tried.
    """

    def __init__(self) -> None:
        self._tried: list[Any] = []

    def check(self, loss_fn: LossFn, output: Any, target: Tensor, loss: Tensor) -> None:
        """Refuse a loss that is no mean over its rows.

        Args:
            loss_fn: The user's.
            output: Of one micro-batch.
            target: Its target.
            loss: What it gave for them.

        Raises:
            ConfigError: it is a sum, or its rows depend on each other.
        """
        key = getattr(loss_fn, "__code__", loss_fn)
        if len(self._tried) >= _MOST or any(one is key for one in self._tried):
            return
        once, is_exact = float(loss.detach()), loss.dtype in _EXACT
        trouble = trouble_with_mean(once, _try(loss_fn, output, target, times=2), is_exact=is_exact)
        if trouble is not None and loss.dtype == torch.float32:  # terms may cancel each other
            wide = _try(loss_fn, _wide(output), _wide(target), times=1)
            if wide is not None:
                twice = _try(loss_fn, _wide(output), _wide(target), times=2)
                trouble = trouble_with_mean(wide, twice, is_exact=True)
        if trouble is not None:
            raise ConfigError(trouble)
        self._tried.append(key)


def trouble_with_mean(once: float, twice: float | None, *, is_exact: bool) -> str | None:
    """What is wrong with a loss, in words; None: nothing that shows. Pure.

    Args:
        once: Of some rows.
        twice: Of the same rows, each of them two times; None: not known.
        is_exact: Whether they were computed with 32 bits or more.
    """
    if twice is None or not (math.isfinite(once) and math.isfinite(twice)):
        return None
    tolerance = _TOLERANCE if is_exact else _COARSE_TOLERANCE
    if math.isclose(once, twice, rel_tol=tolerance):
        return None
    shown = f"{once:.6g} for a micro-batch, and {twice:.6g} for its rows twice over"
    if math.isclose(2 * once, twice, rel_tol=tolerance):
        return (
            f"the loss function sums over its rows (it gave {shown}), and a pipeline calls it with "
            "each micro-batch: it must be a mean; use reduction='mean', or divide by "
            "len(target)"
        )
    if is_exact:
        return (
            f"the loss function is no mean over its rows (it gave {shown}), so that a batch in "
            "micro-batches has another loss than the whole; use a loss of each row and its mean, "
            "or train this model without stages="
        )
    return None


def _try(loss_fn: LossFn, output: Any, target: Tensor, *, times: int) -> float | None:
    """A loss of rows so many times over; None: it cannot be known, or draws random numbers."""
    devices = [target.device] if target.device.type == "cuda" else []
    # A module may keep statistics; what it has learned from is one pass.
    called = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn

    def repeated(one: Tensor) -> Tensor:
        return torch.cat([one.detach()] * times)

    with torch.random.fork_rng(devices=devices), torch.no_grad():
        before = _random_state(devices)
        try:
            loss = called(tree_map_only(Tensor, repeated, output), repeated(target))
            found = float(loss)
        except Exception:  # such as one that wants a certain number of rows
            return None
        same = zip(before, _random_state(devices), strict=True)
        return found if all(torch.equal(old, new) for old, new in same) else None


def _random_state(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in devices)]


def _wide(values: Any) -> Any:
    return tree_map_only(
        Tensor, lambda one: one.double() if one.is_floating_point() else one, values
    )
