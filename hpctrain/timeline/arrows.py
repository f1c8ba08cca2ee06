"""Who waited for whom: arrows from the rank that came last into a collective. Pure.

Viewers tie an arrow's ends to the slices around them, and some draw it from the end of one to the
beginning of the other, or turn it around where the second began first. A collective begins earlier
on the rank that waits, so both ends get slices of their own inside it: a very short one where the
last rank comes, and from then on one on each rank that has waited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count

from hpctrain.timeline.files import Event, RankTrace
from hpctrain.timeline.placing import Record, microseconds, process_of, span, thread_of

__all__ = ["arrows"]

_MARK_NS = 10.0
"""How long the coming of the last rank is drawn."""


def arrows(traces: Sequence[RankTrace], origin: float) -> Iterator[Record]:
    """Arrows, and the slices that they are tied to."""
    meetings: dict[tuple[str, int], list[tuple[int, Event]]] = defaultdict(list)
    outer: set[tuple[str, int]] = set()
    for trace in traces:
        for event, is_innermost in _spans(trace):
            if event.kind == "collective":
                meetings[event.lane, event.number].append((trace.rank, event))
                if not is_innermost:
                    outer.add((event.lane, event.number))
    numbers = count(1)  # Perfetto drops arrows whose name is no number
    for meeting, present in meetings.items():
        if meeting in outer:  # those inside it have arrows of their own
            continue
        last_rank, last = max(present, key=lambda one: one[1].begin_ns)
        there = last.begin_ns + _MARK_NS
        # Who left before the last one came did not wait for it, as the root of a broadcast.
        waited = [(r, e) for r, e in present if r != last_rank and e.end_ns >= there + _MARK_NS]
        if not waited or last.end_ns < there:
            continue
        yield _slice(last_rank, last, "came last", last.begin_ns, there, origin)
        for rank, event in waited:
            yield _slice(rank, event, f"rank {last_rank} is there", there, event.end_ns, origin)
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
