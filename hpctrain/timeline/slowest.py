"""Which step took longest, and who and what made it so. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hpctrain.timeline.files import Event, RankTrace

__all__ = ["Slowest", "blame", "find_slowest", "own_times", "steps_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowest:
    """The slowest step of a run."""

    step: int
    seconds: float
    median_s: float
    """Of all steps."""
    rank: int
    """The rank that worked longest in it, or came last to it."""
    phase: str
    """The phase that took longer than usual there; empty: none was recorded."""
    extra_s: float
    """How much more than in that rank's median step."""
    begin_ns: float
    """On rank 0's clock, as in the trace."""

    def __str__(self) -> str:
        return (
            f"the slowest step is number {self.step}: {self.seconds * 1000:.1f} ms, "
            f"{self.seconds / self.median_s:.1f} times the median; "
            f"{blame(self.rank, self.phase, self.extra_s)}"
        )


def blame(rank: int, phase: str, extra_s: float) -> str:
    """Who made a step slow, in words; the rank that came last did not wait in its exchange."""
    if not phase or extra_s <= 0:
        return f"rank {rank} held it up"
    took = f"took {1000 * extra_s:.1f} ms more than usual"
    if phase == "exchange":
        return f"no rank held it up: the exchange itself {took}, on rank {rank}, the last, too"
    return f"rank {rank} held it up, {phase} {took}"


def steps_of(trace: RankTrace) -> dict[int, tuple[float, float]]:
    """When each step began and ended, from the end of the one before; the first is not known."""
    marks = [(int(e.name), e.end_ns) for e in trace.events if e.kind == "step"]
    return {
        number: (before, end)
        for (last, before), (number, end) in pairwise(marks)
        if number == last + 1
    }


def own_times(events: Sequence[Event], begin_ns: float, end_ns: float) -> dict[str, float]:
    """Seconds of each phase in a stretch of time; what is inside another is the inner one's.

    The sum of all phases is then no more than the stretch.
    """
    inside = [
        e for e in events if e.kind == "phase" and e.end_ns > begin_ns and e.begin_ns < end_ns
    ]
    inside.sort(key=lambda e: (e.thread, e.begin_ns, -e.end_ns))
    times: dict[str, float] = {}
    stack: list[Event] = []
    for event in inside:
        while stack and (stack[-1].thread != event.thread or stack[-1].end_ns <= event.begin_ns):
            stack.pop()
        seconds = (min(event.end_ns, end_ns) - max(event.begin_ns, begin_ns)) / 1e9
        times[event.name] = times.get(event.name, 0.0) + seconds
        if stack:
            times[stack[-1].name] -= seconds
        stack.append(event)
    return times


def find_slowest(traces: Sequence[RankTrace]) -> Slowest | None:
    """The step that lasted longest on any rank; None where fewer than two steps were recorded."""
    steps = [steps_of(trace) for trace in traces]
    numbers = set.intersection(*(set(one) for one in steps)) if steps else set()
    if not numbers:
        return None
    lasted = {n: max(one[n][1] - one[n][0] for one in steps) / 1e9 for n in numbers}
    worst = max(sorted(numbers), key=lambda n: lasted[n])
    times = [own_times(t.events, *one[worst]) for t, one in zip(traces, steps, strict=True)]
    # Waiting for others is in `exchange`: they wait for the rank that works longest elsewhere.
    elsewhere = [
        one[worst][1] - one[worst][0] - 1e9 * spent.get("exchange", 0.0)
        for one, spent in zip(steps, times, strict=True)
    ]
    index = max(range(len(traces)), key=lambda i: elsewhere[i])
    usual = _median_times(traces[index], steps[index])
    more = {name: seconds - usual.get(name, 0.0) for name, seconds in times[index].items()}
    phase = max(more, key=lambda name: more[name], default="")
    return Slowest(
        step=worst,
        seconds=lasted[worst],
        median_s=median(lasted.values()),
        rank=traces[index].rank,
        phase=phase,
        extra_s=more.get(phase, 0.0),
        begin_ns=min(one[worst][0] for one in steps),
    )


def _median_times(trace: RankTrace, steps: dict[int, tuple[float, float]]) -> dict[str, float]:
    """Of a sample of steps, which is enough for a median."""
    phases = sorted((e for e in trace.events if e.kind == "phase"), key=lambda e: e.begin_ns)
    begins = [event.begin_ns for event in phases]
    longest = max((event.end_ns - event.begin_ns for event in phases), default=0.0)
    every = []
    for begin, end in list(steps.values())[:: max(1, len(steps) // 200)]:
        near = phases[bisect_left(begins, begin - longest) : bisect_left(begins, end)]
        every.append(own_times(near, begin, end))
    names = {name for times in every for name in times}
    return {name: median(times.get(name, 0.0) for times in every) for name in names}
