"""What one rank did, as it does it: an observer that keeps times and writes them to a file.

Every event costs a reading of the clock and an entry in a list; lists go to the file between steps.
A `Tap` is a watch that also records: every collective goes to the watchdog and into the trace.
"""

from __future__ import annotations

import itertools
import json
from _thread import get_ident
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol, TextIO

from hpctrain.log import format_ranges
from hpctrain.timeline.clocks import Offset
from hpctrain.world import Phase

__all__ = ["SCHEMA", "Tap", "TraceRecorder", "TracedWatch", "TracedWatchdog", "rank_file"]


SCHEMA = "hpctrain.trace/1"
_WRITE_FROM = 4096
_MOST_EVENTS = 2_000_000


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank's events go."""
    return folder / f"rank-{rank:05d}.jsonl"


class TraceRecorder:
    """An observer of one rank: phases, steps and collectives, with the times of its own clock."""

    def __init__(self, file: TextIO, header: dict[str, Any], begin: Offset) -> None:
        self._file = file
        self._events: list[list[Any]] = []
        self._open: dict[int, list[tuple[str, int]]] = {}
        self._numbers: dict[str, itertools.count[int]] = {}
        self._num_events = 0
        self._num_dropped = 0
        self.is_closed = False
        self.num_taps = 0
        """Connections whose collectives are recorded."""
        self._write({"schema": SCHEMA, **header, "clock": _describe(begin)})

    def begin(self, name: Phase) -> None:
        """A phase begins."""
        self._push(name)

    def end(self, name: Phase) -> None:
        """The phase that this thread began last has ended."""
        self._pop("phase", name)

    def stepped(self, number: int) -> None:
        """A step has ended: between steps there is time to write."""
        now = perf_counter_ns()
        self._add(["step", str(number), get_ident(), now, now])
        if len(self._events) >= _WRITE_FROM:
            self.flush()

    def enter(self, group: str, call: str) -> None:
        """A collective begins; on every rank of the group it has the same number."""
        numbers = self._numbers.setdefault(group, itertools.count(1))
        self._push(f"{group}\n{next(numbers)}\n{call}")

    def leave(self) -> None:
        """The collective that this thread entered last has ended."""
        self._pop("collective", "")

    def post(self, call: str) -> None:
        """A collective was started and is waited for later."""
        now = perf_counter_ns()
        self._add(["post", call, get_ident(), now, now])

    def flush(self) -> None:
        """Write what there is."""
        events, self._events = self._events, []
        if events and not self.is_closed:
            self._file.write(json.dumps(events) + "\n")  # all at once is ten times as quick
            self._file.flush()

    def close(self, end: Offset | None) -> None:
        """Write the last events and how the clocks stood then; a second call does nothing."""
        if self.is_closed:
            return
        self.flush()
        clock = None if end is None else _describe(end)
        self._write({"end": True, "clock": clock, "num_dropped": self._num_dropped})
        self.is_closed = True
        self._file.close()

    def _push(self, name: str) -> None:
        entry = (name, perf_counter_ns())
        try:
            self._open[get_ident()].append(entry)
        except KeyError:
            self._open[get_ident()] = [entry]

    def _pop(self, kind: str, name: str) -> None:
        now = perf_counter_ns()
        thread = get_ident()
        opened, since = self._open[thread].pop()
        self._add([kind, opened or name, thread, since, now])

    def _add(self, event: list[Any]) -> None:
        if self._num_events < _MOST_EVENTS:
            self._num_events += 1
            self._events.append(event)
        else:
            self._num_dropped += 1

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _describe(offset: Offset) -> dict[str, float]:
    return {"ns": offset.ns, "error_ns": offset.error_ns, "at_ns": offset.at_ns}


class TracedWatch(Protocol):
    """Monitors every collective; as in `hpctrain.engines`."""

    def enter(self, call: str) -> None:
        """A collective begins."""

    def leave(self) -> None:
        """It has ended."""


class TracedWatchdog(TracedWatch, Protocol):
    """A watch over all ranks, which can give each part of them a watch of its own."""

    def among(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> TracedWatch:
        """A watch for the collectives of some ranks only."""

    @property
    def all_waited_s(self) -> float:
        """How long this rank has been inside collectives so far."""


class Tap:
    """What an engine takes for its watchdog while a trace is recorded."""

    def __init__(self, recorder: TraceRecorder, watch: TracedWatchdog) -> None:
        self._recorder = recorder
        self._watch = watch
        self._key = f"connection {recorder.num_taps}"
        recorder.num_taps += 1
        self._all_ranks = _GroupTap(recorder, watch, self._key)
        self._num_among: dict[str, int] = {}

    def enter(self, call: str) -> None:
        """A collective of all ranks begins."""
        self._all_ranks.enter(call)

    def leave(self) -> None:
        """It has ended."""
        self._all_ranks.leave()

    @property
    def all_waited_s(self) -> float:
        """How long this rank has been inside collectives so far."""
        return self._watch.all_waited_s

    def among(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> _GroupTap:
        """A watch for the collectives of some ranks only."""
        who = f"{self._key}, ranks {format_ranges(sorted(ranks))}"
        nth = self._num_among[who] = self._num_among.get(who, 0) + 1
        return _GroupTap(
            self._recorder, self._watch.among(ranks, timeout_s=timeout_s), f"{who}/{nth}"
        )


class _GroupTap:
    """The collectives of one group of ranks."""

    def __init__(self, recorder: TraceRecorder, watch: TracedWatch, key: str) -> None:
        self._recorder = recorder
        self._watch = watch
        self._key = key

    def enter(self, call: str) -> None:
        self._watch.enter(call)
        self._recorder.enter(self._key, call)

    def leave(self) -> None:
        self._recorder.leave()
        self._watch.leave()
