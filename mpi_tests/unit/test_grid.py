"""Factoring and placement of a grid: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.grid import DIMENSIONS, Coordinate, Shape, factorings, fit_shape, place


@given(st.integers(1, 64))
def test_factorings_are_all_there_once(size):
    found = factorings(size)
    assert len(set(found)) == len(found)
    brute = {
        Shape(d, p, t)
        for d in range(1, size + 1)
        for p in range(1, size // d + 1)
        for t in range(1, size // (d * p) + 1)
        if d * p * t == size
    }
    assert set(found) == brute


def test_data_is_what_is_left():
    assert fit_shape(8) == Shape(8, 1, 1)
    assert fit_shape(8, pipeline=2, tensor=2) == Shape(2, 2, 2)
    assert fit_shape(8, data=2, pipeline=4) == Shape(2, 4, 1)


def test_a_misfit_names_what_fits():
    with pytest.raises(ConfigError, match="needs a multiple of 3 ranks, and there are 4") as caught:
        fit_shape(4, pipeline=3)
    assert "data=4, pipeline=1, tensor=1" in str(caught.value)
    with pytest.raises(ConfigError, match="data=3, pipeline=2, tensor=1 needs 6 ranks") as caught:
        fit_shape(8, data=3, pipeline=2)
    assert str(caught.value).index("data=4, pipeline=2") < str(caught.value).index("data=8")
    for wrong in (0, -1, 1.5, True, "2", None):
        with pytest.raises(ConfigError, match=r"tensor=.* must be a whole number"):
            fit_shape(4, tensor=wrong)


NODES = st.sampled_from([1, 2, 4]).flatmap(
    lambda each: st.integers(1, 4).map(lambda count: (each, count))
)


@given(NODES, st.booleans(), st.data())
def test_every_rank_has_one_place_and_tensor_groups_stay_on_a_node(layout, cyclic, data):
    each, count = layout
    size = each * count
    nodes = [rank % count if cyclic else rank // each for rank in range(size)]
    shapes = [
        s for s in factorings(size) if each % s.tensor == 0 and each % (s.pipeline * s.tensor) == 0
    ]
    shape = data.draw(st.sampled_from(shapes))
    placed = place(shape, nodes)
    assert sorted(placed.order) == list(range(size))
    for rank in range(size):
        assert placed.rank(placed.coordinate(rank)) == rank
    assert placed.num_nodes("tensor") == placed.num_nodes("pipeline") == 1
    for dim in DIMENSIONS:
        groups = placed.groups((dim,))
        assert sorted(rank for group in groups for rank in group) == list(range(size))
        for group in groups:
            assert list(group) == sorted(group)
            assert [getattr(placed.coordinate(rank), dim) for rank in group] == list(
                range(len(group))
            )


def test_groups_along_two_dimensions():
    placed = place(Shape(2, 2, 2), [0] * 4 + [1] * 4)
    assert placed.coordinate(5) == Coordinate(1, 0, 1)
    assert placed.group(5, ("data",)) == (1, 5)
    assert placed.group(5, ("pipeline", "tensor")) == (4, 5, 6, 7)
    assert placed.groups(("tensor",)) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_tensor_groups_that_span_nodes():
    assert place(Shape(1, 1, 4), [0, 0, 1, 1]).num_nodes("tensor") == 2  # whole nodes
    with pytest.raises(ConfigError, match=r"3 ranks of node 0 \(big\).*choose tensor=1"):
        place(Shape(2, 1, 2), [0, 0, 0, 1], ["big", "small"])
    assert place(Shape(4, 1, 1), [0, 0, 0, 1]).order == (0, 1, 2, 3)  # data alone may be uneven


def test_irregular_numbering_is_refused():
    with pytest.raises(ConfigError, match="a data group whose ranks do not ascend"):
        place(Shape(2, 1, 2), [0, 1, 1, 0])


def test_a_grid_is_drawn():
    text = place(Shape(2, 2, 2), [0] * 4 + [1] * 4).describe(["one", "two"])
    assert "grid of 8 ranks: data 2 x pipeline 2 x tensor 2" in text
    assert [line.split() for line in text.splitlines() if line.startswith("    1")] == [
        ["1", "0", "4", "5", "two"],
        ["1", "1", "6", "7", "two"],
    ]
    assert text.endswith(
        "data groups span 2 nodes; pipeline groups are within a node; "
        "tensor groups are within a node"
    )
    many = place(Shape(100, 1, 1), [0] * 100).describe(["one"])
    assert "... and 68 more rows" in many
