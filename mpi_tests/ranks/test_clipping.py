"""Clipping over all ranks is torch's own over one process; and a scaler of the user's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.replica import HorovodTraining
from hpctrain.replica.equal_ranks import digest
from mpi_tests.built import BUILT
from mpi_tests.models import OPTIMIZERS
from mpi_tests.ranks.pair import STEPS, Pair

# Gradients in the arena, on `mpi`, and where Horovod fuses them; test_precision has every engine.
WAYS = ["mpi", *(["horovod-fusion"] if "horovod" in BUILT else [])]


def make_pair(world, engines, way="mpi", **options):
    fusion = HorovodTraining(fusion="horovod") if way == "horovod-fusion" else None
    return Pair(world, engines[way.removesuffix("-fusion")], horovod=fusion, **options)


def train_alone(p, step, clip):
    p.own.zero_grad()
    p.whole_loss(step).backward()
    norm = clip()
    p.own.step()
    return norm


@pytest.mark.parametrize(
    ("way", "name"), [*[(way, "branches") for way in WAYS], ("mpi", "complex"), ("mpi", "tied")]
)
def test_by_norm(world, engines, way, name):
    p = make_pair(world, engines, way, model=name, clip_norm=0.3)
    num_clipped = 0
    for step in range(STEPS):
        p.replica.backward(p.loss(step))
        done = p.replica.step()
        norm = train_alone(
            p, step, lambda: nn.utils.clip_grad_norm_(p.alone.parameters(), 0.3)
        ).item()
        assert done.norm == pytest.approx(norm, rel=1e-9)
        num_clipped += norm > 0.3
    assert num_clipped > 0
    p.check()


@pytest.mark.parametrize("way", WAYS)
def test_by_value_and_a_group_that_is_left_out(world, engines, way):
    p = make_pair(world, engines, way, clip_value=0.01)
    for optimizer in (p.optimizer, p.own):
        optimizer.param_groups[1]["clip"] = False
    for step in range(STEPS):
        p.replica.backward(p.loss(step))
        clipped = {id(q) for q in p.optimizer.param_groups[0]["params"]}
        largest = [q.grad.abs().max().item() for q in p.model.parameters() if id(q) in clipped]
        assert max(largest) == 0.01
        p.replica.step()
        matrices = p.own.param_groups[0]["params"]
        train_alone(p, step, lambda m=matrices: nn.utils.clip_grad_value_(m, 0.01))
    p.check()


def test_by_value_beside_complex_weights_that_are_left_out(world, engines):
    torch.manual_seed(2)
    model = nn.Module()
    model.phase = nn.Parameter(torch.randn(70, dtype=torch.complex128))
    model.weight = nn.Parameter(torch.randn(9).double())
    groups = [{"params": [model.phase], "clip": False}, {"params": [model.weight]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"], clip_value=0.01)
    replica.backward(model.phase.abs().square().sum() + 3 * model.weight.sum())
    assert torch.allclose(model.phase.grad, 2 * model.phase)
    assert model.weight.grad.eq(0.01).all()
    assert replica.step()
    groups = optimizer.param_groups
    extra = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ConfigError, match=r"no meaning for complex parameter group2\.0"):
        replica.backward(model.weight.sum() + extra.abs().sum())
    groups.pop()
    replica.close()
    with pytest.raises(ConfigError, match="no meaning for complex parameter phase"):
        hpc.distribute(
            world,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            engine=engines["mpi"],
            clip_value=0.01,
        )


@pytest.mark.parametrize("way", WAYS)
def test_by_norm_with_a_group_left_out_and_accumulation(world, engines, way):
    p = make_pair(world, engines, way, clip_norm=0.05, accumulate=2, precision="fp16")
    for optimizer in (p.optimizer, p.own):
        optimizer.param_groups[0]["clip"] = False
    for step in range(STEPS):
        for part in range(2):
            p.replica.backward(p.loss(2 * step + part))
            done = p.replica.step()
        p.own.zero_grad()
        ((p.whole_loss(2 * step) + p.whole_loss(2 * step + 1)) / 2).backward()
        norm = nn.utils.clip_grad_norm_(p.own.param_groups[1]["params"], 0.05)
        p.own.step()
        assert done.norm == pytest.approx(norm.item(), rel=1e-9)
    p.check()


def test_float32_norms_are_accurate(world, engines):
    """Over 3 million elements torch's own sum on one CPU is off by a thousandth; ours is not."""
    weight = nn.Parameter(torch.zeros(3_000_001))
    model = nn.Module()
    model.weight = weight
    replica = hpc.distribute(
        world, model, torch.optim.SGD([weight], lr=1.0), engine=engines["mpi"], clip_norm=1.0
    )
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(3))
    replica.backward((weight * values).sum())
    norm = replica.step().norm
    assert norm == pytest.approx(values.double().norm().item(), rel=3e-6)
    assert weight.detach().double().norm().item() == pytest.approx(1.0, rel=3e-6)
    replica.close()


def test_a_second_backward_would_add_to_clipped_gradients(world, engines):
    p = make_pair(world, engines, optimizer="sgd", clip_norm=0.1)
    p.replica.backward(p.loss(0))
    with pytest.raises(ConfigError, match=r"replica.no_sync\(\), or use accumulate"):
        p.replica.backward(p.loss(1))
    p.replica.zero_grad()
    for step in range(STEPS):
        with p.replica.no_sync():
            p.replica.backward(p.loss(2 * step))
        p.replica.backward(p.loss(2 * step + 1))
        p.replica.step()
        p.own.zero_grad()
        (p.whole_loss(2 * step) + p.whole_loss(2 * step + 1)).backward()
        nn.utils.clip_grad_norm_(p.alone.parameters(), 0.1)
        p.own.step()
    p.check()


def test_gradients_dropped_by_the_optimizer_begin_anew(world, engines):
    p = make_pair(world, engines, clip_norm=0.1, precision="fp16")
    for step in range(STEPS):
        bad = p.loss(step) * (math.inf if p.world.rank == 0 else 1.0)
        p.replica.backward(bad)
        p.optimizer.zero_grad()  # the user has seen something and drops this batch
        p.replica.backward(p.loss(step))
        assert p.replica.step()
        train_alone(p, step, lambda: nn.utils.clip_grad_norm_(p.alone.parameters(), 0.1))
    p.check()


def test_two_backward_calls_add_up_unscaled(world, engines):
    p = make_pair(world, engines, optimizer="sgd", precision="fp16")
    for step in range(STEPS):
        p.replica.backward(p.loss(2 * step))
        p.replica.backward(p.loss(2 * step + 1))
        done = p.replica.step()
        assert done
        assert done.norm is None  # of the sum: nobody has computed it
        p.own.zero_grad()
        p.whole_loss(2 * step).backward()
        p.whole_loss(2 * step + 1).backward()
        p.own.step()
    p.replica.backward(p.loss(0) * math.nan)
    p.replica.backward(p.loss(0))
    assert p.replica.step().skipped  # the first of the two was not finite
    p.check()


def test_gradients_are_unscaled_between_backward_and_step(world, engines):
    p = make_pair(world, engines, precision="fp16")
    for step in range(STEPS):
        p.replica.backward(p.loss(step))
        nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
        p.replica.step()
        train_alone(p, step, lambda: nn.utils.clip_grad_norm_(p.alone.parameters(), 0.1))
    p.check()


@pytest.mark.parametrize(
    "options", [{"precision": "fp16"}, {"clip_norm": 1.0}, {"clip_value": 1.0}]
)
def test_a_step_past_the_replica_is_refused(world, engines, options):
    p = make_pair(world, engines, **options)
    p.replica.backward(p.loss(0))
    before = digest(p.model.parameters())
    with pytest.raises(ConfigError, match=r"need replica.step\(\)"):
        p.optimizer.step()
    assert digest(p.model.parameters()) == before
    assert p.replica.step()
    p.replica.close()
    p.optimizer.step()  # the optimizer is the user's own again


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradscaler_of_the_users_own(world, engines, way, accumulate):
    p = make_pair(world, engines, way, accumulate=accumulate)
    mine, other = (torch.amp.GradScaler("cpu", 1024.0, growth_interval=3) for _ in range(2))
    scales = []
    for step in range(STEPS):
        bad = step in (2, 5)
        for part in range(accumulate):
            loss = p.loss(accumulate * step + part)
            factor = math.inf if bad and world.rank == world.size - 1 else 1.0
            p.replica.backward(mine.scale(loss * factor))
        mine.unscale_(p.optimizer)
        nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
        mine.step(p.optimizer)
        mine.update()
        p.optimizer.zero_grad()
        for part in range(accumulate):
            whole = p.whole_loss(accumulate * step + part) / accumulate
            other.scale(whole * (math.inf if bad else 1.0)).backward()
        other.unscale_(p.own)
        nn.utils.clip_grad_norm_(p.alone.parameters(), 0.1)
        other.step(p.own)
        other.update()
        p.own.zero_grad()
        scales.append(mine.get_scale())
        assert scales[-1] == other.get_scale()
    assert all(theirs == scales for theirs in world.comm.allgather(scales))
    p.check()


def test_a_gradscaler_steps_the_replica_of_a_fused_optimizer(world, engines):
    p = make_pair(world, engines, optimizer="adamw-fused")
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    for step in range(STEPS):
        p.replica.backward(scaler.scale(p.loss(step)))
        scaler.step(p.optimizer)
        scaler.update()
        p.optimizer.zero_grad()
        train_alone(p, step, lambda: None)
    p.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is unknown; use one of fp32, tf32, bf16, fp16"),
        ({"precision": "tf32"}, "mode of NVIDIA GPUs, and the device is cpu"),
        ({"scaling": hpc.precision.LossScaling()}, "scaling is for precision='fp16'"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be above 0"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "choose one"),
        ({"precision": "bf16-pure"}, "layers.0.weight is float64"),
    ],
)
def test_mistakes_are_named(world, engines, options, message):
    with pytest.raises(ConfigError, match=message):
        make_pair(world, engines, **options)


def test_half_precision_weights_cannot_be_unscaled(world, engines):
    model = nn.Linear(3, 2).half()
    with pytest.raises(ConfigError, match="parameter weight is float16"):
        hpc.distribute(
            world, model, OPTIMIZERS["sgd"](model), engine=engines["mpi"], precision="fp16"
        )
    assert cross_entropy(model(torch.ones(1, 3).half()).float(), torch.zeros(1).long()) > 0
