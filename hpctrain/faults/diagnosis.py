"""Why a collective does not end: who is missing, where calls first differ, and the report. Pure.

`diagnose` finds who is missing from the replies of all ranks. Calls are numbered in order, so calls
with the same number should be the same call: `find_divergence` finds the first that is not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpctrain.faults.calls import Call, CallHistory, CallState, quote
from hpctrain.faults.channel import UNREACHED
from hpctrain.log import name_ranks
from hpctrain.world import END_OF_BLOCK

__all__ = [
    "DIED_UNEXPECTEDLY",
    "Diagnosis",
    "Divergence",
    "MissingKind",
    "MissingRank",
    "NoReply",
    "Reply",
    "describe_oom_kills",
    "diagnose",
    "find_divergence",
    "render_calls",
    "render_report",
    "summarize",
]

DIED_UNEXPECTEDLY = "died unexpectedly (killed, or crashed)"
"""Of a rank that is gone and has said nothing."""
_CARGO = re.compile(r"(?P<call>.*) (?P<dtype>\w+) \((?P<shape>[^()]*)\)")
_MOST_GROUPS = 4
_MOST_RANKS = 16
_GRADIENTS = (" bucket ", "gradients")  # what the exchanges of a training step are called


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a rank says it is doing."""

    state: CallState
    patience_s: float
    """The longer timeout it currently requests from all, if its own calls or work take long; 0:
    none."""
    surveying: bool = False
    """Whether it is itself querying the others."""
    elsewhere: tuple[str, ...] = ()
    """Open calls in other groups of ranks."""
    place: str = ""
    """The line of user code that its main thread executes."""

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Reply:
        """A reply as received over the channel, made by `dataclasses.asdict`."""
        state = told["state"]
        ended = state["ended"]
        return cls(
            state=CallState(
                entered=state["entered"],
                open=tuple(Call(**call) for call in state["open"]),
                innermost=tuple(state["innermost"]),
                ended=None if ended is None else Call(**ended),
                recent={int(number): name for number, name in state["recent"].items()},
                num_threads=state["num_threads"],
            ),
            patience_s=told["patience_s"],
            surveying=told["surveying"],
            elsewhere=tuple(told["elsewhere"]),
            place=told["place"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NoReply:
    """A rank that does not reply, and what is known of why."""

    reason: str


class MissingKind(StrEnum):
    """Why a rank is missing."""

    OUTSIDE = "outside"
    EARLIER = "earlier"
    OTHER = "other"
    SILENT = "silent"


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingRank:
    """A rank that has not entered the call, and what it does instead."""

    rank: int
    kind: MissingKind
    doing: str
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The call that does not end, seen from all ranks."""

    number: int
    name: str
    seconds: float
    """How long the first of the waiting ranks has been in it."""
    complete_s: float
    """How long the last of them has been in it."""
    waiting: tuple[int, ...]
    missing: tuple[MissingRank, ...]
    ahead: tuple[int, ...]
    """Ranks that have completed it already, such as the root of a broadcast."""

    @property
    def call(self) -> Call:
        """The call itself."""
        return Call(number=self.number, name=self.name, seconds=self.seconds)


def diagnose(replies: Mapping[int, Reply | NoReply], *, long_s: float = 0.0) -> Diagnosis | None:
    """Find the call that blocks all ranks and who is missing from it.

    Ranks may wait in different calls. The earliest call with a missing rank is the one
    to report: those who wait further on only wait for the ones who wait there.

    Args:
        replies: By rank, the ranks of one log.
        long_s: Calls that no rank has been in for so long are not what holds the others up.

    Returns:
        The diagnosis, with no `missing` when all are there; None when no rank is in such a call.
    """
    told = {rank: reply for rank, reply in replies.items() if isinstance(reply, Reply)}
    numbers = sorted(
        {
            call.number
            for reply in told.values()
            for call in _only(reply.state.open, reply.state.innermost)
            if call.seconds >= long_s
        }
    )
    diagnosis = None
    for number in numbers:
        diagnosis = _diagnose_call(number, replies, told)
        if diagnosis.missing:
            break
    return diagnosis


def _diagnose_call(
    number: int, replies: Mapping[int, Reply | NoReply], told: Mapping[int, Reply]
) -> Diagnosis:
    inside = {
        rank: call
        for rank, reply in sorted(told.items())
        for call in reply.state.open
        if call.number == number
    }
    # Most of those inside are right; where there is no majority, the lowest rank is.
    name = Counter(call.name for call in inside.values()).most_common(1)[0][0]
    waiting: dict[int, float] = {}
    missing: list[MissingRank] = []
    ahead: list[int] = []
    for rank, reply in sorted(replies.items()):
        if isinstance(reply, NoReply):
            missing.append(MissingRank(rank=rank, kind=MissingKind.SILENT, doing=reply.reason))
            continue
        seconds = _seconds_inside(reply.state, number, name)
        kind = _kind(reply.state, number, name)
        if seconds is not None:
            waiting[rank] = seconds
        elif kind is None:
            ahead.append(rank)
        else:
            doing = _describe(reply, kind, number)
            missing.append(MissingRank(rank=rank, kind=kind, doing=doing, place=reply.place))
    return Diagnosis(
        number=number,
        name=name,
        seconds=max(waiting.values()),
        complete_s=min(waiting.values()),
        waiting=tuple(waiting),
        missing=tuple(missing),
        ahead=tuple(ahead),
    )


def _seconds_inside(state: CallState, number: int, name: str) -> float | None:
    """How long a rank has been in the call; None when it is not in it."""
    for call in state.open:
        if call.name != name:
            continue
        # Two threads of a rank may enter in another order than those of the others.
        if call.number == number or state.num_threads > 1:
            return call.seconds
    return None


def _kind(state: CallState, number: int, name: str) -> MissingKind | None:
    """Why a rank that is not in the call is missing from it; None when it has left it already."""
    made = state.recent.get(number)
    if made is None and state.entered < number:
        return MissingKind.EARLIER if state.open else MissingKind.OUTSIDE
    if made is None or made == name:
        return None
    nearby = state.recent.values() if state.num_threads > 1 else ()
    return None if name in nearby else MissingKind.OTHER


def _describe(reply: Reply, kind: MissingKind, number: int) -> str:
    """What a missing rank does instead."""
    state = reply.state
    if kind is MissingKind.EARLIER or kind is MissingKind.OTHER:
        now = _innermost(state)
        text = f"is in {now} for {now.seconds:.1f} s" if now else "is in no call now"
        if kind is MissingKind.OTHER and (now is None or now.number != number):
            made = quote(state.recent.get(number, ""))
            text = f"made {made} as #{number} and {text}"
    elif any(END_OF_BLOCK in other for other in reply.elsewhere):
        return f"has left the training loop and is at {END_OF_BLOCK}, after {state.entered} calls"
    elif state.ended is None and state.entered:
        text = f"has closed this connection, after {state.entered} calls"
    elif state.ended is None:
        text = "is outside and has made no call yet"
    else:
        ended = state.ended
        text = f"is outside; its last call, {ended}, ended {ended.seconds:.1f} s ago"
    return "; ".join([text, *(f"it is in {other}" for other in reply.elsewhere)])


def _innermost(state: CallState) -> Call | None:
    """The open call that was entered last."""
    return max(_only(state.open, state.innermost), key=lambda c: c.number, default=None)


def _only(calls: Iterable[Call], numbers: tuple[int, ...]) -> list[Call]:
    return [call for call in calls if call.number in numbers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that made the same call."""

    ranks: tuple[int, ...]
    name: str
    how: str = ""
    """How it differs from the majority."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first number at which ranks made different calls; the first group is the usual one."""

    number: int
    groups: tuple[Group, ...]


def find_divergence(recent: Mapping[int, Mapping[int, str]]) -> Divergence | None:
    """Find the first call that is not the same on all ranks.

    Args:
        recent: By rank, the names of its last calls by number. Calls that a rank has not made yet,
            or has forgotten, do not count.

    Returns:
        Most ranks' call first; where there is no majority, the lowest rank's.
    """
    for number in sorted({number for names in recent.values() for number in names}):
        made = {rank: names[number] for rank, names in sorted(recent.items()) if number in names}
        common = Counter(made.values()).most_common()
        if len(common) < 2:
            continue
        groups = []
        usual_rank = next(rank for rank, name in made.items() if name == common[0][0])
        for name, _ in common:
            ranks = tuple(rank for rank, own in made.items() if own == name)
            usual, odd = (_from(recent[rank], number) for rank in (usual_rank, ranks[0]))
            how = "" if name == common[0][0] else _how(usual, odd)
            groups.append(Group(ranks=ranks, name=name, how=how))
        return Divergence(number=number, groups=tuple(groups))
    return None


def _from(names: Mapping[int, str], number: int) -> list[str]:
    """The calls from a number on, as far as they follow each other."""
    found = []
    while number in names:
        found.append(names[number])
        number += 1
    return found


def _how(usual: Sequence[str], odd: Sequence[str]) -> str:
    """In which way the odd sequence differs from the usual one; they differ in the first call."""
    if odd[:2] == usual[1::-1] and len(odd) > 1:
        return "in another order"
    if len(usual) > 1 and all(a == b for a, b in zip(odd, usual[1:], strict=False)):
        return f"skipped {quote(usual[0])}"
    if len(odd) > 1 and all(a == b for a, b in zip(odd[1:], usual, strict=False)):
        return "a call that the others did not make"
    mine, theirs = _CARGO.fullmatch(odd[0]), _CARGO.fullmatch(usual[0])
    if mine and theirs and mine["call"] == theirs["call"]:
        return "another shape" if mine["dtype"] == theirs["dtype"] else "another dtype"
    return "another call"


def render_calls(
    number: int,
    found: Divergence | None,
    histories: Mapping[int, CallHistory],
    *,
    waiting: int,
    places: bool,
) -> list[str]:
    """The lines that name the calls that differ and where they were made.

    Args:
        number: Of the call that does not end.
        found: Where the calls differ first; None where they do not.
        histories: The last calls of some ranks of each kind.
        waiting: A rank that waits in that call.
        places: Whether calls of the same name are worth comparing by place.
    """
    if found is not None:
        return [
            f"  the ranks' calls differ first at #{found.number}:",
            *_render_groups(found, histories),
        ]
    lines = []
    if waiting in histories and (place := histories[waiting].places.get(number)):
        lines.append(f"  rank {waiting} waits at {place}")
    parted = _first_parting(histories) if places else None
    if parted is not None:
        lines.append(
            f"  call #{parted} has the same name on all ranks, but was made in several places:"
        )
        for rank, history in sorted(histories.items()):
            if place := history.places.get(parted):
                lines.append(f"    rank {rank} at {place}")
    return lines


def _first_parting(histories: Mapping[int, CallHistory]) -> int | None:
    """The first number whose calls were made from different places."""
    for number in sorted({number for history in histories.values() for number in history.places}):
        places = {
            history.places[number] for history in histories.values() if number in history.places
        }
        if len(places) > 1:
            return number
    return None


def _render_groups(found: Divergence, histories: Mapping[int, CallHistory]) -> list[str]:
    lines = []
    for group in found.groups[:_MOST_GROUPS]:
        how = f" ({group.how})" if group.how else ""
        lines.append(f"    {name_ranks(group.ranks)}: {quote(group.name)}{how}")
        history = next((histories[rank] for rank in group.ranks if rank in histories), None)
        if history is not None and (place := history.places.get(found.number)):
            lines.append(f"      at {place}")
    if len(found.groups) > _MOST_GROUPS:
        lines.append(f"    and {len(found.groups) - _MOST_GROUPS} other calls")
    return lines


def summarize(diagnosis: Diagnosis, *, timeout_s: float) -> str:
    """One line: who waits, for whom, in which call."""
    have = "have" if len(diagnosis.waiting) > 1 else "has"
    head = (
        f"{name_ranks(diagnosis.waiting)} {have} waited {diagnosis.seconds:.1f} s "
        f"(timeout {timeout_s:g} s) in {diagnosis.call}"
    )
    if diagnosis.missing:
        return f"{head} for {name_ranks(one.rank for one in diagnosis.missing)}"
    return f"{head}, and no rank is missing: the exchange itself does not complete"


def describe_oom_kills(count: int) -> str:
    """How many processes of its control group the kernel has killed for memory; nothing for 0."""
    s = "es" if count > 1 else ""
    return f"the OOM killer has killed {count} process{s} here" if count else ""


def render_report(
    diagnosis: Diagnosis,
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
        diagnosis: Who waits for whom.
        timeout_s: How long a call may last.
        hosts: Host name and process of each rank that may be named.
        stacks: Python stacks by rank, as far as they are known.
        speaker: The rank that speaks and the call that it waits in.
        code: The exit code that follows.
        calls: What comparing the ranks' last calls shows.
    """
    size = len(diagnosis.waiting) + len(diagnosis.missing) + len(diagnosis.ahead)
    lines = [f"hpctrain: watchdog: {summarize(diagnosis, timeout_s=timeout_s)} (of {size})"]
    for one in diagnosis.missing[:_MOST_RANKS]:
        at = f"\n    at {one.place}" if one.place else ""
        lines.append(f"  rank {one.rank} on {hosts[one.rank]} {_instead(diagnosis, one.rank)}{at}")
    hidden = diagnosis.missing[_MOST_RANKS:]
    if hidden:
        lines.append(f"  also missing: {name_ranks(one.rank for one in hidden)}")
    if diagnosis.ahead:
        lines.append(f"  {name_ranks(diagnosis.ahead)} left that call before")
    rank, call = speaker
    if call.number != diagnosis.number:
        lines.append(f"  noticed by rank {rank}, which has been in {call} for {call.seconds:.1f} s")
    early = _perhaps_done(diagnosis)
    if early:
        lines.append(
            f"  if {name_ranks(early)} had no data left while the others had: put the training "
            "loop into `with replica.join():`"
        )
    if not diagnosis.missing:
        lines.append("  check the network, or raise the timeout if the exchange is just slow")
    lines += calls
    absent = {one.rank for one in diagnosis.missing}
    for rank, text in stacks.items():
        role = "missing" if rank in absent else "waiting"
        lines.append(f"stacks of rank {rank} on {hosts[rank]} ({role}):")
        lines += [f"  {line}" for line in text.splitlines()]
    lines.append(f"hpctrain: watchdog: ending all ranks with exit code {code}")
    return "\n".join(lines) + "\n"


def _instead(diagnosis: Diagnosis, rank: int) -> str:
    """What a missing rank does instead of being in the call."""
    one = next(one for one in diagnosis.missing if one.rank == rank)
    if one.kind is MissingKind.SILENT:
        return f"does not reply: {one.doing}"
    if one.kind is not MissingKind.OTHER:
        return one.doing
    verb = "are" if len(diagnosis.waiting) > 1 else "is"
    there = f"{name_ranks(diagnosis.waiting)} {verb} in {quote(diagnosis.name)} #{diagnosis.number}"
    return f"{one.doing}, while {there}"


def _perhaps_done(diagnosis: Diagnosis) -> list[int]:
    """Ranks that may have left the training loop while others exchange gradients."""
    if not any(word in diagnosis.name for word in _GRADIENTS):
        return []
    return [
        one.rank
        for one in diagnosis.missing
        if one.kind in (MissingKind.OUTSIDE, MissingKind.OTHER) or one.doing.startswith(UNREACHED)
    ]
