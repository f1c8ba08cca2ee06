"""Which modules become units: from names, kinds and sizes alone."""

from __future__ import annotations

import pytest
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.sharding import ModuleFacts, choose_units, match_units, module_facts


def units_of(model, patterns=None):
    facts, sizes = module_facts(model)
    return choose_units(facts, sizes) if patterns is None else match_units(facts, patterns)


def test_layers_of_a_transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoder(layer, 3), nn.Linear(8, 9))
    assert units_of(model) == ("1.layers.0", "1.layers.1", "1.layers.2")


def test_blocks_in_stages():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(self.conv(x))

    model = nn.Module()
    model.one = nn.Sequential(Stage(), Stage())
    model.two = nn.Sequential(Stage(), nn.ReLU(), Stage())
    model.head = nn.Linear(4, 2)
    assert units_of(model) == ("one.0", "one.1", "two.0", "two.2")


def test_single_layers_are_units_where_they_are_large():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.LayerNorm(2), nn.LayerNorm(2))
    assert units_of(model) == ("0", "1", "2")


def test_what_does_not_repeat_stays_with_the_root():
    assert units_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))) == ()
    assert units_of(nn.Linear(2, 2)) == ()


def test_blocks_that_share_a_weight_with_others_stay_with_the_root():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
    model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    model.head = nn.Linear(8, 8)
    model.head.weight = model.blocks[1].weight
    assert units_of(model) == ("blocks.0", "blocks.2")


def test_a_module_that_is_called_twice_is_one_unit():
    one = nn.Linear(8, 8)
    assert units_of(nn.ModuleList([one, one, nn.Linear(8, 8)])) == ("0", "2")


def test_patterns():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    model.head = nn.Linear(4, 4)
    assert units_of(model, ["layers.*"]) == ("layers.0", "layers.1")
    assert units_of(model, ["head", "layers.*", "layers.*.0"]) == (
        "layers.0",
        "layers.0.0",
        "layers.1",
        "layers.1.0",
        "head",
    )
    assert units_of(model, []) == ()
    with pytest.raises(ConfigError, match=r"'layer\.\*' matches no module; there are layers"):
        units_of(model, ["layer.*"])
    with pytest.raises(ConfigError, match=r"give 'layers\.\*' for the modules in it"):
        units_of(model, ["layers"])
    with pytest.raises(ConfigError, match="has no parameters"):
        units_of(model, ["layers.0.1"])


def test_many_modules_are_no_trouble():
    layers = [ModuleFacts(name="", kind="Net"), ModuleFacts(name="l", kind="L", is_container=True)]
    for number in range(3000):
        layers.append(ModuleFacts(name=f"l.{number}", kind="Block"))
        layers.append(
            ModuleFacts(name=f"l.{number}.w", kind="Linear", parameters=frozenset({number}))
        )
    assert len(choose_units(layers, dict.fromkeys(range(3000), 10))) == 3000
