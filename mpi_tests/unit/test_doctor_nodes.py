"""The pure half of `doctor --all-nodes`: who meets whom, who falls out of line, how it is shown."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.doctor.nodes.display import ExaminedJob, as_json, as_text
from hpctrain.doctor.nodes.links import choose_rounds, plan_rounds
from hpctrain.doctor.nodes.outliers import find_clocks_off, find_low, find_outliers
from hpctrain.doctor.nodes.report import NodeLink, NodeReport, RankReport, put_together


@given(st.integers(0, 70))
def test_every_pair_meets_exactly_once(n: int) -> None:
    rounds = plan_rounds(n)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(n), 2))


@given(st.integers(2, 70))
def test_nobody_is_in_two_places_and_no_round_is_wasted(n: int) -> None:
    rounds = plan_rounds(n)
    assert len(rounds) == (n - 1 if n % 2 == 0 else n)
    for pairs in rounds:
        players = [node for pair in pairs for node in pair]
        assert len(players) == len(set(players)) == n - n % 2


@given(st.integers(2, 100), st.integers(1, 40))
def test_a_shortened_tournament_still_gives_every_node_links(n: int, most: int) -> None:
    rounds = choose_rounds(n, most=most)
    assert len(rounds) == min(most, len(plan_rounds(n)))
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    counts = Counter(node for pair in met for node in pair)
    assert (
        min(counts[node] for node in range(n)) >= len(rounds) - 1
    )  # an odd one out rests at most once


@given(st.lists(st.floats(95, 105), min_size=2, max_size=200), st.data())
def test_a_planted_outlier_is_named_and_nobody_else(
    values: list[float], data: st.DataObject
) -> None:
    assert find_low(values) == [] or len(values) >= 8
    where = data.draw(st.integers(0, len(values)))
    planted = [*values[:where], 10.0, *values[where:]]
    if len(planted) >= 3:
        assert where in find_low(planted)


def test_two_nodes_of_which_one_has_half() -> None:
    assert find_low([100.0, 50.0]) == [1]
    assert find_low([100.0, 90.0]) == []


def test_a_little_slow_among_many_that_agree() -> None:
    many = [100.0 + 0.1 * (i % 5) for i in range(40)]
    assert find_low([*many, 90.0]) == [40]
    assert find_low([*many, 98.0]) == []  # under the floor of 5 %
    assert find_low([100.0, 100.0, 90.0]) == []  # too few to know the scatter


def test_scatter_alone_names_nobody() -> None:
    assert find_low([85 + i for i in range(30)]) == []
    assert find_low([5.0]) == find_low([]) == []


def test_clocks() -> None:
    assert find_clocks_off([(0.0, 0.0), (0.01, 0.001), (3.0, 0.001)]) == {2: 2.99}
    assert find_clocks_off([(0.0, 0.0), (-2.0, 0.001), (-2.0, 0.001)]) == {0: 2.0}
    assert find_clocks_off([(0.0, 0.0), (-2.0, 0.001)]) == {1: -2.0}
    assert find_clocks_off([(0.0, 0.0), (0.3, 0.25), None]) == {}  # within the measuring error


def ranks(num_nodes: int, **slow: float) -> list[RankReport]:
    return [
        RankReport(
            node=node,
            host=f"n{node}",
            device="CPU",
            num_threads=4,
            gflops=slow.get(f"n{node}", 100.0) if local == 1 else 100.0,
            memory=20.0,
        )
        for node in range(num_nodes)
        for local in range(2)
    ]


def links(num_nodes: int, bandwidth: dict[tuple[int, int], float | None]) -> list[NodeLink]:
    return [
        NodeLink(a=a, b=b, bandwidth=bandwidth.get((a, b), 1000.0), latency=5.0)
        for a, b in itertools.combinations(range(num_nodes), 2)
    ]


def clocks(num_nodes: int) -> list[tuple[float, float] | None]:
    return [(0.0, 0.0)] * num_nodes


@pytest.mark.parametrize("n", [3, 4, 9])
def test_a_bad_adapter_names_its_node_and_not_its_partners(n: int) -> None:
    bad = {(a, b): 12.0 for a, b in itertools.combinations(range(n), 2) if 1 in (a, b)}
    found = find_outliers(put_together(ranks(n), links(n, bad), clocks(n)), links(n, bad))
    assert [(o.hosts, o.quantity) for o in found] == [(("n1",), "network")]
    assert "n1" in found[0].text
    assert found[0].cure


def test_one_bad_path_names_the_path() -> None:
    bad = links(5, {(2, 4): 100.0})
    found = find_outliers(put_together(ranks(5), bad, clocks(5)), bad)
    assert [(o.hosts, o.quantity) for o in found] == [(("n2", "n4"), "link")]


def test_a_silent_link_is_named() -> None:
    silent = links(3, {(0, 2): None})
    found = find_outliers(put_together(ranks(3), silent, clocks(3)), silent)
    assert [(o.hosts, o.value) for o in found] == [(("n0", "n2"), None)]


def test_the_slowest_rank_speaks_for_its_node() -> None:
    nodes = put_together(ranks(4, n3=40.0), links(4, {}), clocks(4))
    assert [node.gflops for node in nodes] == [100.0, 100.0, 100.0, 40.0]
    (found,) = find_outliers(nodes, links(4, {}))
    assert (found.hosts, found.quantity, found.value) == (("n3",), "gflops", 40.0)


def shown(n: int, slow: str) -> tuple[ExaminedJob, list[NodeReport], list[NodeLink]]:
    return (
        ExaminedJob(num_ranks=2 * n, mpi="MPICH 5.0.2"),
        put_together(ranks(n, **{slow: 1.0}), links(n, {}), clocks(n)),
        links(n, {}),
    )


def test_table_names_the_outlier_even_beyond_its_rows() -> None:
    job, nodes, every_link = shown(80, "n79")
    text = as_text(job, nodes, every_link, find_outliers(nodes, every_link))
    assert text.startswith("160 ranks on 80 nodes, MPICH 5.0.2, 3160 links measured\n")
    assert any(line.split()[0] == "n79" for line in text.splitlines())
    assert "16 more nodes" in text
    assert "outlier  n79: matrix product 1 GFLOP/s, 1% of the median (100)" in text


def test_table_of_one_node_and_of_good_nodes() -> None:
    one = put_together(ranks(1), [], clocks(1))
    assert "nothing to compare" in as_text(ExaminedJob(num_ranks=2, mpi="x"), one, [], [])
    job, nodes, every_link = shown(3, "none")
    assert as_text(job, nodes, every_link, []).endswith("no outliers")


def test_json_is_whole() -> None:
    job, nodes, every_link = shown(3, "n2")
    value = json.loads(as_json(job, nodes, every_link, find_outliers(nodes, every_link)))
    assert value["status"] == "broken"
    assert [node["host"] for node in value["nodes"]] == ["n0", "n1", "n2"]
    assert value["links"][0]["hosts"] == ["n0", "n1"]
    assert value["outliers"][0]["hosts"] == ["n2"]
