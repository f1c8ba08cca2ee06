"""Who is missing from a collective that does not end: pure, from what the ranks answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.faults.answer import Answer, Call, Silence, Standing, quote

__all__ = ["Kind", "Missing", "Verdict", "judge"]


class Kind(StrEnum):
    """Why a rank is missing."""

    OUTSIDE = "outside"
    EARLIER = "earlier"
    OTHER = "other"
    SILENT = "silent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A rank that has not entered the call, and what it does instead."""

    rank: int
    kind: Kind
    doing: str
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The call that does not end, seen from all ranks."""

    number: int
    name: str
    seconds: float
    """How long the first of the waiting ranks has been in it."""
    complete_s: float
    """How long the last of them has been in it."""
    waiting: tuple[int, ...]
    missing: tuple[Missing, ...]
    ahead: tuple[int, ...]
    """Ranks that have left it already, such as the root of a broadcast."""

    @property
    def call(self) -> Call:
        """The call itself."""
        return Call(number=self.number, name=self.name, seconds=self.seconds)


def judge(answers: Mapping[int, Answer | Silence], *, long_s: float = 0.0) -> Verdict | None:
    """Find the call that holds everybody up and who is missing from it.

    Ranks may wait in different calls. The earliest call that somebody is missing from is the one
    to report: those who wait further on only wait for the ones who wait there.

    Args:
        answers: By rank, the ranks of one lane.
        long_s: Calls that no rank has been in for so long are not what holds the others up.

    Returns:
        The verdict, with no `missing` when all are there; None when no rank is in such a call.
    """
    told = {rank: answer for rank, answer in answers.items() if isinstance(answer, Answer)}
    numbers = sorted(
        {
            call.number
            for answer in told.values()
            for call in _only(answer.standing.open, answer.standing.innermost)
            if call.seconds >= long_s
        }
    )
    verdict = None
    for number in numbers:
        verdict = _judge_call(number, answers, told)
        if verdict.missing:
            break
    return verdict


def _judge_call(
    number: int, answers: Mapping[int, Answer | Silence], told: Mapping[int, Answer]
) -> Verdict:
    inside = {
        rank: call
        for rank, answer in sorted(told.items())
        for call in answer.standing.open
        if call.number == number
    }
    # Most of those inside are right; where there is no majority, the lowest rank is.
    name = Counter(call.name for call in inside.values()).most_common(1)[0][0]
    waiting: dict[int, float] = {}
    missing: list[Missing] = []
    ahead: list[int] = []
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, Silence):
            missing.append(Missing(rank=rank, kind=Kind.SILENT, doing=answer.reason))
            continue
        seconds = _seconds_inside(answer.standing, number, name)
        kind = _kind(answer.standing, number, name)
        if seconds is not None:
            waiting[rank] = seconds
        elif kind is None:
            ahead.append(rank)
        else:
            doing = _describe(answer, kind, number)
            missing.append(Missing(rank=rank, kind=kind, doing=doing, place=answer.place))
    return Verdict(
        number=number,
        name=name,
        seconds=max(waiting.values()),
        complete_s=min(waiting.values()),
        waiting=tuple(waiting),
        missing=tuple(missing),
        ahead=tuple(ahead),
    )


def _seconds_inside(standing: Standing, number: int, name: str) -> float | None:
    """How long a rank has been in the call; None when it is not in it."""
    for call in standing.open:
        if call.name != name:
            continue
        # Two threads of a rank may enter in another order than those of the others.
        if call.number == number or standing.num_threads > 1:
            return call.seconds
    return None


def _kind(standing: Standing, number: int, name: str) -> Kind | None:
    """Why a rank that is not in the call is missing from it; None when it has left it already."""
    made = standing.recent.get(number)
    if made is None and standing.entered < number:
        return Kind.EARLIER if standing.open else Kind.OUTSIDE
    if made is None or made == name:
        return None
    nearby = standing.recent.values() if standing.num_threads > 1 else ()
    return None if name in nearby else Kind.OTHER


def _describe(answer: Answer, kind: Kind, number: int) -> str:
    """What a missing rank does instead."""
    standing = answer.standing
    if kind is Kind.EARLIER or kind is Kind.OTHER:
        now = _innermost(standing)
        text = f"is in {now} for {now.seconds:.1f} s" if now else "is in no call now"
        if kind is Kind.OTHER and (now is None or now.number != number):
            made = quote(standing.recent.get(number, ""))
            text = f"made {made} as #{number} and {text}"
    elif standing.ended is None:
        text = "is outside and has made no call yet"
    else:
        ended = standing.ended
        text = f"is outside; its last call, {ended}, ended {ended.seconds:.1f} s ago"
    return "; ".join([text, *(f"it is in {other}" for other in answer.elsewhere)])


def _innermost(standing: Standing) -> Call | None:
    """The open call that was entered last."""
    return max(_only(standing.open, standing.innermost), key=lambda c: c.number, default=None)


def _only(calls: Iterable[Call], numbers: tuple[int, ...]) -> list[Call]:
    return [call for call in calls if call.number in numbers]
