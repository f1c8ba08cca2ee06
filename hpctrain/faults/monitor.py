"""The threads behind the watchdog: one looks for calls that last too long, one replies to peers.

A process has one monitor for each world. Each source of collectives has its own call logs in
it, each with its timeout (`hpctrain.faults.watchdog`). When a call has lasted too long, the monitor
queries all ranks for what they are doing (`Survey`), determines who is missing (`diagnosis`),
prints one report and ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NoReturn

from hpctrain import log
from hpctrain.errors import LaunchError
from hpctrain.exit_codes import DIED, TIMED_OUT
from hpctrain.faults.calls import (
    THREAD_PREFIX,
    Call,
    CallHistory,
    CallLog,
    CallState,
    format_stacks,
    users_place,
)
from hpctrain.faults.channel import UNREACHED, Message, Peer, PeerLink, Responder, ask_all
from hpctrain.faults.diagnosis import (
    DIED_UNEXPECTEDLY,
    Diagnosis,
    MissingKind,
    MissingRank,
    NoReply,
    Reply,
    describe_oom_kills,
    diagnose,
    find_divergence,
    render_calls,
    render_report,
    summarize,
)
from hpctrain.faults.peers import describe_process, describe_stop, exchange_addresses
from hpctrain.world import (
    Launch,
    World,
    abort,
    before_abort,
    count_oom_kills,
    note_exit,
    note_failed_hosts,
    prepare_abort,
    report_exit,
)

__all__ = ["EXIT_CODE", "Monitor", "Survey", "end_job"]

EXIT_CODE = TIMED_OUT

_ABORT_S = 5
_REPLY_S = 2.0
"""How long a rank may take to report what it is doing."""
_STACKS_S = 1.5
_HISTORY_S = 0.5
_MOST_GROUPS = 4
_MOST_STACKS = 4
# A rank that was queried leaves the report to the querying rank, for this long.
_DEFER_S = 10.0
_STAGGER_S = 0.02
_LONGEST_STAGGER_S = 0.5
_SHORTEST_LOOK_S = 0.05
_LONGEST_LOOK_S = 1.0


class Survey:
    """Queries the other ranks over the channel; every wait has a timeout.

    Args:
        world: The ranks.
        peers: How to reach them.
    """

    def __init__(self, world: World, peers: Mapping[int, Peer]) -> None:
        self._world = world
        self._peers = peers

    def ask_ranks(self, calls: CallLog, own: Reply) -> dict[int, Reply | NoReply]:
        """What all ranks of a log are doing; `own` is this rank's reply."""
        question = {"ask": "where", "calls": calls.key, "by": self._world.rank}
        replies: dict[int, Reply | NoReply] = {self._world.rank: own}
        for rank, told in self._ask(calls.ranks, question, _REPLY_S).items():
            replies[rank] = (
                NoReply(reason=self._why(rank, told)) if isinstance(told, str) else Reply.read(told)
            )
        return replies

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The stacks of some ranks, or why they cannot be had."""
        told = self._ask(ranks, {"ask": "stacks"}, _STACKS_S)
        found = {}
        for rank in ranks:
            reply = {"stacks": format_stacks()} if rank == self._world.rank else told[rank]
            found[rank] = reply if isinstance(reply, str) else str(reply["stacks"])
        return found

    def compare(
        self,
        calls: CallLog,
        diagnosis: Diagnosis,
        replies: Mapping[int, Reply | NoReply],
        named: Sequence[int],
    ) -> list[str]:
        """Compare the last calls of ranks: where they differ first, and where they were made.

        Args:
            calls: The log of these ranks.
            diagnosis: Which of them does not end.
            replies: Of all ranks.
            named: The ranks that the report names; the last of them waits.
        """
        states = {rank: a.state for rank, a in replies.items() if isinstance(a, Reply)}
        # Threads of one rank may enter in another order than those of another.
        ordered = all(state.num_threads <= 1 for state in states.values())
        found = None
        if ordered:
            found = find_divergence({rank: one.recent for rank, one in states.items()})
        groups = () if found is None else found.groups[:_MOST_GROUPS]
        ranks = sorted({*named, *(group.ranks[0] for group in groups)})
        told = self._ask(ranks, {"ask": "history", "calls": calls.key}, _HISTORY_S)
        histories = {
            r: CallHistory.read(history)
            for r, history in told.items()
            if isinstance(history, dict) and history
        }
        if self._world.rank in ranks:
            histories[self._world.rank] = calls.history()
        return render_calls(diagnosis.number, found, histories, waiting=named[-1], places=ordered)

    def _ask(
        self, ranks: Sequence[int], question: Message, timeout_s: float
    ) -> dict[int, Message | str]:
        others = {rank: self._peers[rank] for rank in ranks if rank != self._world.rank}
        return ask_all(others, question, timeout_s=timeout_s)

    def _why(self, rank: int, reason: str) -> str:
        """Add the kernel's process state of a rank that does not reply, if it is on this node."""
        if self._world.ranks[rank].node_rank != self._world.node_rank:
            return f"{reason}; it has ended, is stopped, or its node is unreachable"
        listens = not reason.startswith(UNREACHED)
        return f"{reason}; {describe_process(self._peers[rank], listens=listens)}"


class Monitor:
    """Collective: checks the call logs of this rank, and replies to queries of other ranks.

    Args:
        world: More than one rank.

    Raises:
        LaunchError: on all ranks, when a rank cannot listen.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._logs: dict[str, CallLog] = {}
        self._closed: dict[str, int] = {}
        """How many calls were made in logs that are not looked at any more."""
        self._num_logs: dict[str, int] = {}
        self._patience: list[float] = []
        self._lingering = (0.0, 0.0)
        self._lock = threading.Lock()
        self._surveying = False
        self._not_before = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._responder: Responder | None = None
        self._link: PeerLink | None = None
        trouble = None
        try:
            self._responder = Responder(self._reply, remote=world.num_nodes > 1)
        except OSError as error:
            trouble = f"the watchdog cannot listen on a TCP port ({error})"
        try:
            self.peers = exchange_addresses(world, self._responder, trouble)
        except LaunchError:
            self.stop()
            raise
        self.survey = Survey(world, self.peers)
        self._thread = threading.Thread(target=self._watch, name=THREAD_PREFIX, daemon=True)
        self._thread.start()
        self._link = self._link_to_next()
        atexit.register(self.stop)  # a rank that exits normally announces it
        before_abort.append(self._announce_exit)

    @property
    def is_running(self) -> bool:
        """Whether it still looks and replies."""
        return not self._stopping.is_set()

    def name_log(self, kind: str) -> str:
        """A key for a new log: all its ranks make the logs of a kind in the same order."""
        with self._lock:
            nth = self._num_logs.get(kind, 0)
            self._num_logs[kind] = nth + 1
        return f"{kind}/{nth}"

    def add(self, calls: CallLog) -> None:
        """Start monitoring a log."""
        with self._lock:
            self._logs = {**self._logs, calls.key: calls}

    def remove(self, calls: CallLog) -> None:
        """Stop monitoring it."""
        with self._lock:
            self._closed[calls.key] = calls.state().entered
            self._logs = {key: one for key, one in self._logs.items() if one is not calls}

    def begin_patience(self, seconds: float) -> None:
        """Calls may last at least so long, until `end_patience`."""
        self._patience.append(seconds)

    def end_patience(self, seconds: float, *, lingers_s: float) -> None:
        """It is over, after another `lingers_s`."""
        self._lingering = (seconds, time.monotonic() + lingers_s)
        self._patience.remove(seconds)

    def stop(self) -> None:
        """Stop looking and replying, within a few seconds. May be called again."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _REPLY_S)
            self._thread = None
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._responder is not None:
            self._responder.close()
            self._responder = None
        atexit.unregister(self.stop)
        if self._announce_exit in before_abort:
            before_abort.remove(self._announce_exit)

    def _link_to_next(self) -> PeerLink | None:
        """Connect to the next rank, to learn of its death; `hpctrain run` learns of it itself."""
        if self._world.launch.control_fd is not None:
            return None
        rank = (self._world.rank + 1) % self._world.size
        host, pid = self._world.ranks[rank].host, self.peers[rank].pid
        cause = f"rank {rank} of {self._world.size} on {host} (process {pid}) {DIED_UNEXPECTEDLY}"
        text = f"hpctrain: {cause}; ending all ranks with exit code {DIED}\n".encode()
        try:
            return PeerLink(self.peers[rank], lambda: self._peer_died(rank, cause, text))
        except OSError:
            return None  # nodes that cannot reach each other were warned of already

    def _announce_exit(self) -> None:
        if self._responder is not None:
            self._responder.announce_exit()

    def _peer_died(self, rank: int, cause: str, text: bytes) -> None:
        """The next rank is gone without an exit message: end all ranks, in the link's thread.

        The launcher is killing us at the same moment: what is to be said is ready, and comes before
        all that takes more than microseconds.
        """
        if self._stopping.is_set():
            return
        with contextlib.suppress(OSError):
            os.write(2, text)
        info = self._world.ranks[rank]
        note_exit(self._world.launch, DIED)
        note_failed_hosts(self._world.launch, [info.host])
        here = info.node_rank == self._world.node_rank
        more = describe_oom_kills(count_oom_kills() if here else 0)
        end_job(self._world.launch, f"hpctrain: {more}\n" if more else "", cause, code=DIED)

    @property
    def patience_s(self) -> float:
        """The longer timeout that this rank requests from all; 0: none."""
        seconds, until = self._lingering
        lingering_s = seconds if time.monotonic() < until else 0.0
        return max([lingering_s, *self._patience])

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval_s()):
            try:
                self._look()
            except Exception as error:  # a thread that dies is not seen by anyone
                log.warn(
                    f"rank {self._world.rank}: the watchdog failed to check its calls: {error!r}"
                )
                with self._lock:
                    self._surveying = False
                    self._not_before = time.monotonic() + _DEFER_S

    def _interval_s(self) -> float:
        shortest_s = min((calls.timeout_s for calls in self._logs.values()), default=1e9)
        return min(max(shortest_s / 20, _SHORTEST_LOOK_S), _LONGEST_LOOK_S)

    def _look(self) -> None:
        """Find a call that has lasted too long, and see why."""
        now = time.monotonic()
        if now < self._not_before:
            return
        for calls in self._logs.values():
            stagger_s = min(calls.ranks.index(self._world.rank) * _STAGGER_S, _LONGEST_STAGGER_S)
            for call in calls.pending(now):
                limit_s = max(call.timeout_s, self.patience_s)
                if len(calls.ranks) > 1 and call.seconds > limit_s + stagger_s:
                    examine = self._examine_late if calls.may_be_late else self._examine
                    examine(calls, call)
                    return

    def _examine(self, calls: CallLog, call: Call) -> None:
        """Query all ranks; report and end all ranks if it is this rank's turn to do so."""
        with self._lock:
            if time.monotonic() < self._not_before:
                return
            self._surveying = True
        replies = self.ask_ranks(calls)
        rank = self._world.rank
        lower = any(isinstance(a, Reply) and a.surveying for r, a in replies.items() if r < rank)
        with self._lock:
            # A lower rank that surveys as well has told us so, or has queried us meanwhile.
            if lower or time.monotonic() < self._not_before:
                self._surveying = False
                self._not_before = max(self._not_before, time.monotonic() + _DEFER_S)
                return
        diagnosis = diagnose(replies, long_s=call.timeout_s / 2)
        patience_s = max(a.patience_s for a in replies.values() if isinstance(a, Reply))
        allowed_s = max(call.timeout_s, patience_s)
        left_s = allowed_s - call.seconds
        if diagnosis is not None and not diagnosis.missing:
            # No rank is missing: the time counts from the arrival of the last one.
            left_s = allowed_s - diagnosis.complete_s
        still = any(one.number == call.number for one in calls.pending(time.monotonic()))
        if diagnosis is None or left_s > 0 or not still or self._stopping.is_set():
            with self._lock:
                self._surveying = False
                self._not_before = time.monotonic() + min(max(left_s, 0.0), call.timeout_s)
            return
        self._report(calls, call, diagnosis, allowed_s, replies)

    def _examine_late(self, calls: CallLog, call: Call) -> None:
        """Who is late may be at work; a process of this node that is stopped never comes."""
        stopped = [
            MissingRank(rank=rank, kind=MissingKind.SILENT, doing=text)
            for rank in calls.ranks
            if (text := self._why_stopped(rank)) is not None
        ]
        if not stopped or self._stopping.is_set():
            self._not_before = time.monotonic() + min(call.timeout_s, _DEFER_S)
            return
        diagnosis = Diagnosis(
            number=call.number,
            name=call.name,
            seconds=call.seconds,
            complete_s=call.seconds,
            waiting=(self._world.rank,),
            missing=tuple(stopped),
            ahead=(),
        )
        self._report(calls, call, diagnosis, call.timeout_s, {})

    def _why_stopped(self, rank: int) -> str | None:
        """What the kernel says of a rank of this node that is stopped, else None."""
        here = self._world.ranks[rank].node_rank == self._world.node_rank
        if rank == self._world.rank or not here:
            return None
        return describe_stop(self.peers[rank])

    def ask_ranks(self, calls: CallLog) -> dict[int, Reply | NoReply]:
        """Query all ranks of a log for what they are doing."""
        return self.survey.ask_ranks(calls, self._own_reply(calls.key))

    def _reply(self, question: Message) -> Message:
        """Reply to another rank; runs in the channel's thread."""
        if question["ask"] == "stacks":
            return {"stacks": format_stacks()}
        if question["ask"] == "history":
            logs = self._logs
            return asdict(logs[question["calls"]].history()) if question["calls"] in logs else {}
        if question["ask"] == "hello":
            return {"rank": self._world.rank}
        reply = asdict(self._own_reply(question["calls"]))
        with self._lock:
            if not (self._surveying and self._world.rank < question["by"]):
                self._not_before = max(self._not_before, time.monotonic() + _DEFER_S)
            reply["surveying"] = self._surveying
        return reply

    def _own_reply(self, key: str) -> Reply:
        logs = self._logs
        elsewhere = [
            f"{call} of {calls.key.partition('/')[0]} for {call.seconds:.1f} s"
            for other, calls in logs.items()
            if other != key
            for call in calls.pending(time.monotonic())
        ]
        return Reply(
            state=logs[key].state() if key in logs else CallState(entered=self._closed.get(key, 0)),
            patience_s=self.patience_s,
            elsewhere=tuple(elsewhere),
            place=users_place(),
        )

    def _report(
        self,
        calls: CallLog,
        call: Call,
        diagnosis: Diagnosis,
        timeout_s: float,
        replies: Mapping[int, Reply | NoReply],
    ) -> NoReturn:
        """Print the report and end all ranks."""
        rank = self._world.rank
        witness = rank if rank in diagnosis.waiting else diagnosis.waiting[0]
        named = [one.rank for one in diagnosis.missing if one.kind is not MissingKind.SILENT][
            :_MOST_STACKS
        ]
        silent = [one.rank for one in diagnosis.missing if one.kind is MissingKind.SILENT]
        note_failed_hosts(self._world.launch, [self._world.ranks[r].host for r in silent])
        text = render_report(
            diagnosis,
            timeout_s=timeout_s,
            hosts={
                r: f"{self._world.ranks[r].host} (process {self.peers[r].pid})" for r in calls.ranks
            },
            stacks=self.survey.stacks([*named, witness]),
            speaker=(rank, call),
            code=EXIT_CODE,
            calls=self.survey.compare(calls, diagnosis, replies, [*named, witness])
            if replies
            else (),
        )
        end_job(self._world.launch, text, summarize(diagnosis, timeout_s=timeout_s))


def end_job(launch: Launch, text: str, cause: str, *, code: int = EXIT_CODE) -> NoReturn:
    """Print `text` and end every rank of the job, from a thread while others are inside MPI.

    `hpctrain run` is notified first; if MPI cannot even abort, this process still exits.
    """
    with contextlib.suppress(OSError, ValueError):
        # A timer without Python: MPI_Abort may hang while it holds Python's lock.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(_ABORT_S, exit=True, file=nowhere)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
    report_exit(launch, code, cause)
    prepare_abort()
    abort(code)
