"""Every collective has a timeout; when it passes, the job says who is missing, and ends.

Each rank notes the collectives that it is in. A thread looks at the notes from time to time; when a
call has lasted too long, it asks all other ranks where they are, over a channel beside MPI, prints
one report and ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import NoReturn

from hpctrain import log
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.faults import meeting, report
from hpctrain.faults.answer import Answer, Call, Silence, Standing
from hpctrain.faults.calls import Lane
from hpctrain.faults.channel import Message, Responder
from hpctrain.faults.ending import DIED, EXIT_CODE, end_all_ranks
from hpctrain.faults.inquiry import ANSWER_S, Inquiry
from hpctrain.faults.neighbour import Neighbour
from hpctrain.faults.stacks import THREAD_PREFIX, format_stacks, users_place
from hpctrain.faults.verdict import Kind, Verdict, judge
from hpctrain.world import World, agree
from hpctrain.world.guard import farewells
from hpctrain.world.notes import note_exit, note_failed_hosts
from hpctrain.world.oom import count_oom_kills

__all__ = ["Watchdog", "start"]

_MOST_STACKS = 4
# A rank that has been asked leaves the report to the one that asked, for this long.
_DEFER_S = 10.0
_STAGGER_S = 0.02
_LONGEST_STAGGER_S = 0.5


def start(world: World, *, timeout_s: float) -> Watchdog:
    """Collective: watch over the collectives of a world; `timeout_s` must match.

    Args:
        world: The ranks. Where there is only one, nothing can be missing and nothing is watched.
        timeout_s: How long a collective may last, from when the first rank enters it.

    Raises:
        ConfigError: on all ranks, when `timeout_s` is not a positive time or differs.
        LaunchError: on all ranks, when a rank cannot listen.
    """
    trouble = None if timeout_s > 0 else f"timeout_s={timeout_s:g} must be more than 0"
    if world.size > 1:
        agree(world.comm, trouble, error=ConfigError)
        given = world.comm.allgather(timeout_s)
        trouble = None if len(set(given)) == 1 else f"timeout_s={given} must be equal on all ranks"
    if trouble is not None:
        raise ConfigError(trouble)
    return Watchdog(world, timeout_s=timeout_s)


class Watchdog(Lane):
    """Notices collectives that do not end. Made by `start`; `stop` ends it.

    It is itself the lane of the whole world: `enter` and `leave` go around each of its collectives.
    """

    def __init__(self, world: World, *, timeout_s: float) -> None:
        super().__init__(tuple(range(world.size)), "world")
        self.timeout_s = timeout_s
        self._world = world
        self._lanes: dict[str, Lane] = {self.key: self}
        self._patience: list[float] = []
        self._lingering = (0.0, 0.0)
        self._lock = threading.Lock()
        self._surveying = False
        self._not_before = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._responder: Responder | None = None
        self._neighbour: Neighbour | None = None
        if world.size == 1:
            return
        trouble = None
        try:
            self._responder = Responder(self._answer, remote=world.num_nodes > 1)
        except OSError as error:
            trouble = f"the watchdog cannot listen on a TCP port ({error})"
        try:
            self._peers = meeting.exchange(world, self._responder, trouble)
        except LaunchError:
            self.stop()
            raise
        self._inquiry = Inquiry(world, self._peers)
        self._thread = threading.Thread(target=self._watch, name=THREAD_PREFIX, daemon=True)
        self._thread.start()
        self._neighbour = self._meet_neighbour()
        atexit.register(self.stop)  # a rank that ends well says goodbye
        farewells.append(self._say_goodbye)

    def among(self, ranks: Iterable[int]) -> Lane:
        """A watch for the collectives of some ranks only, as of an engine that was split.

        Not collective, but each of these ranks makes the same lanes in the same order.
        """
        members = tuple(sorted(ranks))
        if self._world.rank not in members:
            raise ConfigError(
                f"among({list(members)}) does not contain this rank, {self._world.rank}; only the "
                "ranks that take part make a lane"
            )
        prefix = f"ranks {log.format_ranges(members)}/"
        with self._lock:
            nth = sum(key.startswith(prefix) for key in self._lanes)
            lane = Lane(members, f"{prefix}{nth}")
            self._lanes = {**self._lanes, lane.key: lane}
        return lane

    @property
    def all_waited_s(self) -> float:
        """Seconds that this thread has spent in the calls of all lanes."""
        return sum(lane.waited_s for lane in self._lanes.values())

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Allow calls at least `seconds` in this block, for one that is known to be long.

        The patience of any rank, also of one that is awaited, holds for those who wait; it stays
        for one timeout after the block, so that the rank can come to its next call.
        """
        if not seconds > 0:
            raise ConfigError(f"patience({seconds:g}): the seconds must be more than 0")
        self._patience.append(seconds)
        try:
            yield
        finally:
            self._lingering = (seconds, time.monotonic() + self.timeout_s)
            self._patience.remove(seconds)

    def stop(self) -> None:
        """Stop watching and answering, within a few seconds. May be called again.

        Other ranks that still wait for this one then hear only that nobody listens here, so it
        belongs after the last collective.
        """
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
            return Neighbour(self._peers[rank], lambda: self._mourn(rank))
        except OSError:
            return None  # nodes that cannot reach each other were warned of already

    def _say_goodbye(self) -> None:
        if self._responder is not None:
            self._responder.say_goodbye()

    def _mourn(self, rank: int) -> None:
        """The next rank is gone without a goodbye: end all ranks, in the neighbour's thread."""
        if self._stopping.is_set():
            return
        peer, host = self._peers[rank], self._world.ranks[rank].host
        here = self._world.ranks[rank].node_rank == self._world.node_rank
        cause = report.describe_death(num_oom_kills=count_oom_kills() if here else 0)
        where = f"rank {rank} of {self._world.size} on {host} (process {peer.pid})"
        note_exit(self._world.launch, DIED)  # first of all: a launcher may be killing us already
        note_failed_hosts(self._world.launch, [host])
        text = f"hpctrain: {where} {cause}; ending all ranks with exit code {DIED}\n"
        end_all_ranks(self._world.launch, text, f"{where} {cause}", code=DIED)

    @property
    def _patience_s(self) -> float:
        seconds, until = self._lingering
        lingering_s = seconds if time.monotonic() < until else 0.0
        return max([self.timeout_s, lingering_s, *self._patience])

    def _watch(self) -> None:
        interval_s = min(max(self.timeout_s / 20, 0.05), 1.0)
        while not self._stopping.wait(interval_s):
            try:
                self._look()
            except Exception as error:  # a thread that dies is not seen by anyone
                log.warn(f"rank {self._world.rank}: the watchdog could not look: {error!r}")
                with self._lock:
                    self._surveying = False
                    self._not_before = time.monotonic() + _DEFER_S

    def _look(self) -> None:
        """Find a call that has lasted too long, and see why."""
        now = time.monotonic()
        if now < self._not_before:
            return
        for lane in self._lanes.values():
            stagger_s = min(lane.ranks.index(self._world.rank) * _STAGGER_S, _LONGEST_STAGGER_S)
            for call in lane.pending(now):
                if len(lane.ranks) > 1 and call.seconds > self._patience_s + stagger_s:
                    self._examine(lane, call)
                    return

    def _examine(self, lane: Lane, call: Call) -> None:
        """Ask everybody; report and end all ranks if it is this rank's turn to do so."""
        with self._lock:
            if time.monotonic() < self._not_before:
                return
            self._surveying = True
        answers = self._survey(lane)
        rank = self._world.rank
        lower = any(isinstance(a, Answer) and a.surveying for r, a in answers.items() if r < rank)
        with self._lock:
            # A lower rank that surveys as well has told us so, or has asked us meanwhile.
            if lower or time.monotonic() < self._not_before:
                self._surveying = False
                self._not_before = max(self._not_before, time.monotonic() + _DEFER_S)
                return
        verdict = judge(answers, long_s=self.timeout_s / 2)
        told = [a.timeout_s for a in answers.values() if isinstance(a, Answer)]
        left_s = max(told) - call.seconds
        if verdict is not None and not verdict.missing:
            # Nobody is to blame: the time counts from when the last one came.
            left_s = max(told) - verdict.complete_s
        still = any(one.number == call.number for one in lane.pending(time.monotonic()))
        if verdict is None or left_s > 0 or not still or self._stopping.is_set():
            with self._lock:
                self._surveying = False
                self._not_before = time.monotonic() + min(max(left_s, 0.0), self.timeout_s)
            return
        self._speak(lane, call, verdict, max(told), answers)

    def _survey(self, lane: Lane) -> dict[int, Answer | Silence]:
        return self._inquiry.where(lane, self._own_answer(lane.key))

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
            timeout_s=self._patience_s,
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
                r: f"{self._world.ranks[r].host} (process {self._peers[r].pid})" for r in lane.ranks
            },
            stacks=self._inquiry.stacks([*named, witness]),
            speaker=(rank, call),
            code=EXIT_CODE,
            calls=self._inquiry.compare(lane, verdict, answers, [*named, witness]),
        )
        end_all_ranks(self._world.launch, text, report.summarize(verdict, timeout_s=timeout_s))
