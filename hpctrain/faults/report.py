"""What people read when a collective does not end: pure, from the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpctrain.faults.answer import Call, quote
from hpctrain.faults.survey import UNREACHED
from hpctrain.faults.verdict import Kind, Verdict
from hpctrain.log import format_ranges

__all__ = ["describe_death", "name_ranks", "render", "summarize"]

_MOST_RANKS = 16
_GRADIENTS = (" bucket ", "gradients")  # what the exchanges of a training step are called


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2,5`."""
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks, limit=_MOST_RANKS)}"


def summarize(verdict: Verdict, *, timeout_s: float) -> str:
    """One line: who waits, for whom, in which call."""
    have = "have" if len(verdict.waiting) > 1 else "has"
    head = (
        f"{name_ranks(verdict.waiting)} {have} waited {verdict.seconds:.1f} s "
        f"(timeout {timeout_s:g} s) in {verdict.call}"
    )
    if verdict.missing:
        return f"{head} for {name_ranks(one.rank for one in verdict.missing)}"
    return f"{head}, and no rank is missing: the exchange itself does not end"


def describe_death(*, num_oom_kills: int) -> str:
    """How a rank ended that said nothing, as far as it can be known.

    Args:
        num_oom_kills: How many processes of its control group the kernel has killed for memory.
    """
    died = "died without a word (killed, or crashed)"
    if not num_oom_kills:
        return died
    s = "es" if num_oom_kills > 1 else ""
    return f"{died}; the kernel has killed {num_oom_kills} process{s} here for want of memory"


def render(
    verdict: Verdict,
    *,
    timeout_s: float,
    hosts: Mapping[int, str],
    stacks: Mapping[int, str],
    speaker: tuple[int, Call],
    code: int,
    calls: Sequence[str] = (),
) -> str:
    """The whole report.

    Args:
        verdict: Who waits for whom.
        timeout_s: How long a call may last.
        hosts: Host name and process of each rank that may be named.
        stacks: Python stacks by rank, as far as they are known.
        speaker: The rank that speaks and the call that it waits in.
        code: The exit code that follows.
        calls: What the ranks' ledgers say.
    """
    size = len(verdict.waiting) + len(verdict.missing) + len(verdict.ahead)
    lines = [f"hpctrain: watchdog: {summarize(verdict, timeout_s=timeout_s)} (of {size})"]
    for one in verdict.missing[:_MOST_RANKS]:
        at = f"\n    at {one.place}" if one.place else ""
        lines.append(f"  rank {one.rank} on {hosts[one.rank]} {_instead(verdict, one.rank)}{at}")
    hidden = verdict.missing[_MOST_RANKS:]
    if hidden:
        lines.append(f"  also missing: {name_ranks(one.rank for one in hidden)}")
    if verdict.ahead:
        lines.append(f"  {name_ranks(verdict.ahead)} left that call before")
    rank, call = speaker
    if call.number != verdict.number:
        lines.append(f"  noticed by rank {rank}, which has been in {call} for {call.seconds:.1f} s")
    early = _perhaps_done(verdict)
    if early:
        lines.append(
            f"  if {name_ranks(early)} had no data left while the others had: put the training "
            "loop into `with replica.join():`"
        )
    if not verdict.missing:
        lines.append("  see to the network, or allow more time where the exchange is merely long")
    lines += calls
    absent = {one.rank for one in verdict.missing}
    for rank, text in stacks.items():
        role = "missing" if rank in absent else "waiting"
        lines.append(f"stacks of rank {rank} on {hosts[rank]} ({role}):")
        lines += [f"  {line}" for line in text.splitlines()]
    lines.append(f"hpctrain: watchdog: ending all ranks with exit code {code}")
    return "\n".join(lines) + "\n"


def _instead(verdict: Verdict, rank: int) -> str:
    """What a missing rank does instead of being in the call."""
    one = next(one for one in verdict.missing if one.rank == rank)
    if one.kind is Kind.SILENT:
        return f"does not answer: {one.doing}"
    if one.kind is not Kind.OTHER:
        return one.doing
    verb = "are" if len(verdict.waiting) > 1 else "is"
    there = f"{name_ranks(verdict.waiting)} {verb} in {quote(verdict.name)} #{verdict.number}"
    return f"{one.doing}, while {there}"


def _perhaps_done(verdict: Verdict) -> list[int]:
    """Ranks that may have left the training loop while others exchange gradients."""
    if not any(word in verdict.name for word in _GRADIENTS):
        return []
    return [
        one.rank
        for one in verdict.missing
        if one.kind in (Kind.OUTSIDE, Kind.OTHER) or one.doing.startswith(UNREACHED)
    ]
