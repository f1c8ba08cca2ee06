"""What a precision is called and what goes together with it; the loss scale.

The scale is one number, equal on all ranks because they all see the same sums. It lives on the
device, so that nothing waits for a GPU; the arithmetic is torch.amp's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hpctrain.errors import ConfigError

__all__ = ["LossScaling", "PrecisionName", "Scaler", "check_choice", "check_parameters"]


PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """How losses are scaled with `precision="fp16"`; the same on every rank."""

    init_scale: float = 65536.0
    """Initial loss scale; powers of two cause no rounding."""
    growth_factor: float = 2.0
    """What the scale is multiplied by after `growth_interval` steps in a row without overflow."""
    backoff_factor: float = 0.5
    """What the scale is multiplied by after an overflow."""
    growth_interval: int = 2000
    """Steps in a row without overflow until the scale grows."""
    max_skips: int = 20
    """After this many skipped steps in a row the run fails with an error that names the origin."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if not 0 < self.init_scale < math.inf:
            raise _refuse(f"init_scale={self.init_scale} must be above 0")
        if not 1 < self.growth_factor < math.inf:
            raise _refuse(f"growth_factor={self.growth_factor} must be above 1")
        if not 0 < self.backoff_factor < 1:
            raise _refuse(f"backoff_factor={self.backoff_factor} must be between 0 and 1")
        for name in ("growth_interval", "max_skips"):
            if getattr(self, name) < 1:
                raise _refuse(f"{name}={getattr(self, name)} must be at least 1")


def check_choice(
    precision: str,
    *,
    device_type: str,
    scaling: LossScaling | None,
    clip_norm: float | None,
    clip_value: float | None,
) -> None:
    """Refuse values that are unknown, out of range, or do not go together.

    Raises:
        ConfigError: with what to do.
    """
    known = get_args(PrecisionName)
    if precision not in known:
        raise ConfigError(f"precision={precision!r} is unknown; use one of {', '.join(known)}")
    if precision == "tf32" and device_type != "cuda":
        raise ConfigError(
            f"precision='tf32' is a mode of NVIDIA GPUs, and the device is {device_type}; use "
            "'fp32' or 'bf16' there"
        )
    if scaling is not None and precision != "fp16":
        raise ConfigError(
            f"scaling is for precision='fp16'; {precision} has the range of float32 and needs no "
            "scaling: leave it out"
        )
    for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(f"{name}={limit} must be above 0, or None for no clipping")
    if clip_norm is not None and clip_value is not None:
        raise ConfigError(
            f"clip_norm={clip_norm} and clip_value={clip_value} clip the same gradients twice; "
            "choose one"
        )


def check_parameters(
    precision: str,
    names: Sequence[str],
    parameters: Sequence[Tensor],
    clip_value: float | None,
    unclipped: Collection[int] = (),
) -> None:
    """Refuse parameters that a precision cannot train, or clipping cannot clip.

    Args:
        precision: Its name.
        names: Of the parameters.
        parameters: In the order of the optimizer's groups.
        clip_value: Limit of each element.
        unclipped: Indices of those that are not clipped.

    Raises:
        ConfigError: the first of them, by name.
    """
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        if precision == "fp16" and parameter.dtype == torch.float16:
            raise ConfigError(
                f"parameter {name} is float16, whose small updates are lost and whose gradients "
                "cannot be unscaled; keep the model in float32: precision='fp16' computes in "
                "float16 where that is safe"
            )
        if precision == "bf16-pure" and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, and "
                "precision='bf16-pure' has float32 masters; convert it to float32, or use "
                "another precision"
            )
        if clip_value is not None and parameter.is_complex() and index not in unclipped:
            raise ConfigError(
                f"clip_value={clip_value} has no meaning for complex parameter {name}; use "
                "clip_norm, or a group of its own with clip=False"
            )


def _refuse(text: str) -> ConfigError:
    return ConfigError(f"LossScaling: {text}")


class Scaler:
    """A scale that halves after an overflow and doubles after many steps without one."""

    def __init__(self, options: LossScaling, device: torch.device) -> None:
        self.options = options
        self.scale = torch.full((), options.init_scale, dtype=torch.float32, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._skips = torch.zeros(2, dtype=torch.float32, device=device)  # in all, in a row
        self._in_a_row = torch.tensor([1.0, 0.0], device=device)
        self._watch = _SkipCounter(options.max_skips, device)

    def update(self, overflow: Tensor) -> None:
        """After a step: 1 for an overflow, 0 for none."""
        options = self.options
        torch._amp_update_scale_(
            self.scale,
            self._growth,
            overflow,
            options.growth_factor,
            options.backoff_factor,
            options.growth_interval,
        )
        kept = torch.maximum(
            self._in_a_row, overflow
        )  # all of the first; of the second if it goes on
        self._skips = torch.addcmul(overflow, self._skips, kept)
        self._watch.look(self._skips)

    @property
    def is_last_chance(self) -> bool:
        """Whether one more skip is one too many; the same on all ranks at the same step."""
        return self._watch.num_in_a_row >= self.options.max_skips - 1

    def pass_last_chance(self) -> None:
        """A step went well that was known to be the last chance."""
        self._watch.num_in_a_row = 0

    def has_collapsed(self) -> bool:
        """Whether too many steps in a row were skipped by now. Waits for a GPU.

        There the last chance was known from a count that is some steps old: since then a step may
        have gone well.
        """
        self._watch.num_in_a_row = self.num_in_a_row
        return self._watch.num_in_a_row >= self.options.max_skips

    @property
    def num_skipped(self) -> int:
        """Steps skipped so far. Waits for a GPU."""
        return int(self._skips[0].item())

    @property
    def num_in_a_row(self) -> int:
        """Steps skipped since the last that was not. Waits for a GPU."""
        return int(self._skips[1].item())

    def state_dict(self) -> dict[str, Any]:
        """In the form of torch.amp.GradScaler's, and how many steps were skipped."""
        options = self.options
        skipped, in_a_row = self._skips.tolist()
        return {
            "scale": self.scale.item(),
            "growth_factor": options.growth_factor,
            "backoff_factor": options.backoff_factor,
            "growth_interval": options.growth_interval,
            "_growth_tracker": int(self._growth.item()),
            "num_skipped": int(skipped),
            "num_skipped_in_a_row": int(in_a_row),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take scale and counts, of this class or of a GradScaler; options stay as they are here.

        Raises:
            ConfigError: it is neither's state.
        """
        if "scale" not in state or "_growth_tracker" not in state:
            raise ConfigError(
                f"a scaler's state has scale and _growth_tracker; given: {', '.join(state)} (a "
                "disabled GradScaler's state is empty: leave the key 'scaler' out)"
            )
        self.scale.fill_(float(state["scale"]))
        self._growth.fill_(int(state["_growth_tracker"]))
        self._skips[0] = float(state.get("num_skipped", 0))
        self._skips[1] = float(state.get("num_skipped_in_a_row", 0))
        self._watch.restart(int(state.get("num_skipped_in_a_row", 0)))


class _SkipCounter:
    """Reads how many steps were skipped in a row without making a GPU wait.

    On the CPU at every step; on a GPU every `interval` steps, and what was copied at the last such
    step, which has arrived long since. Both are the same on every rank.
    """

    def __init__(self, interval: int, device: torch.device) -> None:
        self.num_in_a_row = 0
        self._interval = interval
        self._num_looks = 0
        self._copied: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.zeros(2, dtype=torch.float32, pin_memory=True)

    def look(self, skips: Tensor) -> None:
        """After a step."""
        if self._copied is None:
            self.num_in_a_row = int(skips[1].item())
            return
        self._num_looks += 1
        if self._num_looks % self._interval:
            return
        if self._event is not None:
            self._event.synchronize()
            self.num_in_a_row = int(self._copied[1].item())
        self._copied.copy_(skips, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def restart(self, num_in_a_row: int) -> None:
        """Start over from a loaded state."""
        self.num_in_a_row = num_in_a_row
        self._num_looks, self._event = 0, None
