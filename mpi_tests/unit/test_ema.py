"""The average of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hpctrain as hpc
from hpctrain.optim.ema import divide


def make(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)


def move(model, step):
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), model[1].running_mean):
            tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        model[1].num_batches_tracked.add_(1)


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_average_is_the_recurrence(warm_up):
    model = make()
    ema = hpc.optim.EMA(model, 0.9, warm_up=warm_up)
    expected = model[0].weight.detach().clone()
    mean = model[1].running_mean.clone()
    for step in range(30):
        move(model, step)
        ema.update()
        decay = min(0.9, (1 + step) / (10 + step)) if warm_up else 0.9
        expected = decay * expected + (1 - decay) * model[0].weight.detach()
        mean = decay * mean + (1 - decay) * model[1].running_mean
    assert torch.allclose(ema.averages["0.weight"], expected, rtol=1e-12)
    assert torch.allclose(ema.averages["1.running_mean"], mean, rtol=1e-12)
    assert "1.num_batches_tracked" not in ema.averages


def test_swapping_in_and_back_leaves_the_same_bits():
    model = make()
    ema = hpc.optim.EMA(model, 0.9)
    move(model, 0)
    ema.update()
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    with ema.swapped_in() as averaged:
        assert averaged is model
        assert torch.equal(model[0].weight, ema.averages["0.weight"])
        assert not torch.equal(model[0].weight, before["0.weight"])
        with pytest.raises(hpc.errors.ConfigError, match="the averages are in the model"):
            ema.update()
        with pytest.raises(hpc.errors.ConfigError, match="already"), ema.swapped_in():
            pass
    with pytest.raises(RuntimeError), ema.swapped_in():
        model(torch.ones(2, 99))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    ema.update()


def test_half_precision_is_averaged_in_float32():
    model = nn.Linear(2, 2).bfloat16()
    ema = hpc.optim.EMA(model, 0.999)
    with torch.no_grad():
        model.weight.add_(1.0)
    before = ema.averages["weight"].clone()
    ema.update()
    assert ema.averages["weight"].dtype == torch.float32
    assert (ema.averages["weight"] > before).all()  # a step of a thousandth is not lost
    with ema.swapped_in():
        assert model.weight.dtype == torch.bfloat16


def test_a_loaded_state_goes_on():
    model = make()
    ema = hpc.optim.EMA(model, 0.9, warm_up=True)
    move(model, 0)
    ema.update()
    other = hpc.optim.EMA(make(), 0.9, warm_up=True)
    other.load_state_dict(copy.deepcopy(ema.state_dict()))
    assert other.num_updates == 1
    assert all(torch.equal(other.averages[name], a) for name, a in ema.averages.items())
    with pytest.raises(hpc.errors.ConfigError, match=r"0\.bias is missing"):
        other.load_state_dict({"num_updates": 0, "averages": {}})


def test_averages_live_where_they_are_told_and_are_written_by_their_owners():
    model = make()
    flat = torch.zeros(100, dtype=torch.float64)
    places, start = {}, 0
    for name, (shape, dtype) in hpc.optim.EMA.wanted(model).items():
        assert dtype == torch.float64
        places[name] = flat[start : start + shape.numel()].view(shape)
        start += shape.numel()
    names = list(places)
    ranks = [hpc.optim.EMA(model, 0.9, into=places, owns=names[rank::2]) for rank in range(2)]
    alone = hpc.optim.EMA(model, 0.9)
    move(model, 0)
    for ema in (*ranks, alone):
        ema.update()
    for name in names:
        assert torch.equal(places[name], alone.averages[name])
        assert places[name].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_mistakes_are_named():
    model = make()
    with pytest.raises(hpc.errors.ConfigError, match=r"decay=1\.0 must be"):
        hpc.optim.EMA(model, 1.0)
    with pytest.raises(hpc.errors.ConfigError, match="owns names nobody"):
        hpc.optim.EMA(model, owns=["nobody"])
    wrong = {name: torch.zeros(shape) for name, (shape, _) in hpc.optim.EMA.wanted(model).items()}
    with pytest.raises(hpc.errors.ConfigError, match=r"0\.weight is \(2, 3\) torch.float32"):
        hpc.optim.EMA(model, into=wrong)
    ema = hpc.optim.EMA(model)
    model.append(nn.Linear(2, 2))
    with pytest.raises(hpc.errors.ConfigError, match=r"2\.bias was added or removed"):
        ema.update()


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 100), max_size=12), st.integers(1, 5))
def test_every_tensor_has_one_owner_and_work_is_even(sizes, num_ranks):
    shares = divide(sizes, num_ranks)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    load = [sum(sizes[name] for name in share) for share in shares]
    assert max(load) - min(load) <= max(sizes.values(), default=0)
