"""The loss scale: one number, equal on all ranks because they all see the same sums.

It lives on the device, so that nothing waits for a GPU; the arithmetic is torch.amp's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.precision.options import LossScaling

__all__ = ["Scaler"]


class Scaler:
    """A scale that halves after an overflow and doubles after many steps without one."""

    def __init__(self, options: LossScaling, device: torch.device) -> None:
        self.options = options
        self.scale = torch.full((), options.init_scale, dtype=torch.float32, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._skips = torch.zeros(2, dtype=torch.float32, device=device)  # in all, in a row
        self._in_a_row = torch.tensor([1.0, 0.0], device=device)
        self._watch = _Watch(options.max_skips, device)

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


class _Watch:
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
        """Begin anew from a loaded state."""
        self.num_in_a_row = num_in_a_row
        self._num_looks, self._event = 0, None
