"""Grids: factorings, stages, what a rank holds and sends, how long a step takes, which to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.cli.plan.sizing import memory_of, parse_tensor
from hpctrain.errors import ConfigError
from hpctrain.grid import Shape
from hpctrain.pipeline import LayerCost, balance_stages
from hpctrain.predict import (
    HEADROOM,
    Compute,
    Costs,
    Footprint,
    Layer,
    Link,
    Machine,
    Profile,
    RankLayout,
    TiedWeight,
    Unit,
    choose_grid,
    find_machine,
    plan_grids,
    predict,
)
from hpctrain.predict.grid_choice import find_odd_pair
from hpctrain.predict.grid_costs import PlacedModel, bytes_of, sent_by, time_of
from hpctrain.predict.grid_shapes import group_of, in_flight
from hpctrain.tables import bytes_in
from hpctrain.train import Memory, UnitSize

MIB = 1 << 20
LINK = Link(latency_s=1e-5, bytes_per_s=1e10)
MACHINE = Machine(
    name="m",
    title="m",
    ranks_per_node=4,
    costs=Costs(topology="ring", intra=LINK, inter=replace(LINK, bytes_per_s=1e9)),
    memory_bytes_per_device=1 << 34,
)


def footprint(num_units=8, **changes):
    units = tuple(
        Unit(
            name=f"block.{index}",
            weights=12 * MIB,
            trained=12 * MIB,
            activation_bytes=6 * MIB,
            output_bytes=MIB,
            flops=3e9,
            tensor_weights=8 * MIB,
            tensor_activation_bytes=4 * MIB,
            tensor_flops=3e9,
            tensor_messages=2,
            tensor_message_bytes=2 * MIB,
        )
        for index in range(num_units)
    )
    made = Footprint(
        model="blocks", batch=4, units=units, state_copies=2.0, tensor_sizes=(("block.0.up", 64),)
    )
    return replace(made, **changes)


def cut(shape, *, shard="none", micro_batches=1, micro_batch=4, schedule="1f1b", **changes):
    model = footprint(**changes)
    return PlacedModel(
        footprint=model,
        shape=shape,
        shard=shard,
        stages=balance_stages([LayerCost(unit.flops) for unit in model.units], shape.pipeline),
        micro_batches=micro_batches,
        micro_batch=micro_batch,
        schedule=schedule,
    )


def test_micro_batches_under_way():
    assert [in_flight("1f1b", 8, 4, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("1f1b", 2, 4, stage) for stage in range(4)] == [2, 2, 2, 1]
    assert [in_flight("gpipe", 8, 4, stage) for stage in range(4)] == [8] * 4
    assert in_flight("gpipe", 8, 1, 0) == 1, "without a pipeline backward follows at once"
    with pytest.raises(ConfigError, match="zigzag"):
        in_flight("zigzag", 8, 2, 0)


def test_groups_stay_inside_a_node_and_share_its_link():
    layout = RankLayout(num_ranks=16, ranks_per_node=4)
    tensor = group_of(4, 1, layout)
    assert (tensor.layout.num_nodes, tensor.sharing) == (1, 1)
    data = group_of(4, 4, layout)
    assert (data.layout.num_nodes, data.sharing) == (4, 4), "one rank of each group on a node"
    pairs = group_of(8, 2, layout)
    assert (pairs.layout.local_ranks, pairs.layout.num_nodes, pairs.sharing) == (2, 4, 2)
    straddling = group_of(3, 1, RankLayout(num_ranks=12, ranks_per_node=4))
    assert straddling.layout.num_nodes == 3, "a group that a node's end cuts uses the network"


@pytest.mark.parametrize("num_shards", [1, 8, 64])
def test_sharded_memory_is_sixteen_bytes_a_parameter_over_the_ranks(num_shards):
    weights = 4 * 1_000_000
    unit = UnitSize(weights // 4, weights // 4)

    def estimate(shard, **more):
        return Memory.estimate(
            weights=weights,
            gradients=weights,
            optimizer_state=2 * weights,
            ranks_per_node=1,
            shares_memory=False,
            shards_update=False,
            shard=shard,
            num_shards=num_shards,
            **({"units": [unit] * 4} | more),
        )

    assert estimate("none").per_rank == 4 * weights
    assert estimate("state").per_rank == 2 * weights + 2 * weights // num_shards
    for shard in ("gradients", "parameters"):
        assert estimate(shard).per_rank == 4 * weights // num_shards
    # A unit's weights, those of the next, its gradients, and the message of the one before; the
    # shards of two units' gradients have come by then, and two have not.
    shard = -(-unit.reduced // num_shards)
    assert estimate("parameters").gathered == 4 * unit.weights - 2 * shard
    assert estimate("parameters", accumulates=True).gathered == 4 * unit.weights
    # All weights, and of the last unit its gradients cut and laid out for the message.
    assert estimate("gradients").gathered == 6 * unit.weights - 4 * shard
    assert estimate("gradients", accumulates=True).gathered == 6 * unit.weights
    # The root's weights are there all the time, and its whole gradients from the head on.
    rooted = [unit._replace(in_root=True), unit, unit, unit._replace(in_root=True)]
    assert estimate("parameters", units=rooted, accumulates=True).gathered == 7 * unit.weights


def test_sharding_and_shared_memory_do_not_go_together():
    with pytest.raises(ConfigError, match="one of the two"):
        Memory.estimate(
            weights=1,
            gradients=1,
            optimizer_state=1,
            ranks_per_node=2,
            shares_memory=True,
            shards_update=True,
            shard="state",
            num_shards=2,
        )


def test_bytes_of_a_pipeline_by_hand():
    shape = Shape(1, 4, 1)
    for schedule, counts in (("1f1b", [4, 3, 2, 1]), ("gpipe", [6] * 4)):
        one = cut(shape, micro_batches=6, micro_batch=2, schedule=schedule)
        for stage, count in enumerate(counts):
            need = bytes_of(one, stage)
            assert (need.weights, need.gradients, need.state) == (24 * MIB, 24 * MIB, 48 * MIB)
            # Half the measured batch: two units of 3 MiB, and what the stage before sent.
            assert need.activations == count * (6 * MIB + (MIB // 2 if stage else 0))
            assert need.total == need.held + need.activations


def test_tensor_parallelism_divides_what_was_named():
    need = bytes_of(cut(Shape(1, 1, 4)), 0)
    assert need.weights == 8 * (4 + 8 // 4) * MIB
    assert need.activations == 8 * (2 + 4 // 4) * MIB
    assert sent_by(cut(Shape(1, 1, 4)), 0).tensor == 2 * 8 * 2 * MIB * 3 // 4


def test_a_tied_weight_is_held_by_both_stages():
    tie = TiedWeight(first=0, other=7, num_bytes=5 * MIB)
    alone = cut(Shape(1, 1, 1), ties=(tie,))
    assert bytes_of(alone, 0).weights == 96 * MIB
    two = cut(Shape(1, 2, 1), ties=(tie,))
    assert [bytes_of(two, stage).weights for stage in range(2)] == [48 * MIB, 53 * MIB]


def test_what_travels_over_the_data_dimension():
    per = {
        shard: sent_by(cut(Shape(4, 1, 1), shard=shard, micro_batches=3), 0).data
        for shard in ("none", "state", "gradients", "parameters")
    }
    whole = 96 * MIB * 3 // 4
    assert per == {
        "none": 2 * whole,
        "state": 2 * whole,
        "gradients": 3 * 2 * whole,
        "parameters": 3 * 3 * whole,
    }


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (3, 12), (4, 4)])
def test_the_bubble_of_equal_stages(stages, micro_batches):
    free = Link(latency_s=0.0, bytes_per_s=1e18)
    machine = replace(MACHINE, costs=Costs(topology="ring", intra=free, inter=free))
    one = cut(Shape(1, stages, 1), micro_batches=micro_batches, num_units=12)
    layout = RankLayout(num_ranks=stages, ranks_per_node=4)
    found = time_of(one, machine, layout, compute_s=1.2)
    assert found.step_s == pytest.approx(1.2 / stages * (micro_batches + stages - 1))
    share = (stages - 1) / (micro_batches + stages - 1)
    assert found.bubble_s / found.step_s == pytest.approx(share)


@pytest.mark.parametrize("num_ranks", [1, 4, 16])
def test_without_cuts_a_step_is_the_one_that_is_predicted(num_ranks):
    model = footprint()
    layers = tuple(
        Layer(name=unit.name, backward_s=0.8 * 2 / 3 / 8, gradient_bytes=unit.trained)
        for unit in reversed(model.units)
    )
    profile = Profile(
        machine="m",
        model="blocks",
        batch=4,
        input_s=0.0,
        forward_s=0.8 / 3,
        layers=layers,
        update_s=0.02,
    )
    machine = replace(MACHINE, jitter=0.03)
    layout = RankLayout(num_ranks=num_ranks, ranks_per_node=4)
    found = time_of(cut(Shape(num_ranks, 1, 1)), machine, layout, compute_s=0.8, update_s=0.02)
    assert found.step_s == pytest.approx(predict(profile, machine, num_ranks).step_s.value)


def test_sharding_trades_time_for_memory():
    layout = RankLayout(num_ranks=4, ranks_per_node=4)
    cuts = [cut(Shape(4, 1, 1), shard=s) for s in ("none", "state", "gradients", "parameters")]
    held = [bytes_of(each, 0).held for each in cuts]
    assert held[0] > held[1] > held[2] == held[3]
    gathered = [bytes_of(each, 0).gathered for each in cuts]
    assert gathered[0] == 0 < gathered[3] < gathered[2]
    fast = replace(MACHINE, memory_bytes_per_device=0)  # without overlap every byte is seen
    times = [time_of(each, fast, layout, compute_s=0.001).step_s for each in cuts]
    assert times[2] < times[3]


def test_the_fastest_that_fits_is_proposed():
    compute = Compute(machine=MACHINE, compute_s=0.5)
    easy, why = choose_grid(footprint(), 8, 1 << 34, compute=compute)
    assert (easy.shape, easy.shard) == ((8, 1, 1), "none")
    assert "fastest" in why
    plan = plan_grids(footprint(), 8, memory_per_rank=260 * MIB, compute=compute)
    assert plan.best is plan.choices[0]
    assert plan.best.need.total <= 260 * MIB * (1 - HEADROOM)
    assert plan.best.time.step_s <= 1.02 * min(c.time.step_s for c in plan.choices if c.fits)
    over = [choice for choice in plan.choices if not choice.fits]
    assert over
    assert any(choice.shape == (8, 1, 1) and choice.shard == "none" for choice in over)
    assert any("longer" in line for line in plan.why)
    assert any("too much" in line for line in plan.why)
    assert plan.as_json()["proposal"]["fits"]


def test_without_times_the_grid_that_changes_least():
    model = footprint(tensor_sizes=())
    plan = plan_grids(model, 4, memory_per_rank=1 << 34)
    assert (plan.best.shape, plan.best.shard, plan.best.time) == ((4, 1, 1), "none", None)
    need = {choice.shard: choice.need.total for choice in plan.choices if choice.shape.data == 4}
    limit = int((need["state"] + need["none"]) / 2 / (1 - HEADROOM))
    plan = plan_grids(model, 4, memory_per_rank=limit, micro_batch=4)
    assert (plan.best.shape, plan.best.shard) == ((4, 1, 1), "state")
    assert any("changes least" in line for line in plan.why)


def test_nothing_fits_is_said_with_what_is_missing():
    with pytest.raises(ConfigError, match=r"no grid fits: .* more than there are"):
        choose_grid(footprint(), 4, MIB)


def test_impossible_grids_are_named():
    plan = plan_grids(footprint(num_units=2), 8, memory_per_rank=1 << 34, global_batch=12)
    refused = {tuple(shape): why for shape, why in plan.refused}
    assert "2 layers" in refused[(1, 8, 1)]
    assert "12 does not divide by data=8" in refused[(8, 1, 1)]
    odd = replace(footprint(), tensor_sizes=(("up", 6),))
    refused = dict(plan_grids(odd, 4, memory_per_rank=1 << 34).refused)
    pair = find_odd_pair(Shape(2, 2, 1), "state")
    assert refused == {
        Shape(1, 1, 4): "up has 6 to divide, which 4 does not",
        Shape(2, 1, 2): pair,
        Shape(2, 2, 1): pair,
    }
    none = dict(plan_grids(footprint(tensor_sizes=()), 2, memory_per_rank=1 << 34).refused)
    assert "--tensor" in none[Shape(1, 1, 2)]


def test_stages_begin_where_a_model_can_be_cut():
    whole = footprint(num_units=4)
    parts = [
        replace(unit, layer="body" if index in (1, 2) else "")
        for index, unit in enumerate(whole.units)
    ]
    parts[3] = replace(parts[3], weights=0, trained=0)  # such as an activation function
    cut_there = replace(whole, units=tuple(parts))
    assert cut_there.layers == [range(1), range(1, 4)]
    plan = plan_grids(cut_there, 2, memory_per_rank=None, global_batch=8)
    (found,) = [choice for choice in plan.choices if choice.shape.pipeline == 2]
    assert found.cuts == ("body",)
    assert found.stages == (("block.0",), ("block.1", "block.2", "block.3"))
    none = plan_grids(replace(whole, no_stages="a branch"), 2, memory_per_rank=None)
    assert {tuple(shape): why for shape, why in none.refused}[(1, 2, 1)] == "no stages: a branch"


def test_what_does_not_go_together_is_left_out():
    def find_trouble(shape, shard):
        return "not both" if shape.pipeline > 1 and shard == "state" else None

    plan = plan_grids(footprint(), 8, memory_per_rank=None, find_trouble=find_trouble)
    left = {(tuple(choice.shape), choice.shard) for choice in plan.choices}
    assert {((4, 2, 1), "parameters"), ((8, 1, 1), "state")} <= left
    assert ((4, 2, 1), "state") not in left
    assert (Shape(4, 2, 1), "not both") in plan.refused


def test_what_split_refuses_together_is_not_listed():
    assert find_odd_pair(Shape(1, 2, 2), "none") is None
    assert "shard='state'" in find_odd_pair(Shape(2, 2, 1), "state")
    assert find_odd_pair(Shape(2, 2, 1), "parameters") is None
    plan = plan_grids(footprint(), 8, memory_per_rank=None)
    assert {choice.shape for choice in plan.choices if choice.shard == "state"} == {Shape(8, 1, 1)}
    assert any("shard='state' together" in why for _, why in plan.refused)


def test_the_global_batch_is_the_same_on_every_grid():
    plan = plan_grids(footprint(), 8, memory_per_rank=1 << 34, global_batch=48)
    for choice in plan.choices:
        assert choice.micro_batches * choice.micro_batch * choice.shape.data == 48
    given = plan_grids(footprint(), 8, memory_per_rank=1 << 34, micro_batch=2)
    assert {choice.micro_batch for choice in given.choices} == {2}


def test_precisions():
    def sharded(precision):
        return bytes_of(cut(Shape(8, 1, 1), shard="parameters", precision=precision), 0)

    whole, half, pure = map(sharded, ("fp32", "bf16", "bf16-pure"))
    assert half == whole, "autocast: weights are gathered as they are"
    assert pure.held == whole.held, "shards are float32 masters"
    # Two parts of 6 MiB in bfloat16, and 12 in float32 twice for the message, when one unit's
    # activations are gone and none of eight shards of gradients, 1.5 MiB each, has come.
    assert pure.gathered == (2 * 6 + 2 * 12 - 6 - 8 * 1.5) * MIB
    masters = bytes_of(cut(Shape(1, 1, 1), precision="bf16-pure"), 0)
    assert (masters.weights, masters.gradients) == (48 * MIB, 48 * MIB)
    assert masters.state == 3 * 96 * MIB
    with pytest.raises(ConfigError, match="fp8"):
        footprint(precision="fp8")


def test_ranks_of_a_cpu_node_share_sums_and_state():
    shared = bytes_of(cut(Shape(4, 1, 1)), 0, shared_by=4)
    model = 96 * MIB
    assert shared.weights == model
    assert shared.held == 2 * model + (2 * model + 2 * model) // 4


def test_memory_of_a_rank():
    class Args:
        memory_per_rank = None

    assert bytes_in("80GB", "memory") == 80_000_000_000
    assert bytes_in("1.5 GiB", "memory") == 3 << 29
    assert bytes_in("4096", "memory") == bytes_in(4096, "memory") == 4096
    assert bytes_in("230kB", "memory") == 230_000
    for wrong in ("", "GB", "80 G", "-1GB", "0", 0, True, 1.5):
        with pytest.raises(ConfigError, match="80GB"):
            bytes_in(wrong, "--memory-per-rank")
    assert memory_of(Args, find_machine("perlmutter-gpu")) == 40_000_000_000
    with pytest.raises(ConfigError, match=r"no --machine says.*--memory-per-rank 80GB"):
        memory_of(Args, None)
    blank = replace(MACHINE, memory_bytes_per_device=0)
    assert memory_of(Args, replace(blank, memory_bytes_per_node=400)) == 100
    with pytest.raises(ConfigError, match="machine m does not say"):
        memory_of(Args, blank)
    assert parse_tensor(["*.up=column"]) == {"*.up": "column"}
    with pytest.raises(ConfigError, match="PATTERN=column"):
        parse_tensor(["*.up"])
