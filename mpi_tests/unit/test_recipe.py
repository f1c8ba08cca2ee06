"""Learning rates, and which parameters decay."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hpctrain as hpc

BASE = {"base_rate": 0.1, "base_batch": 256, "global_batch": 256, "num_steps": 100}


def recipe(**options):
    return hpc.optim.Recipe(**{**BASE, **options})


@pytest.mark.parametrize(("scaling", "peak"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_scaling_with_the_global_batch(scaling, peak):
    assert recipe(global_batch=1024, scaling=scaling).peak == pytest.approx(peak)


def test_a_warm_up_rises_in_a_line_to_the_peak():
    rates = [recipe(warmup_steps=4, decay="none").rate(step) for step in range(6)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    rates = [recipe(warmup_steps=2, warmup_from=0.5, decay="none").rate(step) for step in range(3)]
    assert rates == pytest.approx([0.075, 0.1, 0.1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"decay": "cosine"}, lambda t: 0.05 * (1 + math.cos(math.pi * t))),
        ({"decay": "cosine", "end": 0.2}, lambda t: 0.02 + 0.04 * (1 + math.cos(math.pi * t))),
        ({"decay": "polynomial"}, lambda t: 0.1 * (1 - t) ** 2),
        ({"decay": "polynomial", "power": 1.0, "end": 0.5}, lambda t: 0.05 + 0.05 * (1 - t)),
        ({"decay": "none"}, lambda t: 0.1),
    ],
)
def test_decays(options, expected):
    made = recipe(warmup_steps=20, **options)
    for step in (20, 21, 50, 99, 100, 150):
        assert made.rate(step) == pytest.approx(expected(min(1.0, (step - 20) / 80)))


def test_step_decay():
    made = recipe(decay="step", milestones=(30, 60), factor=0.5)
    rates = [made.rate(step) for step in (0, 29, 30, 59, 60, 99)]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    assert recipe(decay="step", milestones=(1,)).rate(1) == pytest.approx(0.01)


@given(
    st.integers(1, 200),
    st.integers(0, 200),
    st.sampled_from(["cosine", "polynomial", "none"]),
    st.integers(0, 500),
)
def test_a_rate_never_exceeds_its_peak_and_falls_after_the_warm_up(steps, warm, decay, step):
    made = recipe(num_steps=steps, warmup_steps=min(warm, steps), decay=decay)
    assert 0 <= made.rate(step) <= made.peak
    if step >= made.warmup_steps:
        assert made.rate(step + 1) <= made.rate(step)
    else:
        assert made.rate(step + 1) <= made.rate(step) * 2 + 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_rate": 0.0}, "base_rate=0.0 must be above 0"),
        ({"scaling": "cube"}, "scaling='cube'; choose linear, sqrt, none"),
        ({"decay": "linear"}, "decay='linear'; choose cosine"),
        ({"warmup_steps": 101}, "warmup_steps=101 must lie between 0 and num_steps=100"),
        ({"power": 2.0}, "power=2.0 belongs to decay=polynomial"),
        ({"decay": "step"}, "needs milestones"),
        ({"decay": "step", "milestones": (3, 3)}, "must rise"),
        ({"decay": "none", "end": 0.1}, "end=0.1 belongs to decay=cosine or polynomial"),
        ({"milestones": (3,)}, "belongs to decay=step"),
        ({"warmup_from": 0.5}, "needs warmup_steps"),
        ({"end": 1.5}, "is a fraction of the peak"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(hpc.errors.ConfigError, match=message):
        recipe(**options)


def optimizer_of(lr=0.3):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    return torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 2 * lr}], lr=lr)


def test_a_schedule_sets_the_rate_and_groups_keep_their_ratio():
    made = recipe(warmup_steps=5)
    optimizer = optimizer_of()
    schedule = made.schedule(optimizer)
    for step in range(20):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first == pytest.approx(made.rate(step))
        assert second == pytest.approx(2 * made.rate(step))
        assert schedule.get_last_lr() == [first, second]
        optimizer.step()
        schedule.step()


def test_a_schedule_goes_on_where_it_was_saved():
    made = recipe(decay="step", milestones=(3, 5))
    optimizer = optimizer_of()
    schedule = made.schedule(optimizer)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    saved = json.loads(json.dumps(schedule.state_dict()))
    state = copy.deepcopy(optimizer.state_dict())
    for order in ("optimizer first", "schedule first"):
        other = optimizer_of()
        if order == "optimizer first":
            other.load_state_dict(copy.deepcopy(state))
        resumed = made.schedule(other)
        resumed.load_state_dict(saved)
        if order == "schedule first":
            other.load_state_dict(copy.deepcopy(state))
        assert [g["lr"] for g in other.param_groups] == pytest.approx([0.01, 0.02])
        other.step()
        resumed.step()
        assert [g["lr"] for g in other.param_groups] == pytest.approx([0.001, 0.002])
    begun = made.schedule(optimizer_of(), step=4)
    assert begun.get_last_lr() == pytest.approx([0.01, 0.02])


def test_another_recipe_is_refused_by_name():
    saved = recipe().schedule(optimizer_of()).state_dict()
    with pytest.raises(hpc.errors.ConfigError, match="global_batch 256 -> 512"):
        recipe(global_batch=512).schedule(optimizer_of()).load_state_dict(saved)
    with pytest.raises(hpc.errors.ConfigError, match=r"lr=0\.0 must be above 0"):
        recipe().schedule(optimizer_of(lr=0.0))


def test_a_group_that_comes_later_has_its_ratio_too():
    optimizer = optimizer_of()
    schedule = recipe(decay="none").schedule(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.9})
    optimizer.step()
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.2, 0.3])


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm((3, 4))
        self.batch = nn.BatchNorm2d(4)
        self.gate = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(4, 5)
        self.out.weight = self.embed.weight


def test_biases_and_normalisation_are_left_alone():
    model = Odd()
    names = {p: n for n, p in model.named_parameters()}
    first, second = hpc.optim.split_parameters(model, weight_decay=0.1)
    assert {names[p] for p in first["params"]} == {
        "embed.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    assert (first["weight_decay"], first["trust_ratio"]) == (0.1, True)
    assert (second["weight_decay"], second["trust_ratio"]) == (0.0, False)
    assert len(first["params"]) + len(second["params"]) == len(names)
    hpc.optim.LARS([first, second], lr=0.1)
    torch.optim.AdamW([first, second], lr=0.1)
    assert len(hpc.optim.split_parameters(nn.LayerNorm(3), weight_decay=0.1)) == 1
    with pytest.raises(hpc.errors.ConfigError, match="ReLU has no parameters"):
        hpc.optim.split_parameters(nn.ReLU(), weight_decay=0.1)


@pytest.mark.parametrize("load_first", [True, False])
def test_a_restart_with_another_global_batch_follows_the_new_recipe(load_first):
    def run(global_batch):
        plan = recipe(global_batch=global_batch, decay="none")
        groups = [{"params": [nn.Parameter(torch.ones(2))]}]
        groups.append({"params": [nn.Parameter(torch.ones(2))], "lr": 2 * plan.peak})
        return plan, torch.optim.SGD(groups, lr=plan.peak)

    plan, optimizer = run(1024)
    plan.schedule(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    plan, optimizer = run(2048)
    if load_first:
        optimizer.load_state_dict(saved)
        plan.schedule(optimizer, step=5)
    else:
        schedule = plan.schedule(optimizer, step=5)
        optimizer.load_state_dict(saved)
        optimizer.step()
        schedule.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.8, 1.6])


def test_a_training_of_another_length_has_the_same_rate_where_none_falls_to_its_end():
    saved = recipe(decay="none").schedule(optimizer_of(), step=7).state_dict()
    schedule = recipe(decay="none", num_steps=900).schedule(optimizer_of())
    schedule.load_state_dict(saved)
    assert schedule.last_epoch == 7
