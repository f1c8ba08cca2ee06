"""A grid that the job chooses by itself: what is divided follows from memory, batch and model."""

from __future__ import annotations

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.automatic_grid import memory_of
from hpctrain.errors import ConfigError

WIDTH, STEPS = 16, 3
LAYER = 8 * (WIDTH * WIDTH + WIDTH)


def build():
    torch.manual_seed(5)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def make(parameters):
    return torch.optim.AdamW(parameters, 1e-2)


def draw(step, rows):
    drawn = torch.Generator().manual_seed(step)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=drawn)
    return x, torch.randn(rows, WIDTH, dtype=torch.float64, generator=drawn)


def choose(world, rows=2, **options):
    return hpc.auto_grid(world, build, mse_loss, *draw(0, rows), optimizer=make, **options)


def train(world, chosen):
    """As the chosen grid says; equal to one process afterwards."""
    rows = chosen.loader_options["global_batch"]
    model = chosen.split(build)
    replica = hpc.distribute(
        world, model, make(model.parameters()), clip_norm=0.5, **chosen.distribute_options
    )
    calls = STEPS * chosen.distribute_options.get("accumulate", 1)
    drawn = [draw(call, rows) for call in range(calls)]
    for x, y in drawn:
        mine = [t.tensor_split(chosen.grid.data)[chosen.grid.coordinate.data] for t in (x, y)]
        replica.learn(mse_loss, *mine)
    want = alone(drawn, calls // STEPS)
    found = dict(model.named_parameters())
    assert found
    for name, parameter in found.items():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert (whole - want[name]).abs().max() <= 1e-11, name
    replica.close()
    chosen.grid.close()


def alone(drawn, accumulate):
    net = build()
    optimizer = make(net.parameters())
    for number, (x, y) in enumerate(drawn, start=1):
        (mse_loss(net(x), y) / accumulate).backward()
        if number % accumulate == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return dict(net.named_parameters())


def test_where_everything_fits_nothing_is_divided(world, capfd):
    before = torch.get_rng_state()
    chosen = choose(world)
    assert torch.equal(torch.get_rng_state(), before)
    assert tuple(chosen.grid.shape) == (world.size, 1, 1)
    assert chosen.split_options == {}
    assert chosen.loader_options["global_batch"] == 2 * world.size
    told = capfd.readouterr().err
    assert told.count("grid chosen: data=") == (1 if world.is_main else 0)
    if world.is_main:
        assert chosen.why in told
        assert "a rank" in told
        assert "runner-up" in told or world.size == 1
    train(world, chosen)


def test_a_rank_with_little_memory_holds_shards(world):
    whole = choose(world, memory_per_rank=1 << 30)
    whole.grid.close()
    # Just not enough for a whole model with gradients and state.
    little = int(1.05 * whole.choice.need.total)
    if world.size == 1:
        with pytest.raises(ConfigError, match=r"auto_grid: no grid fits: the smallest"):
            choose(world, memory_per_rank=little)
        return
    chosen = choose(world, memory_per_rank=little)
    assert chosen.choice.need.total < whole.choice.need.total
    assert chosen.split_options
    train(world, chosen)


def test_a_batch_that_does_not_divide_becomes_a_pipeline(world):
    chosen = choose(world, rows=5, global_batch=5, memory_per_rank="1GB")
    assert chosen.grid.shape.data == 1
    if world.size > 1:
        assert f"5 does not divide by data={world.size}" in chosen.why
        assert "no other fits" not in chosen.why
    assert chosen.grid.pipeline == world.size
    assert len(chosen.choice.cuts) == world.size - 1
    train(world, chosen)


def test_step_times_and_the_memory_of_a_device(world):
    chosen = choose(world, machine="lumi-g", tflops=1.0)
    chosen.grid.close()
    assert chosen.choice.time is not None
    assert "a step" in chosen.why
    assert "not known" not in chosen.why
    if world.device.type == "cpu":
        assert 0 < memory_of(world) * world.local_size <= psutil.virtual_memory().total


def test_what_is_refused(world):
    x, y = draw(0, 2)
    for words, told in (
        ((build(), mse_loss, x, y), "must be the function that builds it"),
        ((build, mse_loss, x), "give one batch of tensors"),
        ((build, None, x, y), "loss_fn is of type NoneType"),
    ):
        with pytest.raises(ConfigError, match=told):
            hpc.auto_grid(world, *words, optimizer=make)
    with pytest.raises(ConfigError, match="give both or none"):
        choose(world, tflops=1.0)
    with pytest.raises(ConfigError, match="global_batch=0"):
        choose(world, global_batch=0)
    with pytest.raises(ConfigError, match=r"no grid fits: .* more than there are"):
        choose(world, memory_per_rank=1000)
    with pytest.raises(ConfigError, match="memory_per_rank much: write it as 80GB"):
        choose(world, memory_per_rank="much")
    with pytest.raises(ConfigError, match=r"failed on the example batch, inputs of float64 \(2, 3"):
        hpc.auto_grid(world, build, mse_loss, torch.zeros(2, 3).double(), y, optimizer=make)
    with pytest.raises(ConfigError, match="tensor: 'x' is 'diagonal'"):
        choose(world, tensor={"x": "diagonal"})
    if world.size > 1:
        with pytest.raises(ConfigError, match=r"global_batch is \d+ on rank 0 and \d+ on rank 1"):
            choose(world, global_batch=world.size * (1 + world.rank))
    model = build()
    with pytest.raises(ConfigError, match=r"grid='auto' comes too late.*hpctrain\.auto_grid"):
        hpc.distribute(world, model, make(model.parameters()), grid="auto")
