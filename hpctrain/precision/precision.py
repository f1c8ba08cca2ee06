"""A replica's precision as one object: forward pass, loss scaling and clipping, masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hpctrain.errors import ConfigError
from hpctrain.precision.casting import Casting
from hpctrain.precision.gradients import ScaleAndClip, UpdateResult
from hpctrain.precision.masters import Masters

__all__ = ["Precision"]

_WORDS = {
    "fp32": "fp32: float32, and torch's own settings",
    "tf32": "tf32: float32, matrix products in TensorFloat32",
    "bf16": "bf16: autocast to bfloat16, weights in float32",
    "fp16": "fp16: autocast to float16, weights in float32, losses scaled",
    "bf16-pure": "bf16-pure: all in bfloat16, masters and optimizer state in float32",
}


class Precision:
    """How a replica computes, scales, clips and steps.

    Args:
        casting: The forward pass.
        scale_and_clip: Loss scaling and clipping.
        model: What runs forward.
        optimizer: The user's; callers of its `step` are distinguished.
        keeps_masters: Whether `bf16-pure` turns weights into bfloat16 with float32 masters; shards
            stay float32, and only what is gathered from them is not.
    """

    def __init__(
        self,
        casting: Casting,
        scale_and_clip: ScaleAndClip,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keeps_masters: bool = True,
    ) -> None:
        self.casting = casting
        self.scale_and_clip = scale_and_clip
        self._optimizer = optimizer
        self._steps = False
        # Before the masters' hooks, so that a refused step has touched nothing.
        self._guard = optimizer.register_step_pre_hook(lambda *_: self._check_caller())
        pure = casting.precision == "bf16-pure"
        self.masters = Masters(model, optimizer) if pure and keeps_masters else None

    def _check_caller(self) -> None:
        if self.scale_and_clip.owns_step and not self._steps:
            has_scaler = self.scale_and_clip.scaler is not None
            what = "precision='fp16'" if has_scaler else "clip_norm and clip_value"
            raise ConfigError(
                f"optimizer.step() was called, by hand or by a GradScaler, and {what} need "
                "replica.step(); call that, or leave the option out of distribute and scale and "
                "clip yourself"
            )

    def recover(self) -> None:
        """Before a forward or backward pass: an optimizer that raised has left nothing behind."""
        if self.masters is not None:
            self.masters.recover()

    def step(self, update: Callable[[], object]) -> UpdateResult:
        """Update or skip; see `ScaleAndClip.step`."""
        self._steps = True
        try:
            return self.scale_and_clip.step(self._optimizer, update)
        finally:
            self._steps = False
            self.recover()

    def adopt(self) -> None:
        """Convert what is new in the model; before its gradients are laid out."""
        if self.masters is not None:
            self.masters.adopt()

    def full(self) -> AbstractContextManager[None]:
        """Parameters hold float32 inside."""
        return nullcontext() if self.masters is None else self.masters.full()

    def state_dict(self) -> dict[str, Any]:
        """What belongs into a checkpoint besides the optimizer's own state; often nothing."""
        state: dict[str, Any] = {}
        if self.scale_and_clip.scaler is not None:
            state["scaler"] = self.scale_and_clip.scaler.state_dict()
        if self.masters is not None:
            state["masters"] = self.masters.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state, and then what is this object's.

        A state without these keys leaves scale and masters as they are; keys that this precision
        does not need are dropped, so that a run may resume in another precision.
        """
        rest = {key: value for key, value in state.items() if key not in ("scaler", "masters")}
        try:
            self._optimizer.load_state_dict(rest)
        finally:
            self.recover()
        if self.scale_and_clip.scaler is not None and "scaler" in state:
            self.scale_and_clip.scaler.load_state_dict(state["scaler"])
        if self.masters is not None and "masters" in state:
            self.masters.load_state_dict(state["masters"])

    def describe(self) -> Iterator[tuple[str, str]]:
        """What was chosen, in words."""
        yield "precision", _WORDS[self.casting.precision]
        if self.scale_and_clip.clip_norm is not None:
            yield "clipping", f"by the norm of all gradients, {self.scale_and_clip.clip_norm:g}"
        if self.scale_and_clip.clip_value is not None:
            yield "clipping", f"each element, {self.scale_and_clip.clip_value:g}"

    def close(self) -> None:
        """Let optimizer and torch's switches go."""
        self._guard.remove()
        self.casting.close()
        if self.masters is not None:
            self.masters.close()
