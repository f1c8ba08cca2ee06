"""All ranks' events as one trace in the trace event format, which Perfetto and Chrome draw.

A rank is a process of the trace, its threads are threads, and a line above them shows the steps.
Processes and threads count from 1: Perfetto takes process 0 and thread 0 for the kernel's idle task
and draws them otherwise.

Arrows show who waited for whom: they start at the rank that came last into a collective. Viewers
tie an arrow's ends to the slices around them, and some draw it from the end of one to the beginning
of the other, or turn it around where the second began first. A collective begins earlier on the
rank that waits, so both ends get separate slices inside it: a very short one where the last
rank comes, and from then on one on each rank that has waited.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from hpctrain.timeline.files import Event, RankTrace, read_folder
from hpctrain.timeline.slowest import Slowest, find_slowest, steps_of

__all__ = [
    "MERGED",
    "STEPS",
    "SUMMARY",
    "Merged",
    "Record",
    "arrows",
    "merge",
    "merge_folder",
    "microseconds",
    "process_of",
    "span",
    "thread_of",
]


STEPS = 1
"""The thread of the trace on which steps are drawn; those of the rank follow."""

Record = dict[str, Any]


def process_of(rank: int) -> int:
    """The process that a rank is in the trace."""
    return 1 + rank


def thread_of(thread: int) -> int:
    """The thread of the trace for a rank's own, which count from 0."""
    return 1 + STEPS + thread


def microseconds(time_ns: float, origin: float) -> float:
    """A time as the trace has it, exact to a nanosecond."""
    return round((time_ns - origin) / 1000, 3)


def span(begin_ns: float, end_ns: float, origin: float) -> Record:
    """Rounded so that what lies inside another still does."""
    begin, end = microseconds(begin_ns, origin), microseconds(end_ns, origin)
    return {"ts": begin, "dur": round(end - begin, 3)}


_MARK_NS = 10.0
"""How long the arrival of the last rank is drawn."""


def arrows(traces: Sequence[RankTrace], origin: float) -> Iterator[Record]:
    """Arrows, and the slices that they are tied to."""
    meetings: dict[tuple[str, int], list[tuple[int, Event]]] = defaultdict(list)
    outer: set[tuple[str, int]] = set()
    for trace in traces:
        for event, is_innermost in _spans(trace):
            if event.kind == "collective":
                meetings[event.group, event.number].append((trace.rank, event))
                if not is_innermost:
                    outer.add((event.group, event.number))
    numbers = count(1)  # Perfetto drops arrows whose name is no number
    for meeting, present in meetings.items():
        if meeting in outer:  # those inside it have their own arrows
            continue
        last_rank, last = max(present, key=lambda one: one[1].begin_ns)
        there = last.begin_ns + _MARK_NS
        # Who left before the last one came did not wait for it, as the root of a broadcast.
        waited = [(r, e) for r, e in present if r != last_rank and e.end_ns >= there + _MARK_NS]
        if not waited or last.end_ns < there:
            continue
        yield _slice(last_rank, last, "came last", last.begin_ns, there, origin)
        for rank, event in waited:
            yield _slice(rank, event, f"rank {last_rank} arrived", there, event.end_ns, origin)
            base = {"cat": "waiting", "name": "came last", "id": next(numbers)}
            yield {**base, "ph": "s", **_at(last_rank, last, last.begin_ns, origin)}
            yield {**base, "ph": "f", "bp": "e", **_at(rank, event, there, origin)}


def _spans(trace: RankTrace) -> Iterator[tuple[Event, bool]]:
    """What lasted, and whether nothing lies inside that an added slice could overlap with."""
    spans = [event for event in trace.events if event.kind in ("phase", "collective")]
    spans.sort(key=lambda e: (e.thread, e.begin_ns, -e.end_ns))
    for event, after in zip(spans, [*spans[1:], None], strict=True):
        holds = after and after.thread == event.thread and after.begin_ns < event.end_ns
        yield event, not holds


def _slice(
    rank: int, event: Event, name: str, begin_ns: float, end_ns: float, origin: float
) -> Record:
    where = {"pid": process_of(rank), "tid": thread_of(event.thread)}
    times = span(begin_ns, end_ns, origin)
    return {"ph": "X", "cat": "waiting", "name": name, **where, **times, "args": {}}


def _at(rank: int, event: Event, time_ns: float, origin: float) -> Record:
    return {
        "pid": process_of(rank),
        "tid": thread_of(event.thread),
        "ts": microseconds(time_ns, origin),
    }


MERGED = "trace.json.gz"
SUMMARY = "trace-summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """A trace that was written."""

    path: Path
    num_ranks: int
    num_events: int
    error_us: float
    """The largest clock error of any rank against rank 0."""
    slowest: Slowest | None
    missing: tuple[int, ...]
    """Ranks that left no file."""
    cut_off: tuple[int, ...]
    """Ranks whose file ends before their run did."""

    @property
    def sentence(self) -> str:
        """What is in it, in words."""
        parts = [
            f"{self.num_events} events of {self.num_ranks} rank{'s' * (self.num_ranks > 1)}",
            f"clocks within {self.error_us:.1f} us",
        ]
        if self.missing:
            parts.append(f"no file of ranks {', '.join(map(str, self.missing))}")
        if self.cut_off:
            parts.append(f"cut off: ranks {', '.join(map(str, self.cut_off))}")
        if self.slowest:
            parts.append(str(self.slowest))
        return "; ".join(parts)


def merge_folder(folder: Path) -> Merged:
    """Merge what the ranks recorded in a folder into one file there; it can be done again.

    Raises:
        ConfigError: there is nothing to merge.
    """
    traces = read_folder(folder)
    document = merge(traces)
    path = folder / MERGED
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(document, file, separators=(",", ":"))
    there = {trace.rank for trace in traces}
    merged = Merged(
        path=path,
        num_ranks=len(traces),
        num_events=sum(len(trace.events) for trace in traces),
        error_us=max(trace.error_ns for trace in traces) / 1000,
        slowest=find_slowest(traces),
        missing=tuple(rank for rank in range(traces[0].size) if rank not in there),
        cut_off=tuple(trace.rank for trace in traces if not trace.is_whole),
    )
    facts = {**asdict(merged), "path": path.name}
    (folder / SUMMARY).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return merged


def merge(traces: Sequence[RankTrace]) -> Record:
    """The trace, as the object that its JSON holds. Pure."""
    origin = min((e.begin_ns for trace in traces for e in trace.events), default=0.0)
    records: list[Record] = []
    for trace in traces:
        records += _of_rank(trace, origin)
    records += arrows(traces, origin)
    names = [record for trace in traces for record in _names(trace)]
    records.sort(key=lambda record: (record["ts"], -record.get("dur", 0.0)))
    slowest = find_slowest(traces)
    return {
        "traceEvents": names + records,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "rank 0's; others corrected by offsets measured over MPI",
            "clock_error_us": max((t.error_ns for t in traces), default=0.0) / 1000,
            "clock_drift_us": {str(t.rank): _micro(t.drift_ns) for t in traces},
            "events_dropped": sum(t.num_dropped for t in traces),
            "slowest_step": None if slowest is None else str(slowest),
            "slowest_step_at_us": None
            if slowest is None
            else microseconds(slowest.begin_ns, origin),
        },
    }


def _micro(drift_ns: float | None) -> float | None:
    return None if drift_ns is None else round(drift_ns / 1000, 3)


def _names(trace: RankTrace) -> Iterator[Record]:
    base = {"ph": "M", "pid": process_of(trace.rank), "tid": STEPS}
    title = f"rank {trace.rank} on {trace.host}"
    yield {**base, "name": "process_name", "args": {"name": title}}
    yield {**base, "name": "process_sort_index", "args": {"sort_index": trace.rank}}
    yield {**base, "name": "thread_name", "args": {"name": "steps"}}
    for thread in sorted({event.thread for event in trace.events}):
        name = "script" if thread == 0 else f"thread {thread}"
        yield {**base, "tid": thread_of(thread), "name": "thread_name", "args": {"name": name}}


def _of_rank(trace: RankTrace, origin: float) -> Iterator[Record]:
    for number, (begin, end) in steps_of(trace).items():
        yield {
            "ph": "X",
            "cat": "step",
            "name": f"step {number}",
            "pid": process_of(trace.rank),
            "tid": STEPS,
            **span(begin, end, origin),
        }
    posted: dict[str, deque[Event]] = defaultdict(deque)
    for event in sorted(trace.events, key=lambda e: (e.begin_ns, -e.end_ns)):
        where = {"pid": process_of(trace.rank), "tid": thread_of(event.thread)}
        if event.kind == "post":
            posted[event.name].append(event)
        elif event.kind in ("phase", "collective"):
            args = {"group": event.group, "number": event.number} if event.group else {}
            yield {
                "ph": "X",
                "cat": event.kind,
                "name": event.name,
                **where,
                **span(event.begin_ns, event.end_ns, origin),
                "args": args,
            }
            if event.kind == "collective" and posted.get(event.name):
                yield from _in_flight(posted[event.name].popleft(), event, trace.rank, origin)


def _in_flight(post: Event, done: Event, rank: int, origin: float) -> Iterator[Record]:
    """A message from when it was sent to when it was received, on a separate line."""
    base = {
        "cat": "in flight",
        "name": done.name,
        "id": f"{rank}/{done.group}/{done.number}",
        "pid": process_of(rank),
        "tid": thread_of(done.thread),
    }
    yield {**base, "ph": "b", "ts": microseconds(post.begin_ns, origin)}
    yield {**base, "ph": "e", "ts": microseconds(done.end_ns, origin)}
