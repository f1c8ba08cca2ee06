"""The replay of a step: closed forms where there are some, and orders that must hold."""

from __future__ import annotations

import time
from dataclasses import replace
from math import isclose, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.predict import (
    Costs,
    Exchange,
    Layer,
    Link,
    Machine,
    Profile,
    RankLayout,
    default_exchange,
    predict,
)
from hpctrain.predict.costs import allreduce_s, encoded_allreduce_s, expected_maximum, slowest_of
from hpctrain.predict.machine import TOPOLOGIES
from hpctrain.predict.model import form_pieces, replay

few = settings(max_examples=30, deadline=None)
layer_lists = st.lists(
    st.builds(
        Layer,
        name=st.just("layer"),
        backward_s=st.floats(0, 0.1),
        gradient_bytes=st.integers(0, 1 << 28),
    ),
    min_size=1,
    max_size=30,
)
exchanges = st.builds(
    Exchange,
    overlap=st.booleans(),
    bucket_bytes=st.none() | st.integers(1, 1 << 28),
    cycle_s=st.sampled_from([0.0, 0.001, 0.005]),
    cycle_s_per_rank=st.sampled_from([0.0, 1e-5]),
    wire_ratio=st.sampled_from([0.5, 1.0]),
    accumulate=st.integers(1, 4),
    divided_update=st.booleans(),
)
links = st.builds(Link, latency_s=st.floats(0, 1e-3), bytes_per_s=st.floats(1e6, 1e12))
all_costs = st.builds(
    Costs,
    topology=st.sampled_from(TOPOLOGIES),
    intra=links,
    inter=links,
    reduce_s_per_byte=st.floats(0, 1e-9),
)
machines = st.builds(
    Machine,
    name=st.just("m"),
    title=st.just("a machine"),
    ranks_per_node=st.integers(1, 16),
    costs=all_costs,
    jitter=st.floats(0, 0.2),
    contention=st.sampled_from([((1, 1.0),), ((1, 1.0), (2, 1.1), (4, 1.4))]),
)
counts = st.integers(1, 5000)


def make_profile(layers: list[Layer], **more: object) -> Profile:
    values = {"machine": "", "model": "m", "batch": 8, "input_s": 0.0, "update_s": 0.0}
    return Profile(forward_s=0.01, layers=tuple(layers), **(values | more))  # type: ignore[arg-type]


@few
@given(layer_lists, machines, exchanges)
def test_one_rank_does_not_communicate(layers, machine, exchange):
    found = predict(make_profile(layers), replace(machine, jitter=0.0), 1, exchange=exchange)
    assert found.efficiency.value == pytest.approx(1.0)
    assert (found.exposed_s.value, found.sending_s, found.num_messages) == (0.0, 0.0, 0)


@few
@given(layer_lists, machines, exchanges, counts)
def test_parts_make_the_step_and_nothing_is_faster_than_computing(layers, machine, exchange, count):
    profile = make_profile(layers, input_s=0.003, update_s=0.002)
    found = predict(profile, machine, count, exchange=exchange)
    parts = found.input_s + found.compute_s + found.contention_s + found.straggling_s
    parts += found.exposed_s.value + found.update_s
    assert isclose(found.step_s.value, parts, rel_tol=1e-9)
    least = exchange.accumulate * (profile.input_s + profile.compute_s)
    assert found.step_s.value >= least * (1 - 1e-12)
    assert found.exposed_s.value <= found.sending_s + exchange.cycle_of(count) + 1e-9


@few
@given(layer_lists, machines, exchanges, counts, st.floats(1.0, 100.0), st.sampled_from("ab"))
def test_more_bandwidth_or_less_latency_is_never_slower(
    layers, machine, exchange, count, factor, where
):
    costs = machine.costs
    key = "intra" if where == "a" else "inter"
    link = getattr(costs, key)
    profile = make_profile(layers)
    before = predict(profile, machine, count, exchange=exchange).step_s.value
    for better in (
        replace(link, bytes_per_s=link.bytes_per_s * factor),
        replace(link, latency_s=link.latency_s / factor),
    ):
        faster = replace(machine, costs=replace(costs, **{key: better}))
        after = predict(profile, faster, count, exchange=exchange).step_s.value
        assert after <= before * (1 + 1e-12)


@few
@given(layer_lists, machines, exchanges, counts, st.floats(0, 0.1))
def test_more_jitter_or_contention_is_never_faster(layers, machine, exchange, count, more):
    # With a cycle a later gradient may just reach the same one as others, and save a message.
    exchange = replace(exchange, cycle_s=0.0, cycle_s_per_rank=0.0)
    profile = make_profile(layers)
    before = predict(profile, machine, count, exchange=exchange).step_s.value
    points = tuple((n, slow + (more if n > 1 else 0)) for n, slow in machine.contention)
    worse = replace(machine, jitter=machine.jitter + more, contention=points)
    after = predict(profile, worse, count, exchange=exchange).step_s.value
    assert after >= before * (1 - 1e-9)


@few
@given(layer_lists, exchanges, counts)
def test_pieces_hold_every_gradient_once_and_none_leaves_before_it_is_there(
    layers, exchange, count
):
    pieces = form_pieces(layers, exchange, num_ranks=count)
    total = sum(layer.gradient_bytes for layer in layers)
    assert sum(size for _, size in pieces) == total
    assert [when for when, _ in pieces] == sorted(when for when, _ in pieces)
    backward = sum(layer.backward_s for layer in layers)
    if total and not exchange.overlap:
        slack = 1e-9 * exchange.cycle_of(count)  # a cycle may begin a rounding error early
        assert all(when >= backward * (1 - 1e-9) - slack for when, _ in pieces)
    line = replay(layers, exchange, lambda size: 1e-9 * size, num_ranks=count)
    for first, second in zip(line.messages, line.messages[1:], strict=False):
        assert second.start_s >= first.stop_s - 1e-12
    assert all(message.start_s >= message.ready_s for message in line.messages)


def test_a_hand_computed_timeline():
    layers = [Layer(name=str(i), backward_s=1.0, gradient_bytes=10) for i in range(4)]
    line = replay(layers, Exchange(bucket_bytes=20), lambda size: size / 10)
    # 20 bytes at 2 s take until 4, the next 20 are ready at 4 and take until 6
    assert [(m.ready_s, m.start_s, m.stop_s) for m in line.messages] == [(2, 2, 4), (4, 4, 6)]
    assert (line.backward_s, line.exposed_s, line.sending_s) == (4.0, 2.0, 4.0)
    late = replay(layers, Exchange(overlap=False), lambda size: size / 10)
    assert (len(late.messages), late.exposed_s) == (1, 4.0)
    single = replay(layers, Exchange(bucket_bytes=1), lambda size: size / 10)
    assert (len(single.messages), single.exposed_s) == (4, 1.0)
    ticks = form_pieces(layers, Exchange(bucket_bytes=25, cycle_s=2.5))
    assert ticks == [(2.5, 20), (5.0, 20)]
    assert form_pieces(layers, Exchange(bucket_bytes=5, cycle_s=2.5))[0] == (2.5, 10)


@given(st.integers(2, 512), st.floats(1, 1e9), st.floats(1e-6, 1e-3), st.floats(1e6, 1e11))
def test_closed_forms_on_one_node_and_on_single_ranks(count, size, latency, rate):
    link = Link(latency_s=latency, bytes_per_s=rate)
    near = RankLayout(num_ranks=count, ranks_per_node=count)
    far = RankLayout(num_ranks=count, ranks_per_node=1)
    share = 2 * (count - 1) / count * size / rate
    depth = -(-log2(count) // 1)
    expected = {
        "ring": 2 * (count - 1) * latency + share,
        "halving": 2 * depth * latency + share,
        "tree": 2 * depth * latency + 2 * size / rate,
        "hierarchical": 2 * (count - 1) * latency + share,
    }
    for topology, seconds in expected.items():
        costs = Costs(topology=topology, intra=link, inter=link)
        assert allreduce_s(size, far, costs) == pytest.approx(seconds)
    for topology in ("ring", "halving"):
        costs = Costs(topology=topology, intra=link, inter=link)
        assert allreduce_s(size, near, costs) == pytest.approx(expected[topology])
    shared = Costs(topology="hierarchical", intra=link, inter=link, reduce_s_per_byte=1e-9)
    assert allreduce_s(size, near, shared) == pytest.approx(
        2 * depth * latency + size / rate + 1e-9 * size
    )
    crowded = replace(shared, crowding=0.5)
    more = 0.5 * log2(count / 2) * size / rate
    assert allreduce_s(size, near, crowded) - allreduce_s(size, near, shared) == pytest.approx(more)


def test_a_ring_over_nodes_crosses_the_network_2_n_minus_1_times():
    costs = Costs(
        topology="ring",
        intra=Link(latency_s=1e-6, bytes_per_s=1e12),
        inter=Link(latency_s=1e-3, bytes_per_s=1e12),
    )
    layout = RankLayout(num_ranks=16, ranks_per_node=4)
    assert allreduce_s(0, layout, costs) == pytest.approx(6e-3 + 24e-6)


@pytest.mark.parametrize(
    ("count", "mean"), [(1, 0.0), (2, 0.5641896), (10, 1.5387527), (100, 2.5075936)]
)
def test_the_largest_of_n_is_as_in_the_tables(count, mean):
    assert expected_maximum(count) == pytest.approx(mean, abs=2e-6)


def test_the_largest_of_n_is_as_drawn():
    drawn = np.random.default_rng(7).standard_normal((4000, 500)).max(axis=1).mean()
    assert expected_maximum(500) == pytest.approx(drawn, abs=0.02)
    assert slowest_of(500, 0.1) == pytest.approx(1.3037, abs=1e-3)


def test_accumulation_sends_once():
    layers = [Layer(name="a", backward_s=0.01, gradient_bytes=1 << 20)]
    link = Link(latency_s=0, bytes_per_s=1e8)
    machine = Machine(
        name="m",
        title="",
        ranks_per_node=1,
        costs=Costs(topology="ring", intra=link, inter=link),
    )
    one, four = (
        predict(make_profile(layers), machine, 4, exchange=Exchange(accumulate=k)) for k in (1, 4)
    )
    assert four.exposed_s.value == pytest.approx(one.exposed_s.value)
    assert four.step_s.value == pytest.approx(one.step_s.value + 3 * 0.02)
    assert four.global_batch == 4 * one.global_batch


@few
@given(layer_lists, machines, exchanges, counts, st.floats(0.01, 0.5))
def test_error_bars_hold_the_value_and_vanish_without_errors(
    layers, machine, exchange, count, error
):
    profile = make_profile(layers)
    exact = predict(profile, machine, count, exchange=exchange)
    assert exact.step_s.low == exact.step_s.value == exact.step_s.high
    unsure = replace(machine, jitter_error=error, contention_error=error)
    found = predict(replace(profile, error=4 * error), unsure, count, exchange=exchange)
    assert found.step_s.value == exact.step_s.value
    assert found.step_s.low < found.step_s.value < found.step_s.high
    assert found.efficiency.low <= found.efficiency.value <= found.efficiency.high


def test_ten_thousand_ranks_in_less_than_five_seconds():
    layers = [Layer(name=str(i), backward_s=1e-3, gradient_bytes=1 << 20) for i in range(1000)]
    link = Link(latency_s=1e-5, bytes_per_s=1e10, latency_error=0.5, bandwidth_error=0.5)
    machine = Machine(
        name="m",
        title="",
        ranks_per_node=4,
        costs=Costs(topology="ring", intra=link, inter=link),
        jitter=0.02,
        jitter_error=0.5,
    )
    start = time.perf_counter()
    # Horovod's own fusion with its defaults
    fusion = Exchange(engine="horovod", bucket_bytes=128 << 20, cycle_s=1e-3)
    found = predict(make_profile(layers, error=0.1), machine, 10_000, exchange=fusion)
    assert time.perf_counter() - start < 5
    assert found.num_nodes == 2500


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 1 << 30), st.booleans())
def test_defaults_are_those_of_distribute(count, per_node, size, on_gpu):
    from hpctrain.replica.policy import bucket_size

    layout = RankLayout(num_ranks=count, ranks_per_node=per_node)
    found = default_exchange("mpi", layout, gradient_bytes=size, on_gpu=on_gpu)
    if found.overlap:
        assert found.bucket_bytes == bucket_size(size)
        assert on_gpu or layout.num_nodes > 1
    if not on_gpu and layout.local_ranks > 1:
        assert found.divided_update
        assert not found.overlap


def test_what_is_refused():
    with pytest.raises(ConfigError, match="wire_ratio=2"):
        Exchange(wire_ratio=2)
    with pytest.raises(ConfigError, match="topology='star'; choose one of ring"):
        Costs(topology="star", intra=LINK, inter=LINK)
    with pytest.raises(ConfigError, match="engine='mpl'; choose one of mpi"):
        default_exchange(
            "mpl", RankLayout(num_ranks=1, ranks_per_node=1), gradient_bytes=0, on_gpu=True
        )
    with pytest.raises(ConfigError, match="num_ranks=0 must be a whole number"):
        RankLayout(num_ranks=0, ranks_per_node=1)


LINK = Link(latency_s=0, bytes_per_s=1)


def test_a_wire_spares_bytes_between_nodes_alone():
    fast, slow = Link(latency_s=1e-6, bytes_per_s=1e10), Link(latency_s=1e-5, bytes_per_s=1e8)
    costs = Costs(topology="hierarchical", intra=fast, inter=slow)
    layout = RankLayout(num_ranks=8, ranks_per_node=4)
    whole = allreduce_s(1e8, layout, costs)
    assert encoded_allreduce_s(1e8, layout, costs, ratio=1.0) == pytest.approx(whole)
    # Two nodes: each sends all of it once, and inside nothing changes.
    spared = whole - encoded_allreduce_s(1e8, layout, costs, ratio=0.5)
    assert spared == pytest.approx(0.5 * 1e8 / 1e8)
    with pytest.raises(ConfigError, match="wire='fp8' cannot be predicted; choose none, bf16"):
        Exchange(wire="fp8")


def test_a_wire_is_predicted_where_distribute_has_it():
    def chosen(engine, num_ranks, **options):
        layout = RankLayout(num_ranks=num_ranks, ranks_per_node=4)
        return default_exchange(
            engine, layout, gradient_bytes=1 << 26, on_gpu=False, wire="bf16", **options
        )

    assert chosen("mpi", 4).wire == "none"  # one node
    assert chosen("mpi", 8).wire == chosen("mpi", 6).wire == chosen("torch", 8).wire == "bf16"
    assert not chosen("torch", 8).overlap
    with pytest.raises(ConfigError, match="the last of 2 has 2 of 4"):
        chosen("torch", 6)
