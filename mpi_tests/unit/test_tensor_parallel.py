"""Which layers are divided over the tensor dimension, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.errors import ConfigError
from hpctrain.replica.modes.partners import find_apart, sum_losses
from hpctrain.tensor_parallel import plan_layers, vocabulary_cross_entropy
from hpctrain.tensor_parallel.boundary import digest, draws
from hpctrain.tensor_parallel.running import ModuleOrder


class Attention(nn.Module):
    def __init__(self, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.out = nn.Linear(12, 12), nn.Linear(12, 12)


def build(**more):
    parts = {
        "embed": nn.Embedding(30, 12),
        "attention": Attention(3),
        "up": nn.Linear(12, 20),
        "down": nn.Linear(20, 12),
    }
    return nn.ModuleDict({**parts, **more})


def test_patterns_choose_layers():
    model = nn.ModuleDict({"first": build(), "second": build()})
    patterns = {"*.up": "column", "*.down": "row", "second.embed": "vocabulary"}
    assert plan_layers(model, patterns, 2) == {
        "first.up": "column",
        "second.up": "column",
        "first.down": "row",
        "second.down": "row",
        "second.embed": "vocabulary",
    }


@pytest.mark.parametrize(
    ("patterns", "num_ranks", "told"),
    [
        ({"*.up": "columns"}, 2, r"'columns'; choose 'column', 'row', 'vocabulary'"),
        ({"*.nothing": "row"}, 2, "matches no linear or embedding layer; there are embed"),
        ({"*.up": "column", "u*": "row"}, 2, "up is both 'column' and 'row'"),
        ({"*.up": "column"}, 3, "up has 20 outputs, which tensor=3 does not divide; 18 or 21"),
        ({"*.up": "column"}, 3, "or tensor=1 or 2 or 4 or 5 or 10 or 20"),
        ({"*.up": "row"}, 5, "up has 12 inputs"),
        ({"*.embed": "vocabulary"}, 4, "embed has 30 rows, .* 28 or 32 would"),
        ({"*.embed": "row"}, 2, "can be 'vocabulary', not 'row'"),
        ({"*.query": "column"}, 2, "num_heads=3, which tensor=2 does not divide; tensor=1 or 3"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(patterns, num_ranks, told):
    with pytest.raises(ConfigError, match=told):
        plan_layers(build(), patterns, num_ranks)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"norm": nn.BatchNorm1d(3)}, "norm is a batch normalisation"),
        ({"embed": nn.Embedding(30, 12, padding_idx=0)}, "embed has padding_idx"),
    ],
)
def test_what_would_not_be_exact_is_refused(more, told):
    with pytest.raises(ConfigError, match=told):
        plan_layers(build(**more), {"*.up": "column", "*.embed": "vocabulary"}, 2)


def test_tied_layers_must_be_divided_alike():
    model = build()
    model["head"] = nn.Linear(12, 30, bias=False)
    model["head"].weight = model["embed"].weight
    with pytest.raises(ConfigError, match=r"embed.weight and head.weight are one tensor"):
        plan_layers(model, {"*.embed": "vocabulary"}, 2)
    plan = plan_layers(model, {"*.embed": "vocabulary", "head": "vocabulary"}, 2)
    assert plan == {"embed": "vocabulary", "head": "vocabulary"}


def test_plain_scores():
    scores, target = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    flat = cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none")
    assert vocabulary_cross_entropy(scores, target).allclose(flat.mean())
    assert vocabulary_cross_entropy(scores, target, reduction="none").equal(flat.view(2, 3))
    with pytest.raises(ConfigError, match="need targets of shape"):
        vocabulary_cross_entropy(scores, target.T)
    with pytest.raises(ConfigError, match="reduction='max'"):
        vocabulary_cross_entropy(scores, target, reduction="max")


def test_a_batch_in_another_order_has_another_digest():
    x = torch.randn(4, 3)
    for other in (x.flip(0), x.flip(1), x[:, :2], x.double(), x.roll(1)):
        assert int(digest([x])) != int(digest([other]))
    assert int(digest([x, 1, None])) == int(digest([x.clone(), 1, None]))
    assert int(digest([x, 1])) != int(digest([x, 2]))
    assert int(digest([x, x + 1])) != int(digest([x + 1, x]))
    powers = torch.tensor([1.0, 2.0], dtype=torch.float64).repeat_interleave(4096)
    assert int(digest([powers])) != int(digest([powers.roll(4096)]))
    for dtype in (torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.complex64):
        one = torch.tensor([0, 1, 1]).to(dtype)
        assert int(digest([one])) != int(digest([one.flip(0)]))
    assert int(digest([torch.empty(0, 3)])) != int(digest([torch.empty(0, 2)]))


@pytest.mark.parametrize(
    ("name", "args", "named", "told"),
    [
        ("dropout", (0,), {"p": 0.5, "training": True}, True),
        ("dropout", (0,), {"p": 0.5, "training": False}, False),
        ("dropout", (0,), {"p": 0.0}, False),
        ("dropout", (0, 0.5, False), {}, False),
        ("dropout", (0, 0.5), {"train": False}, False),
        ("alpha_dropout", (0,), {"p": 0.5}, False),
        ("scaled_dot_product_attention", (0, 0, 0), {}, False),
        ("scaled_dot_product_attention", (0, 0, 0), {"dropout_p": 0.1}, True),
        ("scaled_dot_product_attention", (0, 0, 0, None, 0.1), {}, True),
        ("rand_like", (0,), {}, True),
        ("linear", (0,), {}, False),
    ],
)
def test_what_draws_random_numbers(name, args, named, told):
    assert draws(name, args, named) is told


def compared(*ranks):
    """What ranks with these losses find."""
    sums = [sum_losses([torch.tensor(value, dtype=kind) for value, kind in one]) for one in ranks]
    ends = [type(sums[0])(*map(end, *sums)) for end in (max, min)]
    return find_apart(*ends)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_may_differ_by_rounding_alone(kind):
    eps = torch.finfo(kind).eps
    one, near, far = 0.5, 0.5 * (1 + 4 * eps), 0.5 * (1 + 64 * eps)
    assert compared([(one, kind)], [(near, kind)]) is None
    assert "from 0.5 to" in compared([(one, kind)], [(far, kind)])
    assert compared([(one, kind), (far, kind)], [(far, kind), (one, kind)]) is None
    assert compared([(-one, kind)], [(-far, kind)]) is not None


def test_losses_that_are_not_finite_are_told_of_elsewhere():
    for bad in (float("nan"), float("inf")):
        assert compared([(bad, torch.float32)], [(1.0, torch.float32)]) is None
    assert compared([], []) is None
    assert compared([], [(1.0, torch.float32)]) is not None


def test_modules_that_run_have_a_number_with_their_order():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)])
    order = ModuleOrder(model)
    taken = []
    for path in ((0, 2), (2, 0), (0, 2), (0,), (0, 0), (0, 1, 2), ()):
        for number in path:
            model[number](torch.ones(1, 2))
        taken.append(order.take())
    assert taken[0] == taken[2] == taken[5]
    assert len(set(taken)) == 5
    assert taken[-1] == 0
