"""How a model becomes stages: balance, chains, cuts, ties, micro-batches, shapes. No MPI."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.pipeline_bubble import (
    BACKWARD_S,
    FORWARD_S,
    bubble_of,
    expected_bubble,
    make_variants,
)
from hpctrain.errors import ConfigError
from hpctrain.pipeline import LayerCost, balance_stages, divide_batch
from hpctrain.pipeline.chain import Layer, chain_of
from hpctrain.pipeline.cutting import Cut, StageModel, cut_at, find_ties, trouble_with_stages
from hpctrain.pipeline.measuring import measure_layers, weigh_layers
from hpctrain.pipeline.micro_batches import trouble_with_batch
from hpctrain.pipeline.shapes import TensorFacts, look_at_loss, look_at_stage

CPU = torch.device("cpu")


def run_plain(module, arguments):
    return module(*arguments)


# Balance


def all_cuts(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *inner, num_layers)
        yield tuple(range(a, b) for a, b in itertools.pairwise(ends))


def worst(costs, cut, field):
    return max(sum(costs[n][field] for n in stage) for stage in cut)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.none() | st.integers(5, 40),
)
def test_balance_is_the_best_of_all_cuts(pairs, num_stages, limit):
    costs = [LayerCost(float(seconds), num_bytes) for seconds, num_bytes in pairs]
    if len(costs) < num_stages:
        with pytest.raises(ConfigError, match=f"cannot be cut into {num_stages} stages"):
            balance_stages(costs, num_stages, limit_bytes=limit)
        return
    cuts = [
        cut
        for cut in all_cuts(len(costs), num_stages)
        if limit is None or worst(costs, cut, 1) <= limit
    ]
    if not cuts:
        with pytest.raises(ConfigError, match="no cut into"):
            balance_stages(costs, num_stages, limit_bytes=limit)
        return
    found = balance_stages(costs, num_stages, limit_bytes=limit)
    best = min((worst(costs, cut, 0), worst(costs, cut, 1)) for cut in cuts)
    assert found in cuts
    assert (worst(costs, found, 0), worst(costs, found, 1)) == best


def test_balance_refuses_costs_that_are_no_numbers():
    with pytest.raises(ConfigError, match="layer 1 costs"):
        balance_stages([LayerCost(1.0), LayerCost(float("nan"))], 2)
    with pytest.raises(ConfigError, match="at least 1 stage"):
        balance_stages([LayerCost(1.0)], 0)


# Micro-batches


@given(st.integers(0, 60), st.integers(1, 12))
def test_micro_batches_have_each_row_once(num_rows, micro_batches):
    runs = divide_batch(num_rows, micro_batches)
    rows = [row for run in runs for row in range(run.start, run.stop)]
    assert rows == list(range(num_rows))
    assert sum(run.num for run in runs) == min(num_rows, micro_batches)
    sizes = [run.size for run in runs]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(runs) == (
        0 if num_rows == 0 else 1 if num_rows % min(num_rows, micro_batches) == 0 else 2
    )


def test_batches_that_cannot_be_cut():
    x, y = torch.zeros(4, 2), torch.zeros(4)
    assert trouble_with_batch((x,), y) is None
    assert "no inputs" in trouble_with_batch((), y)
    assert "input 0 is dict" in trouble_with_batch(({"x": x},), y)
    assert "the target has no dimension" in trouble_with_batch((x,), torch.zeros(()))
    assert "the target has 3 rows and input 0 has 4" in trouble_with_batch((x,), y[:3])


# Chains


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_the_chain_of_a_model():
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
    assert [layer.name for layer in chain_of(nested)] == ["0", "1.0", "1.1"]
    model = Blocks()
    names = ["embed", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "head"]
    layers = chain_of(model)
    assert [layer.name for layer in layers] == names
    assert layers[1].module is model.blocks[0][0]
    assert model.num_calls == 0  # the model itself was not run


def refused(model, match):
    with pytest.raises(ConfigError, match=match):
        chain_of(model)


def test_what_is_no_chain_is_refused_by_name():
    class Residual(Blocks):
        def forward(self, x):
            return self.head(x + self.embed(x))

    class Twice(Blocks):
        def forward(self, x):
            return self.head(self.blocks[0](self.embed(x)), scale=2)

    class Unused(Blocks):
        def forward(self, x):
            return self.head(self.embed(x))

    class Branching(Blocks):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks if self.training else self.blocks[:1]:
                x = block(x)
            return self.head(x)

    class Looking(Blocks):
        def forward(self, x):
            return self.head(self.embed(x)) if x.sum() > 0 else x

    class Own(Blocks):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    refused(Residual(), "after embed it uses add")
    refused(Twice(), "head must be given what blocks.0 gives")
    refused(Unused(), r"blocks.0.0.weight belongs to no layer")
    refused(Branching(), "blocks.1 in training only or in evaluation only")
    refused(Looking(), "cannot be followed")
    refused(Own(), "scale belongs to no layer")
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda *_: None)
    refused(hooked, "hooks")
    refused(nn.Sequential(), "no layers")


# Cuts

NAMES = ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_stages_by_name():
    want = (range(0, 2), range(2, 5))
    assert cut_at(NAMES, ["blocks.1"], 2) == want
    assert cut_at(NAMES, [["embed", "blocks.0"], ["blocks.1", "blocks.2", "head"]], 2) == want
    assert cut_at(NAMES, ["blocks", "head"], 3) == (range(0, 1), range(1, 4), range(4, 5))
    assert cut_at(NAMES, [["embed"], ["blocks"], ["head"]], 3) == cut_at(
        NAMES, ["blocks", "head"], 3
    )


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        (["blocks.7"], "'blocks.7' is no layer; the layers are embed, blocks.0"),
        (["blocks.1", "head"], "begins 3 stages, and the grid has pipeline=2"),
        (["embed"], "leaves a stage without any"),
        ([["embed"], ["blocks"]], "no stage has head"),
        ([["embed"], ["head"]], "names 'head' where 'blocks.0' comes next"),
        ([["embed"], []], "none of them empty"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages, match):
    with pytest.raises(ConfigError, match=match):
        cut_at(NAMES, stages, 2)


def test_a_stage_keeps_names_and_ties():
    model = Blocks()
    model.blocks[1][0].weight = model.embed.weight
    layers = chain_of(model)
    stages = cut_at([layer.name for layer in layers], ["blocks.1"], 2)
    ties = find_ties(layers, stages)
    assert [tie.names for tie in ties] == [{0: "embed.weight", 1: "blocks.1.0.weight"}]
    assert ties[0].owner == 0
    cut = Cut(tuple(layer.name for layer in layers), stages, ties, "as given")
    parts = [StageModel(layers, cut, number) for number in range(2)]
    together = {name: p for part in parts for name, p in part.named_parameters()}
    assert together.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    x = torch.randn(3, 4)
    assert torch.equal(parts[1](parts[0](x)), model(x))


def test_a_buffer_in_two_stages_is_refused():
    norm = nn.BatchNorm1d(4)
    layers = [Layer("0", norm), Layer("1", norm)]
    with pytest.raises(ConfigError, match=r"the buffer 0\.running_mean = 1\.running_mean"):
        find_ties(layers, [range(0, 1), range(1, 2)])


# Costs and shapes, without touching the model


def test_measuring_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example = torch.randn(6, 4)
    state = torch.get_rng_state()
    costs = measure_layers(chain_of(model), (example,))
    assert all(cost.seconds > 0 for cost in costs)
    weights = [4 * 4 * (4 * 8 + 8), 4 * 4 * 16, 0, 4 * 4 * (8 * 2 + 2)]
    assert all(cost.num_bytes >= own for cost, own in zip(costs, weights, strict=True))
    assert [cost.num_bytes for cost in weigh_layers(chain_of(model))] == weights
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_measuring_names_the_layer_that_fails():
    with pytest.raises(ConfigError, match=r"layer 1 \(Linear\) cannot be measured"):
        measure_layers(
            chain_of(nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 2))), (torch.zeros(2, 4),)
        )


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_calls = 0
        self.places = torch.arange(8.0)

    def forward(self, x):
        self.num_calls += 1
        return x + self.places + torch.arange(8)


def test_shapes_are_found_without_running_the_model():
    counting = Counting()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), counting, nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    given = [TensorFacts((3, 4), torch.float32, requires_grad=False)]
    found, trouble = look_at_stage(model, given, CPU, call=run_plain, is_last=False)
    assert trouble is None
    assert found == (TensorFacts((3, 8), torch.float32, requires_grad=True),)
    assert counting.num_calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("give", "match"),
    [
        (lambda x: {"a": x}, "returns a dict"),
        (lambda x: (x, 3), "output 1 is int"),
        (lambda x: (x,), "tuple of length 1"),
        (lambda x: x.argmax(1), "dtype int64"),
        (lambda x: x.sum(), "no dimension"),
        (lambda x: x[x > 0], "cannot be found without data"),
        (lambda x: x if x.sum() > 0 else -x, "must follow from the shapes of its inputs"),
    ],
)
def test_outputs_that_cannot_be_sent(give, match):
    class Giving(nn.Module):
        def forward(self, x):
            return give(x)

    given = [TensorFacts((3, 4), torch.float32, requires_grad=False)]
    _, trouble = look_at_stage(Giving(), given, CPU, call=run_plain, is_last=False)
    assert match in trouble


class Picky(nn.Module):
    def forward(self, x):
        raise ValueError("bad sample 5.")


@pytest.mark.parametrize(
    ("module", "rows", "match"),
    [
        (Picky(), 3, "ValueError: bad sample 5 (test_pipeline_stages.py:"),
        (nn.Linear(5, 5), 3, "a micro-batch of float32 (3, 4) (tried without data): RuntimeError"),
        (nn.BatchNorm1d(4), 1, "of one row: use fewer micro-batches, or drop_last=True"),
    ],
    ids=["raises", "width", "one row"],
)
def test_a_model_that_fails_is_not_called_a_matter_of_shapes(module, rows, match, capfd):
    given = [TensorFacts((rows, 4), torch.float32, requires_grad=False)]
    _, trouble = look_at_stage(module, given, CPU, call=run_plain, is_last=False)
    assert match in trouble
    assert "must follow" not in trouble
    assert "Traceback" not in capfd.readouterr().err


def test_losses_that_cannot_be_differentiated():
    output = [TensorFacts((3, 4), torch.float32, requires_grad=True)]
    target = TensorFacts((3, 4), torch.float32, requires_grad=False)
    assert look_at_loss(nn.functional.mse_loss, output, target, CPU) is None
    each = nn.MSELoss(reduction="none")
    assert "shape (3, 4)" in look_at_loss(each, output, target, CPU)
    assert "returned float" in look_at_loss(lambda *_: 1.0, output, target, CPU)
    assert look_at_loss(lambda o, t: o.sum().item(), output, target, CPU) is None  # not seen here


def test_the_bubble_that_a_pipeline_should_have():
    assert expected_bubble(1, 8) == 0
    assert expected_bubble(3, 12) == pytest.approx(2 / 14)
    work = FORWARD_S + BACKWARD_S
    for num_stages, micro_batches in ((2, 8), (4, 4)):
        step = (micro_batches + num_stages - 1) * work  # fill, work, drain
        assert bubble_of(step, micro_batches) == pytest.approx(
            expected_bubble(num_stages, micro_batches)
        )
    assert [v.name for v in make_variants(("alone", "1f1b"), [2])] == ["alone-2", "1f1b-2"]


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        (2, "stages=2 is an int; give 'auto'"),
        ("blocks.1", "is a str"),
        ({"a": 1}, "is a dict"),
        ([1, 2], "has 1 in it"),
        (["a", ["b"]], "has 'a' in it, among other kinds"),
        ([["a"], [2]], "has 2 in it, which is no name"),
    ],
)
def test_stages_of_a_wrong_kind(stages, what):
    assert what in trouble_with_stages(stages)


def test_stages_of_a_right_kind():
    for stages in (["a"], ("a", "b"), [["a"], ["b", "c"]], []):
        assert trouble_with_stages(stages) is None
