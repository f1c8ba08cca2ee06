"""Int8 weights for inference."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import hpctrain as hpc


def test_linear_weights_become_int8_and_the_difference_is_said():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    x = torch.randn(200, 16)
    model.eval()
    labels = model(x).argmax(1)
    labels[:10] = (labels[:10] + 1) % 4  # accuracy 95 % by construction
    model.train()
    weight = model[0].weight.detach().clone()
    said = []
    small = hpc.inference.quantize_int8(
        model, lambda m: (m(x).argmax(1) == labels).double().mean().item(), say=said.append
    )
    assert model.training
    assert torch.equal(model[0].weight, weight)
    exact, rounded = model.eval()(x), small(x)
    assert not torch.equal(exact, rounded)  # it is another model
    assert torch.allclose(exact, rounded, atol=0.05)
    # int8 with a scale for each output: within half a step of the largest weight
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((small[0].weight.dequantize() - weight).abs() <= 0.51 * steps).all()
    (line,) = said
    assert line.startswith("int8 weights in 2 linear layers")
    assert "accuracy 95.00% -> " in line
    assert line.endswith("points)")


def test_mistakes_are_named(monkeypatch):
    pytest.importorskip("torchao")
    with pytest.raises(hpc.errors.ConfigError, match="ReLU has no Linear layer"):
        hpc.inference.quantize_int8(nn.ReLU(), lambda m: 0.0)


def test_without_torchao_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(hpc.errors.ConfigError, match=r"pip install 'hpctrain\[int8\]'"):
        hpc.inference.quantize_int8(nn.Linear(2, 2), lambda m: 0.0)
