"""What users do in their own loops, equal to one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.replica.equal_ranks import digest
from mpi_tests.models import batch
from mpi_tests.ranks.pair import STEPS, build
from mpi_tests.ranks.split import tensors_of


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model", "replica"])
def test_zero_grad_by_anyone(pair, whose, set_to_none):
    p = pair()
    for step in range(STEPS):
        target = {"optimizer": p.optimizer, "model": p.model, "replica": p.replica}[whose]
        target.zero_grad(set_to_none=set_to_none)
        p.replica.backward(p.loss(step))
        p.replica.step()
        p.own.zero_grad()
        p.whole_loss(step).backward()
        p.own.step()
    p.check()


def test_clipping_and_reading_gradients_between_backward_and_step(pair):
    p = pair(optimizer="sgd")
    for step in range(STEPS):
        p.replica.backward(p.loss(step))
        norm = nn.utils.clip_grad_norm_(p.model.parameters(), 0.05)
        p.own.zero_grad()
        p.whole_loss(step).backward()
        own_norm = nn.utils.clip_grad_norm_(p.alone.parameters(), 0.05)
        assert torch.allclose(norm, own_norm, rtol=1e-9)
        for mine, other in zip(p.model.parameters(), p.alone.parameters(), strict=True):
            assert torch.allclose(mine.grad, other.grad, rtol=0, atol=1e-12)
        p.replica.step()
        p.own.step()
        for mine, other in zip(p.model.parameters(), p.alone.parameters(), strict=True):
            assert torch.allclose(mine.grad, other.grad, rtol=0, atol=1e-12)  # after the step too
    p.check()


def test_replacing_a_gradient_before_the_step(pair):
    p = pair()
    for step in range(STEPS):
        p.replica.backward(p.loss(step))
        p.own.zero_grad()
        p.whole_loss(step).backward()
        for model in (p.model, p.alone):
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 0.5
        p.replica.step()
        p.own.step()
    p.check()


def test_editing_weights_after_the_step(pair):
    p = pair()
    for step in range(STEPS):
        p.replica.backward(p.loss(step))
        p.replica.step()
        p.own.zero_grad()
        p.whole_loss(step).backward()
        p.own.step()
        with torch.no_grad():
            for model in (p.model, p.alone):
                for parameter in model.parameters():
                    parameter.mul_(0.9).clamp_(-0.5, 0.5)
    p.check()


def test_freezing_and_unfreezing(pair):
    p = pair()
    for step in range(12):
        for model in (p.model, p.alone):
            model.layers[0].weight.requires_grad_(not 3 <= step < 7)
            model.layers[2].bias.requires_grad_(step >= 5)
        p.replica.backward(p.loss(step))
        p.replica.step()
        p.own.zero_grad()
        p.whole_loss(step).backward()
        p.own.step()
    assert len(p.optimizer.state) == len(p.own.state)
    p.check()


def test_two_backward_calls_add_up_as_in_torch(pair):
    p = pair(optimizer="sgd")
    for step in range(STEPS):
        p.replica.backward(p.loss(2 * step), retain_graph=True)
        p.replica.backward(p.loss(2 * step + 1))
        p.replica.step()
        p.own.zero_grad()
        p.whole_loss(2 * step).backward(retain_graph=True)
        p.whole_loss(2 * step + 1).backward()
        p.own.step()
    p.check()


def test_the_same_graph_twice(pair):
    p = pair(optimizer="sgd")
    for step in range(STEPS):
        loss, whole = p.loss(step), p.whole_loss(step)
        p.replica.backward(loss, retain_graph=True)
        p.replica.backward(loss)
        p.replica.step()
        p.own.zero_grad()
        whole.backward(retain_graph=True)
        whole.backward()
        p.own.step()
    p.check()


@pytest.fixture
def every_warning():
    """By itself torch warns once a process, of whichever test comes first."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def test_create_graph_and_a_gradient_penalty(pair, every_warning):
    p = pair(optimizer="sgd")
    for step in range(STEPS):
        x, y = p.chunks(step)[p.world.rank]

        def penalised(model, x, y, chunk):
            x = x.clone().requires_grad_()
            loss = cross_entropy(model(x, chunk), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + slope.square().mean()

        with pytest.warns(UserWarning, match="create_graph=True") if step == 0 else _nothing():
            p.replica.backward(penalised(p.replica, x, y, p.world.rank), create_graph=step == 0)
        p.replica.step()
        p.own.zero_grad()
        chunks = enumerate(p.chunks(step))
        losses = [penalised(p.alone, a, b, i) for i, (a, b) in chunks]
        (sum(losses) / len(losses)).backward()
        p.own.step()
    p.check()


def _nothing():
    from contextlib import nullcontext

    return nullcontext()


def test_no_sync_adds_up_and_exchanges_once(pair):
    p = pair(optimizer="sgd")
    before = p.replica.counts()["messages"]
    for step in range(STEPS):
        with p.replica.no_sync():
            p.replica.backward(p.loss(3 * step))
            p.replica.backward(p.loss(3 * step + 1))
            assert not p.replica.step()
        p.replica.backward(p.loss(3 * step + 2))
        assert p.replica.step()
        p.own.zero_grad()
        for part in range(3):
            p.whole_loss(3 * step + part).backward()
        p.own.step()
    assert p.replica.counts()["messages"] - before == (STEPS if p.world.size > 1 else 0)
    p.check()


def test_a_partial_window_steps_when_it_is_flushed(pair):
    p = pair(optimizer="sgd", accumulate=4)
    for part in range(3):
        p.replica.backward(p.loss(part))
        assert p.replica.step().reason == "accumulating"
    assert p.replica.step(flush=True).reason == "stepped"
    (sum(p.whole_loss(part) for part in range(3)) / 3).backward()
    p.own.step()
    p.check()


def test_synchronize_makes_gradients_readable_in_the_middle(pair):
    p = pair(optimizer="sgd", accumulate=2)
    p.replica.backward(p.loss(0))
    p.replica.synchronize()
    p.whole_loss(0).backward()
    for mine, other in zip(p.model.parameters(), p.alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=0, atol=1e-12)
    p.replica.step()
    p.own.step()
    p.check()


def test_converting_the_model_after_distribute(pair):
    p = pair(optimizer="sgd")
    p.replica.backward(p.loss(0))
    p.replica.step()
    p.model.float()
    chunks = [(x.float(), y) for x, y in p.chunks(1)]
    x, y = chunks[p.world.rank]
    p.replica.backward(cross_entropy(p.replica(x, p.world.rank), y))
    assert all(q.grad.dtype == torch.float32 for q in p.model.parameters())
    p.replica.step()
    p.whole_loss(0).backward()
    p.own.step()
    p.alone.float()
    p.own.zero_grad()
    losses = [cross_entropy(p.alone(x, i), y) for i, (x, y) in enumerate(chunks)]
    (sum(losses) / len(losses)).backward()
    p.own.step()
    for mine, other in zip(p.model.parameters(), p.alone.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
    assert len(set(p.world.comm.allgather(digest(p.model.parameters())))) == 1
    p.replica.close()


def test_adding_a_parameter_group(pair):
    p = pair(optimizer="sgd")
    p.replica.backward(p.loss(0))
    p.replica.step()
    p.whole_loss(0).backward()
    p.own.step()
    extras = []
    for model, optimizer in ((p.model, p.optimizer), (p.alone, p.own)):
        torch.manual_seed(9 + (p.world.rank if model is p.model else 0))  # rank 0's counts
        extra = nn.Linear(4, 4).double()
        optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.3})
        extras.append(extra)
    for step in range(1, STEPS):
        x, y = p.chunks(step)[p.world.rank]
        p.replica.backward(cross_entropy(extras[0](p.replica(x, p.world.rank)), y))
        p.replica.step()
        p.own.zero_grad()
        chunks = enumerate(p.chunks(step))
        losses = [cross_entropy(extras[1](p.alone(x, i)), y) for i, (x, y) in chunks]
        (sum(losses) / len(losses)).backward()
        p.own.step()
    for mine, other in zip(extras[0].parameters(), extras[1].parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-9)
    p.check()


def test_two_replicas_as_in_a_gan(world, engines):
    def make():
        torch.manual_seed(3)
        return nn.Linear(4, 12).double(), build()

    def train(generator, judge, steps, backward_of, step_of, chunk_of):
        for step in range(steps):
            real, noise = chunk_of(step)
            fake = generator(noise)
            backward_of("judge", lambda m, r=real, f=fake: _judge_loss(m, r, f.detach()))
            step_of("judge")
            backward_of("generator", lambda m, f=fake: -m(f, 0).mean())
            step_of("generator")

    def _judge_loss(judge, real, fake):
        return (judge(fake, 0) - judge(real, 0)).mean() + judge(real, 0).square().mean()

    generator, judge = make()
    optimizers = {
        "generator": torch.optim.Adam(generator.parameters(), 0.01),
        "judge": torch.optim.SGD(judge.parameters(), 0.05, momentum=0.5),
    }
    replicas = {
        "generator": hpc.distribute(
            world, generator, optimizers["generator"], engine=engines["mpi"]
        ),
        "judge": hpc.distribute(world, judge, optimizers["judge"], engine=engines["mpi"]),
    }

    def data(step, chunk):
        x, _ = batch(step, [3] * world.size)[chunk]
        return x, x[:, :4].contiguous()

    def backward(name, loss):
        if name == "judge":
            replicas["judge"].zero_grad()  # what the generator's loss left in it
        replicas[name].backward(loss(judge))

    train(
        generator, judge, 6, backward, lambda n: replicas[n].step(), lambda s: data(s, world.rank)
    )

    lone_generator, lone_judge = make()
    lone = {
        "generator": torch.optim.Adam(lone_generator.parameters(), 0.01),
        "judge": torch.optim.SGD(lone_judge.parameters(), 0.05, momentum=0.5),
    }
    for step in range(6):
        chunks = [data(step, chunk) for chunk in range(world.size)]
        fakes = [lone_generator(noise) for _, noise in chunks]
        lone["judge"].zero_grad()
        losses = [
            _judge_loss(lone_judge, real, fake.detach())
            for (real, _), fake in zip(chunks, fakes, strict=True)
        ]
        (sum(losses) / len(losses)).backward()
        lone["judge"].step()
        lone["generator"].zero_grad()
        (sum(-lone_judge(fake, 0).mean() for fake in fakes) / len(fakes)).backward()
        lone["generator"].step()
    for mine, other in ((generator, lone_generator), (judge, lone_judge)):
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-9)
    for replica in replicas.values():
        replica.close()


def test_an_exception_in_mid_step_that_is_caught(pair):
    p = pair(optimizer="sgd")
    for step in range(STEPS):
        if step == 3:

            class Burst(Exception):
                pass

            def burst(_gradient):
                raise Burst

            loss = p.loss(step)
            handle = p.model.layers[0].weight.register_hook(burst)
            with pytest.raises(Burst):
                p.replica.backward(loss)
            handle.remove()
            with pytest.raises(ConfigError, match="interrupted by Burst"):
                p.replica.step()
            with pytest.raises(ConfigError, match="zero_grad"):
                p.replica.backward(p.loss(step))
            p.replica.zero_grad()
            continue
        p.replica.backward(p.loss(step))
        p.replica.step()
        p.own.zero_grad()
        p.whole_loss(step).backward()
        p.own.step()
    p.check()


def test_using_the_model_after_it_was_let_go(pair, tmp_path):
    p = pair()
    p.replica.backward(p.loss(0))
    p.replica.step()
    p.replica.close()
    twin = copy.deepcopy(p.model)
    torch.save(p.model.state_dict(), tmp_path / "m.pt")
    loaded = build()
    loaded.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    x, _ = p.chunks(5)[0]
    assert torch.equal(p.model(x, 0), twin(x, 0))
    assert torch.equal(p.model(x, 0), loaded(x, 0))
    size = (tmp_path / "m.pt").stat().st_size
    assert size < 20_000  # the weights, and no arena behind them
    p.whole_loss(0).backward()
    p.own.step()
    p.check()


def test_freezing_between_the_backward_calls_of_a_step(pair):
    p = pair(accumulate=2)
    for step in range(4):
        for part in range(2):
            p.replica.backward(p.loss(2 * step + part))
            p.replica.step()
            if part == 0:
                p.model.layers[0].weight.requires_grad_(False)
        p.model.layers[0].weight.requires_grad_(True)
        p.own.zero_grad()
        (p.whole_loss(2 * step) / 2).backward()
        p.alone.layers[0].weight.requires_grad_(False)
        (p.whole_loss(2 * step + 1) / 2).backward()
        p.alone.layers[0].weight.requires_grad_(True)
        p.own.step()
    p.check()


class _Slope(nn.Module):
    """Its gradient is whatever the loss is multiplied by."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2048, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 512}, {"overlap": True}])
@pytest.mark.parametrize("end", ["backward", "synchronize", "flush"])
def test_an_exchanged_gradient_survives_a_later_no_sync(world, engines, options, end):
    model = _Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"], **options)
    for _ in range(2):
        with torch.no_grad():
            model.weight.zero_()
        replica.backward(model.weight.sum())
        with replica.no_sync():
            replica.backward(10 * model.weight.sum())
        if end == "backward":
            replica.backward(100 * model.weight.sum())
        elif end == "synchronize":
            replica.synchronize()
        total = 111.0 if end == "backward" else 11.0
        if end != "flush":
            assert model.weight.grad.tolist() == [total] * 2048
        assert replica.step(flush=end == "flush")
        assert model.weight.tolist() == [-total] * 2048
    replica.close()


def failing_loss(model, x, y):
    """Its backward pass fails when gradients of the last layer have left already."""
    hidden = model.layers[0](x)
    hidden.register_hook(lambda _gradient: 1 / 0)
    return cross_entropy(model.layers[2](model.layers[1](hidden)), y)


@pytest.mark.parametrize("engine_name", ["mpi", "torch"])
def test_a_caught_exception_leaves_nothing_under_way(world, engines, engine_name):
    model, alone = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    replica = hpc.distribute(
        world, model, optimizer, engine=engines[engine_name], overlap=True, bucket_bytes=256
    )
    for step in range(STEPS):
        chunks = batch(step, [3] * world.size)
        x, y = chunks[world.rank]
        if step in (2, 3, 6):
            with pytest.raises(ZeroDivisionError):
                replica.backward(failing_loss(model, x, y))
            replica.zero_grad()
        replica.backward(cross_entropy(replica(x, 0), y))
        own.zero_grad()
        (sum(cross_entropy(alone(x, 0), y) for x, y in chunks) / world.size).backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine.grad, other.grad, rtol=0, atol=1e-12)
        replica.step()
        own.step()
    replica.close()


@pytest.mark.parametrize("engine_name", ["mpi", "torch"])
def test_an_exception_on_one_rank_is_told_to_the_others(world, engines, engine_name):
    if world.size == 1:
        pytest.skip("there are no others")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = hpc.distribute(
        world, model, optimizer, engine=engines[engine_name], overlap=True, bucket_bytes=256
    )
    x, y = batch(0, [3] * world.size)[world.rank]
    replica.backward(cross_entropy(replica(x, 0), y))
    replica.step()
    if world.rank == 1:
        with pytest.raises(ZeroDivisionError):
            replica.backward(failing_loss(model, x, y))
        replica.zero_grad()
    else:
        with pytest.raises(CollectiveError, match=f"interrupted on 1 of {world.size} ranks"):
            replica.backward(cross_entropy(replica(x, 0), y))
    replica.backward(cross_entropy(replica(x, 0), y))
    assert replica.step()
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    replica.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_a_replicas_state_has_the_weights_and_loads_whole(world, engines, precision, tmp_path):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    engine = engines["mpi"] if world.size > 1 else "auto"
    replica = hpc.distribute(world, model, optimizer, engine=engine, precision=precision)
    assert replica.module is replica.model is model

    def train(steps):
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + world.rank)
            replica.backward(
                replica(torch.randn(5, 6, generator=generator)).float().square().mean()
            )
            replica.step()

    def bits():
        masters = replica.state_dict().get("masters", {}).values()
        return digest([*model.state_dict().values(), *tensors_of(optimizer), *masters])

    train(range(3))
    path = tmp_path / "replica.pt"
    torch.save(replica.state_dict(), path)
    saved = torch.load(path, weights_only=True)
    assert digest(saved["model"].values()) == digest(model.state_dict().values())
    kept = bits()
    replica.load_state_dict(replica.state_dict())  # its own, by reference
    assert bits() == kept
    train(range(3, 6))
    went_on = bits()
    replica.load_state_dict(saved)
    assert bits() == kept
    train(range(3, 6))
    assert bits() == went_on
    with pytest.raises(RuntimeError, match="Missing key"):
        replica.load_state_dict({**saved, "model": {"0.weight": saved["model"]["0.weight"]}})
    replica.close()


def test_a_models_state_is_refused_by_a_replica(pair):
    p = pair(optimizer="sgd")
    before = digest(p.model.state_dict().values())
    with pytest.raises(ConfigError, match=r"goes to replica\.model\.load_state_dict"):
        p.replica.load_state_dict(p.model.state_dict())
    with pytest.raises(ConfigError, match="it has nothing"):
        p.replica.load_state_dict({})
    assert digest(p.model.state_dict().values()) == before
