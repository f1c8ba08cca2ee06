"""Patterns of names mean the same wherever a model's modules are named."""

from __future__ import annotations

import pytest
from torch import nn

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.name_patterns import is_inside, match_names, matches_any
from hpctrain.sharding import match_units, module_facts

NAMES = ["up", "blocks", "blocks.0", "blocks.0.up", "blocks.0.norm", "blocks.1", "blocks.1.up"]


def test_a_star_is_any_text():
    assert match_names(["*.up"], NAMES) == {"*.up": ["up", "blocks.0.up", "blocks.1.up"]}
    assert match_names(["blocks.*"], NAMES)["blocks.*"] == NAMES[2:]
    assert match_names(["blocks.*"], NAMES, outermost=True)["blocks.*"] == ["blocks.0", "blocks.1"]
    assert match_names(["*"], NAMES, outermost=True)["*"] == ["up", "blocks"]
    with pytest.raises(ConfigError, match=r"units: 'layers' matches no module; there are up, bl"):
        match_names(["layers"], NAMES, argument="units:")
    with pytest.raises(ConfigError, match="give at least one name of a layer"):
        match_names([], NAMES, what="layer")


def test_names_within_names():
    assert is_inside("blocks.0", "blocks")
    assert is_inside("blocks", "")
    assert not is_inside("blocks2", "blocks")
    assert not is_inside("blocks", "blocks")
    assert matches_any("up.weight", ["*.weight"])
    assert not matches_any("up.weight", [])


def test_units_and_checkpointed_modules_are_the_same():
    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))

    model = nn.Sequential(block(), block(), nn.Linear(4, 4))
    for pattern in ("0", "*", "*.0", "?.1", "[01]"):
        facts, _ = module_facts(model)
        done = hpc.optim.checkpoint_activations(model, pattern)
        assert done.names == match_units(facts, [pattern]), pattern
        done.remove()
