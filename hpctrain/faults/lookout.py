"""The threads behind the watchdog: one looks for calls that last too long, one answers the others.

A process has one for each world. Whoever announces collectives has lanes of its own here, with a
timeout of its own (`hpctrain.faults.watchdog`).
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import NoReturn

from hpctrain import log
from hpctrain.errors import LaunchError
from hpctrain.faults import meeting, report, survey
from hpctrain.faults.answer import Answer, Call, Silence, Standing
from hpctrain.faults.calls import Lane
from hpctrain.faults.channel import Message, Responder
from hpctrain.faults.ending import DIED, EXIT_CODE, end_all_ranks
from hpctrain.faults.inquiry import ANSWER_S, Inquiry
from hpctrain.faults.neighbour import Neighbour
from hpctrain.faults.stacks import THREAD_PREFIX, format_stacks, users_place
from hpctrain.faults.verdict import Kind, Missing, Verdict, judge
from hpctrain.world import World, count_oom_kills, farewells, note_exit, note_failed_hosts

__all__ = ["Lookout"]

_MOST_STACKS = 4
# A rank that has been asked leaves the report to the one that asked, for this long.
_DEFER_S = 10.0
_STAGGER_S = 0.02
_LONGEST_STAGGER_S = 0.5
_SHORTEST_LOOK_S = 0.05
_LONGEST_LOOK_S = 1.0


class Lookout:
    """Collective: looks at the lanes of this rank, and answers other ranks that ask.

    Args:
        world: More than one rank.

    Raises:
        LaunchError: on all ranks, when a rank cannot listen.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._lanes: dict[str, Lane] = {}
        self._num_lanes: dict[str, int] = {}
        self._patience: list[float] = []
        self._lingering = (0.0, 0.0)
        self._lock = threading.Lock()
        self._surveying = False
        self._not_before = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._responder: Responder | None = None
        self._neighbour: Neighbour | None = None
        trouble = None
        try:
            self._responder = Responder(self._answer, remote=world.num_nodes > 1)
        except OSError as error:
            trouble = f"the watchdog cannot listen on a TCP port ({error})"
        try:
            self.peers = meeting.exchange(world, self._responder, trouble)
        except LaunchError:
            self.stop()
            raise
        self.inquiry = Inquiry(world, self.peers)
        self._thread = threading.Thread(target=self._watch, name=THREAD_PREFIX, daemon=True)
        self._thread.start()
        self._neighbour = self._meet_neighbour()
        atexit.register(self.stop)  # a rank that ends well says goodbye
        farewells.append(self._say_goodbye)

    @property
    def is_running(self) -> bool:
        """Whether it still looks and answers."""
        return not self._stopping.is_set()

    def name_lane(self, kind: str) -> str:
        """A key for a new lane: every rank of it makes those of a kind in the same order."""
        with self._lock:
            nth = self._num_lanes.get(kind, 0)
            self._num_lanes[kind] = nth + 1
        return f"{kind}/{nth}"

    def add(self, lane: Lane) -> None:
        """Look at a lane from now on."""
        with self._lock:
            self._lanes = {**self._lanes, lane.key: lane}

    def remove(self, lane: Lane) -> None:
        """Look at it no longer."""
        with self._lock:
            self._lanes = {key: one for key, one in self._lanes.items() if one is not lane}

    def begin_patience(self, seconds: float) -> None:
        """Calls may last at least so long, until `end_patience`."""
        self._patience.append(seconds)

    def end_patience(self, seconds: float, *, lingers_s: float) -> None:
        """It is over, after another `lingers_s`."""
        self._lingering = (seconds, time.monotonic() + lingers_s)
        self._patience.remove(seconds)

    def stop(self) -> None:
        """Stop looking and answering, within a few seconds. May be called again."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * ANSWER_S)
            self._thread = None
        if self._neighbour is not None:
            self._neighbour.close()
            self._neighbour = None
        if self._responder is not None:
            self._responder.close()
            self._responder = None
        atexit.unregister(self.stop)
        if self._say_goodbye in farewells:
            farewells.remove(self._say_goodbye)

    def _meet_neighbour(self) -> Neighbour | None:
        """Hold on to the next rank, to hear of its death; `hpctrain run` hears of it itself."""
        if self._world.launch.control_fd is not None:
            return None
        rank = (self._world.rank + 1) % self._world.size
        try:
            return Neighbour(self.peers[rank], lambda: self._mourn(rank))
        except OSError:
            return None  # nodes that cannot reach each other were warned of already

    def _say_goodbye(self) -> None:
        if self._responder is not None:
            self._responder.say_goodbye()

    def _mourn(self, rank: int) -> None:
        """The next rank is gone without a goodbye: end all ranks, in the neighbour's thread."""
        if self._stopping.is_set():
            return
        peer, host = self.peers[rank], self._world.ranks[rank].host
        here = self._world.ranks[rank].node_rank == self._world.node_rank
        cause = report.describe_death(num_oom_kills=count_oom_kills() if here else 0)
        where = f"rank {rank} of {self._world.size} on {host} (process {peer.pid})"
        note_exit(self._world.launch, DIED)  # first of all: a launcher may be killing us already
        note_failed_hosts(self._world.launch, [host])
        text = f"hpctrain: {where} {cause}; ending all ranks with exit code {DIED}\n"
        end_all_ranks(self._world.launch, text, f"{where} {cause}", code=DIED)

    @property
    def patience_s(self) -> float:
        """How long this rank asks all to wait; 0: no longer than they would."""
        seconds, until = self._lingering
        lingering_s = seconds if time.monotonic() < until else 0.0
        return max([lingering_s, *self._patience])

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval_s()):
            try:
                self._look()
            except Exception as error:  # a thread that dies is not seen by anyone
                log.warn(f"rank {self._world.rank}: the watchdog could not look: {error!r}")
                with self._lock:
                    self._surveying = False
                    self._not_before = time.monotonic() + _DEFER_S

    def _interval_s(self) -> float:
        shortest_s = min((lane.timeout_s for lane in self._lanes.values()), default=1e9)
        return min(max(shortest_s / 20, _SHORTEST_LOOK_S), _LONGEST_LOOK_S)

    def _look(self) -> None:
        """Find a call that has lasted too long, and see why."""
        now = time.monotonic()
        if now < self._not_before:
            return
        for lane in self._lanes.values():
            stagger_s = min(lane.ranks.index(self._world.rank) * _STAGGER_S, _LONGEST_STAGGER_S)
            for call in lane.pending(now):
                limit_s = max(call.timeout_s, self.patience_s)
                if len(lane.ranks) > 1 and call.seconds > limit_s + stagger_s:
                    examine = self._examine_late if lane.may_be_late else self._examine
                    examine(lane, call)
                    return

    def _examine(self, lane: Lane, call: Call) -> None:
        """Ask everybody; report and end all ranks if it is this rank's turn to do so."""
        with self._lock:
            if time.monotonic() < self._not_before:
                return
            self._surveying = True
        answers = self.survey(lane)
        rank = self._world.rank
        lower = any(isinstance(a, Answer) and a.surveying for r, a in answers.items() if r < rank)
        with self._lock:
            # A lower rank that surveys as well has told us so, or has asked us meanwhile.
            if lower or time.monotonic() < self._not_before:
                self._surveying = False
                self._not_before = max(self._not_before, time.monotonic() + _DEFER_S)
                return
        verdict = judge(answers, long_s=call.timeout_s / 2)
        patience_s = max(a.patience_s for a in answers.values() if isinstance(a, Answer))
        allowed_s = max(call.timeout_s, patience_s)
        left_s = allowed_s - call.seconds
        if verdict is not None and not verdict.missing:
            # Nobody is to blame: the time counts from when the last one came.
            left_s = allowed_s - verdict.complete_s
        still = any(one.number == call.number for one in lane.pending(time.monotonic()))
        if verdict is None or left_s > 0 or not still or self._stopping.is_set():
            with self._lock:
                self._surveying = False
                self._not_before = time.monotonic() + min(max(left_s, 0.0), call.timeout_s)
            return
        self._speak(lane, call, verdict, allowed_s, answers)

    def _examine_late(self, lane: Lane, call: Call) -> None:
        """Who is late may be at work; a process of this node that is stopped never comes."""
        stopped = [
            Missing(rank=rank, kind=Kind.SILENT, doing=text)
            for rank in lane.ranks
            if (text := self._why_stopped(rank)) is not None
        ]
        if not stopped or self._stopping.is_set():
            self._not_before = time.monotonic() + min(call.timeout_s, _DEFER_S)
            return
        verdict = Verdict(
            number=call.number,
            name=call.name,
            seconds=call.seconds,
            complete_s=call.seconds,
            waiting=(self._world.rank,),
            missing=tuple(stopped),
            ahead=(),
        )
        self._speak(lane, call, verdict, call.timeout_s, {})

    def _why_stopped(self, rank: int) -> str | None:
        """What the kernel says of a rank of this node that is stopped, else None."""
        here = self._world.ranks[rank].node_rank == self._world.node_rank
        if rank == self._world.rank or not here:
            return None
        return survey.describe_stop(self.peers[rank])

    def survey(self, lane: Lane) -> dict[int, Answer | Silence]:
        """Ask all ranks of a lane where they are."""
        return self.inquiry.where(lane, self._own_answer(lane.key))

    def _answer(self, question: Message) -> Message:
        """Answer another rank; runs in the channel's thread."""
        if question["ask"] == "stacks":
            return {"stacks": format_stacks()}
        if question["ask"] == "ledger":
            lanes = self._lanes
            return asdict(lanes[question["lane"]].page()) if question["lane"] in lanes else {}
        if question["ask"] == "hello":
            return {"rank": self._world.rank}
        answer = asdict(self._own_answer(question["lane"]))
        with self._lock:
            if not (self._surveying and self._world.rank < question["by"]):
                self._not_before = max(self._not_before, time.monotonic() + _DEFER_S)
            answer["surveying"] = self._surveying
        return answer

    def _own_answer(self, key: str) -> Answer:
        lanes = self._lanes
        elsewhere = [
            f"{call} of {lane.key.partition('/')[0]} for {call.seconds:.1f} s"
            for other, lane in lanes.items()
            if other != key
            for call in lane.pending(time.monotonic())
        ]
        return Answer(
            standing=lanes[key].standing() if key in lanes else Standing(entered=0),
            patience_s=self.patience_s,
            elsewhere=tuple(elsewhere),
            place=users_place(),
        )

    def _speak(
        self,
        lane: Lane,
        call: Call,
        verdict: Verdict,
        timeout_s: float,
        answers: Mapping[int, Answer | Silence],
    ) -> NoReturn:
        """Print the report and end all ranks."""
        rank = self._world.rank
        witness = rank if rank in verdict.waiting else verdict.waiting[0]
        named = [one.rank for one in verdict.missing if one.kind is not Kind.SILENT][:_MOST_STACKS]
        silent = [one.rank for one in verdict.missing if one.kind is Kind.SILENT]
        note_failed_hosts(self._world.launch, [self._world.ranks[r].host for r in silent])
        text = report.render(
            verdict,
            timeout_s=timeout_s,
            hosts={
                r: f"{self._world.ranks[r].host} (process {self.peers[r].pid})" for r in lane.ranks
            },
            stacks=self.inquiry.stacks([*named, witness]),
            speaker=(rank, call),
            code=EXIT_CODE,
            calls=self.inquiry.compare(lane, verdict, answers, [*named, witness])
            if answers
            else (),
        )
        end_all_ranks(self._world.launch, text, report.summarize(verdict, timeout_s=timeout_s))
