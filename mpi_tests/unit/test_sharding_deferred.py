"""Models that are built without data get the values that one process would have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.sharding import build_deferred


class Varied(nn.Module):
    """Every way of coming by values that is usual."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.embed = nn.Embedding(9, 4, padding_idx=0)
        self.norm = nn.BatchNorm1d(3)
        self.conv = nn.Conv1d(2, 3, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.lstm = nn.LSTM(3, 4)
        self.register_buffer("place", torch.arange(6).float() / 3)
        self.register_buffer("numbers", torch.tensor([1.5, 2.5]))
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.a.weight
        self.scale = nn.Parameter(torch.randn(3, 3) * 0.1)
        nn.init.orthogonal_(self.conv.weight.view(3, 6))
        nn.init.trunc_normal_(self.embed.weight, std=0.02)
        with torch.no_grad():
            self.lstm.bias_ih_l0[4:8].fill_(1.0)
            self.norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        self.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)


@pytest.mark.parametrize("build", [Varied, lambda: Varied().double()])
def test_values_and_generator_are_those_of_one_process(build):
    torch.manual_seed(5)
    expected, after = build(), torch.rand(2)
    torch.manual_seed(5)
    deferred = build_deferred(build)
    assert all(p.device.type == "meta" for p in deferred.model.parameters())
    found = {}
    peak = deferred.fill(lambda name, tensor: found.update({name: tensor.clone()}))
    assert torch.equal(torch.rand(2), after)
    wanted = dict(expected.named_parameters()) | dict(expected.named_buffers())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert peak < sum(t.numel() * t.element_size() for t in wanted.values())


def test_no_more_is_held_than_what_is_being_filled():
    def build():
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(20)))

    one = 64 * 64 * 4
    assert build_deferred(build).fill(lambda name, tensor: None) <= 2 * one


def test_what_cannot_be_repeated_is_refused():
    with pytest.raises(ConfigError, match="looks at values"):
        build_deferred(lambda: nn.Linear(int(torch.ones(()).item()), 1))
    with pytest.raises(ConfigError, match="draws random numbers on cpu"):
        build_deferred(lambda: nn.Linear(2, 2, device="cpu"))
    with pytest.raises(ConfigError, match=r"must give a torch\.nn\.Module"):
        build_deferred(lambda: 3)
