"""Who measures with whom, and when: a round-robin tournament. Pure."""

from __future__ import annotations

__all__ = ["choose_rounds", "plan_rounds"]


def plan_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pair all nodes, so that each pair meets exactly once and no node is in two places at a time.

    The circle method: one place stays, the others go round it; with an odd number there is one
    place more than nodes, and whoever should meet it rests.

    Returns:
        Rounds of pairs (lower, higher): n - 1 rounds for even n, n for odd n, none below 2.
    """
    if num_nodes < 2:
        return []
    places = list(range(num_nodes + num_nodes % 2))
    half = len(places) // 2
    rounds = []
    for _ in range(len(places) - 1):
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < num_nodes))
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def choose_rounds(num_nodes: int, *, most: int) -> list[list[tuple[int, int]]]:
    """Take the whole tournament, or `most` of its rounds spread evenly when it is longer.

    Every node still meets about `most` others, so that a node's typical link is known on a
    thousand nodes as well as on ten.
    """
    rounds = plan_rounds(num_nodes)
    if len(rounds) <= most:
        return rounds
    return [rounds[i * len(rounds) // most] for i in range(most)]
