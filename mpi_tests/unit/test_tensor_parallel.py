"""Which layers are divided over the tensor dimension, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.errors import ConfigError
from hpctrain.tensor_parallel import plan_layers, vocabulary_cross_entropy


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
