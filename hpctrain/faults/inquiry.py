"""What a rank asks the others when a collective does not end: where they are, and their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.faults import survey
from hpctrain.faults.answer import Answer, Silence
from hpctrain.faults.calls import Lane
from hpctrain.faults.channel import Message
from hpctrain.faults.ledger import Page, find_divergence, render_calls
from hpctrain.faults.stacks import format_stacks
from hpctrain.faults.survey import Peer
from hpctrain.faults.verdict import Verdict
from hpctrain.world import World

__all__ = ["ANSWER_S", "Inquiry"]

ANSWER_S = 2.0
"""How long a rank may take to say where it is."""
_STACKS_S = 1.5
_LEDGER_S = 0.5
_MOST_GROUPS = 4


class Inquiry:
    """Asks the other ranks over the channel; every wait is bounded.

    Args:
        world: The ranks.
        peers: How to reach them.
    """

    def __init__(self, world: World, peers: Mapping[int, Peer]) -> None:
        self._world = world
        self._peers = peers

    def where(self, lane: Lane, own: Answer) -> dict[int, Answer | Silence]:
        """Where all ranks of a lane stand; `own` is this rank's answer."""
        question = {"ask": "where", "lane": lane.key, "by": self._world.rank}
        answers: dict[int, Answer | Silence] = {self._world.rank: own}
        for rank, told in self._ask(lane.ranks, question, ANSWER_S).items():
            answers[rank] = (
                Silence(reason=self._why(rank, told))
                if isinstance(told, str)
                else Answer.read(told)
            )
        return answers

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The stacks of some ranks, or why they cannot be had."""
        told = self._ask(ranks, {"ask": "stacks"}, _STACKS_S)
        found = {}
        for rank in ranks:
            answer = {"stacks": format_stacks()} if rank == self._world.rank else told[rank]
            found[rank] = answer if isinstance(answer, str) else str(answer["stacks"])
        return found

    def compare(
        self,
        lane: Lane,
        verdict: Verdict,
        answers: Mapping[int, Answer | Silence],
        named: Sequence[int],
    ) -> list[str]:
        """What the ledgers say: where calls differ first, and where they were made.

        Args:
            lane: Whose calls.
            verdict: Which of them does not end.
            answers: Of all ranks.
            named: The ranks that the report names; the last of them waits.
        """
        standings = {rank: a.standing for rank, a in answers.items() if isinstance(a, Answer)}
        # Threads of one rank may enter in another order than those of another.
        ordered = all(standing.num_threads <= 1 for standing in standings.values())
        found = None
        if ordered:
            found = find_divergence({rank: one.recent for rank, one in standings.items()})
        groups = () if found is None else found.groups[:_MOST_GROUPS]
        ranks = sorted({*named, *(group.ranks[0] for group in groups)})
        told = self._ask(ranks, {"ask": "ledger", "lane": lane.key}, _LEDGER_S)
        pages = {r: Page.read(page) for r, page in told.items() if isinstance(page, dict) and page}
        if self._world.rank in ranks:
            pages[self._world.rank] = lane.page()
        return render_calls(verdict.number, found, pages, waiting=named[-1], places=ordered)

    def _ask(
        self, ranks: Sequence[int], question: Message, timeout_s: float
    ) -> dict[int, Message | str]:
        others = {rank: self._peers[rank] for rank in ranks if rank != self._world.rank}
        return survey.ask_all(others, question, timeout_s=timeout_s)

    def _why(self, rank: int, reason: str) -> str:
        """Add to why a rank does not answer what the kernel knows, where it is on this node."""
        if self._world.ranks[rank].node_rank != self._world.node_rank:
            return f"{reason}; it has ended, is stopped, or its node is out of reach"
        listens = not reason.startswith(survey.UNREACHED)
        return f"{reason}; {survey.describe_process(self._peers[rank], listens=listens)}"
