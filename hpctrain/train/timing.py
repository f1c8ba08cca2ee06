"""Where the time of a step goes: input, forward, backward, exchange, update."""

from __future__ import annotations

import time

import torch

from hpctrain.world import PHASES, World

__all__ = ["StepTimer", "time_steps"]


class StepTimer:
    """An observer that adds up the time of each phase; see `hpctrain.world.observing`.

    On a GPU it waits for the device at each border, so that the times are those of the work and not
    of launching it; that takes away what would overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type == "cuda"
        self._device = device
        self._open: list[tuple[str, float]] = []
        self._sums = dict.fromkeys(PHASES, 0.0)

    def begin(self, name: str) -> None:
        """A phase begins; the one around it pauses."""
        now = self._now()
        if self._open:
            outer, since = self._open[-1]
            self._sums[outer] = self._sums.get(outer, 0.0) + now - since
        self._open.append((name, now))

    def end(self, name: str) -> None:
        """It ends; the one around it goes on."""
        now = self._now()
        inner, since = self._open.pop()
        self._sums[inner] = self._sums.get(inner, 0.0) + now - since
        if self._open:
            self._open[-1] = (self._open[-1][0], now)

    def stepped(self, number: int) -> None:
        """Steps are counted elsewhere."""

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        sums, self._sums = self._sums, dict.fromkeys(PHASES, 0.0)
        return {f"{name}_s": sums[name] for name in PHASES}

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def time_steps(world: World) -> StepTimer:
    """Measure the phases of steps from now on; call it before `distribute` and `Loader`."""
    timer = StepTimer(world.device)
    world.observers.append(timer)
    return timer
