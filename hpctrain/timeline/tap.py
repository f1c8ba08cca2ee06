"""A watch that also records: every collective goes to the watchdog and into the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hpctrain.log import format_ranges
from hpctrain.timeline.recording import Recorder

__all__ = ["Tap", "Watch", "Watchdog"]


class Watch(Protocol):
    """Who is told about every collective; as `hpctrain.engines` has it."""

    def enter(self, call: str) -> None:
        """A collective begins."""

    def leave(self) -> None:
        """It has ended."""


class Watchdog(Watch, Protocol):
    """A watch over all ranks, which can give each part of them a watch of its own."""

    def among(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> Watch:
        """A watch for the collectives of some ranks only."""

    @property
    def all_waited_s(self) -> float:
        """How long this rank has been inside collectives so far."""


class Tap:
    """What an engine takes for its watchdog while a trace is recorded."""

    def __init__(self, recorder: Recorder, watch: Watchdog) -> None:
        self._recorder = recorder
        self._watch = watch
        self._key = f"connection {recorder.num_taps}"
        recorder.num_taps += 1
        self._lane = _Lane(recorder, watch, self._key)
        self._num_among: dict[str, int] = {}

    def enter(self, call: str) -> None:
        """A collective of all ranks begins."""
        self._lane.enter(call)

    def leave(self) -> None:
        """It has ended."""
        self._lane.leave()

    @property
    def all_waited_s(self) -> float:
        """How long this rank has been inside collectives so far."""
        return self._watch.all_waited_s

    def among(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> _Lane:
        """A watch for the collectives of some ranks only."""
        who = f"{self._key}, ranks {format_ranges(sorted(ranks))}"
        nth = self._num_among[who] = self._num_among.get(who, 0) + 1
        return _Lane(self._recorder, self._watch.among(ranks, timeout_s=timeout_s), f"{who}/{nth}")


class _Lane:
    """The collectives of one group of ranks."""

    def __init__(self, recorder: Recorder, watch: Watch, key: str) -> None:
        self._recorder = recorder
        self._watch = watch
        self._key = key

    def enter(self, call: str) -> None:
        self._watch.enter(call)
        self._recorder.enter(self._key, call)

    def leave(self) -> None:
        self._recorder.leave()
        self._watch.leave()
