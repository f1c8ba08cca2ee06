"""What users do around a divided update: to weights, gradients and the optimizer's state."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hpctrain.errors import ConfigError
from mpi_tests.ranks.split import (
    FEATURES,
    Matrices,
    Twins,
    check_states,
    chunk,
    groups,
    tensors_of,
    twins,
)

pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")


def adamw(model):
    return optim.AdamW(groups(model))


def momentum(model):
    return optim.SGD(groups(model), lr=0.1, momentum=0.9)


@pytest.fixture
def pair(world, engines):
    def make(optimizer=adamw, **options):
        return twins(world, engines["mpi"], optimizer, **options)

    return make


def test_schedules_and_frozen_parameters(pair):
    with pair() as t:
        schedules = [optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=8) for _, o in t.both]
        for step in range(6):
            for model, _ in t.both:
                model.first.weight.requires_grad_(not 1 <= step < 3)
            t.step(step)
            for schedule in schedules:
                schedule.step()


def test_a_group_added_in_mid_run(pair):
    with pair() as t:
        extras = []
        t.train(2)
        for model, optimizer in t.both:
            torch.manual_seed(3)
            extra = nn.Parameter(torch.randn(FEATURES, FEATURES).double())
            optimizer.add_param_group({"params": [extra], "lr": 0.1})
            model.register_forward_pre_hook(lambda _, x, extra=extra: (x[0] @ extra, x[1]))
            extras.append(extra)
        t.train(3, start=2)
        assert torch.allclose(*extras, rtol=0, atol=1e-9)


def test_a_group_added_between_backward_and_step_is_refused(world, engines):
    t = Twins(world, engines["mpi"], adamw, model=Matrices)
    t.backward(0)
    t.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    if t.size > 1:
        with pytest.raises(ConfigError, match="changed between backward and step"):
            t.replica.step()
    t.replica.close()


def test_state_on_one_rank_alone(pair):
    with pair() as t:
        t.train(3)
        if t.world.rank == t.size - 1:  # nobody else takes part
            check_states(t.optimizer.state_dict(), t.own.state_dict())
            saved = io.BytesIO()
            torch.save(t.optimizer.state_dict(), saved)
        t.train(1, start=3)


def test_loading_in_mid_run_and_from_one_process(pair):
    with pair() as t:
        t.train(2)
        kept = [copy.deepcopy(x.state_dict()) for x in (t.alone, t.own)]
        t.train(2, start=2)
        for model, optimizer in t.both:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(copy.deepcopy(kept[1]))
        t.train(3, start=2)


def scaled(state, key):
    state[key].mul_(0.5)


def by_data(state, key):
    state[key].data.mul_(0.5)


def by_numpy(state, key):
    state[key].numpy()[:] *= 0.5


def replaced(state, key):
    state[key] = state[key] * 0.5


def removed(state, key):
    state[key] = None


@pytest.mark.parametrize("edit", [scaled, by_data, by_numpy, replaced, removed])
def test_editing_the_state(pair, edit):
    with pair(momentum, model=Matrices) as t:
        t.train(2)
        for model, optimizer in t.both:
            edit(optimizer.state[model.first.weight], "momentum_buffer")
        t.train(2, start=2)


def test_clearing_the_state(pair):
    with pair() as t:
        t.train(2)
        for _, optimizer in t.both:
            optimizer.state.clear()
        t.train(1, start=2)
        for model, optimizer in t.both:  # one that the next step does not use
            optimizer.state.pop(model.odd.weight, None)
            optimizer.state.pop(model.even.weight, None)
            assert model.odd.weight not in optimizer.state
        t.step(4)
        assert t.model.odd.weight not in t.optimizer.state
        t.step(5)


def test_state_given_before_the_first_step(pair):
    with pair(momentum, model=Matrices) as t:
        for model, optimizer in t.both:
            for p in model.parameters():
                optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
        t.train(2)


def test_momentum_that_is_switched_on(pair):
    def half(model):
        first, *rest = model.parameters()
        return optim.SGD([{"params": first, "momentum": 0.0}, {"params": rest}], 0.1, momentum=0.9)

    with pair(half, model=Matrices) as t:
        t.train(2)
        for _, optimizer in t.both:
            optimizer.param_groups[0]["momentum"] = 0.5
        t.train(3, start=2)
        for _, optimizer in t.both:
            optimizer.param_groups[1]["momentum"] = 0.0
        t.train(2, start=5)


def test_weights_changed_by_hand(pair):
    with pair() as t:
        for step in range(4):
            t.step(step)
            for model, _ in t.both:
                for p in model.parameters():
                    if not p.is_complex():
                        p.data.clamp_(-0.2, 0.2)  # as in a WGAN


def test_other_memory_for_weights(pair):
    with pair() as t:
        t.train(2)
        for model, _ in t.both:
            model.first.weight.data = model.first.weight.data.clone()
            model.turned.data = model.turned.data.contiguous()  # in another order
        t.train(1, start=2)
        t.backward(3)
        for model, _ in t.both:
            model.even.weight.data = model.even.weight.data.clone()
            model.odd.weight.data = model.odd.weight.data.t().contiguous().t()
        assert t.replica.step()
        t.own.step()
        t.train(2, start=4)


def norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clamp(model):
    for p in model.parameters():
        if p.grad is not None and not p.is_complex():
            p.grad.data.clamp_(-1e-3, 1e-3)


def swap(model):
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad * 2


def one_row(model):
    model.first.weight.grad.numpy()[3] = 0


@pytest.mark.parametrize("edit", [norm, clamp, swap, one_row])
def test_editing_gradients(pair, edit):
    with pair() as t:
        for step in range(5):
            t.backward(step)
            if step in (1, 3):  # at others the sum must be seen again
                edit(t.model)
                edit(t.alone)
            for mine, other in zip(t.model.parameters(), t.alone.parameters(), strict=True):
                assert (mine.grad is None) == (other.grad is None)
                if mine.grad is not None:
                    assert torch.allclose(mine.grad, other.grad, rtol=0, atol=1e-12)
            assert t.replica.step()
            t.own.step()


def test_steps_by_the_optimizer_itself_and_twice(pair):
    with pair() as t:
        for step in range(3):
            t.optimizer.zero_grad()
            t.backward(step)
            for _, optimizer in t.both:
                for _ in range(5):
                    optimizer.step()


def test_hooks_around_the_step_run_as_around_torchs_own(pair):
    seen = []

    def halve(optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def look(optimizer, *_):
        seen.append(sum(p.grad is not None for p in optimizer.param_groups[0]["params"]))

    def with_hook(model):
        made = adamw(model)
        made.register_step_post_hook(look)
        return made

    with pair(with_hook) as t:
        t.train(1)
        for _, optimizer in t.both:
            optimizer.register_step_pre_hook(halve)
        t.train(3, start=1)
        assert len(seen) == 8
        assert seen[0::2] == seen[1::2]
        t.backward(5)
        if t.size > 1:
            late = t.optimizer.register_step_pre_hook(halve)
            with pytest.raises(ConfigError, match="register it before backward"):
                t.optimizer.step()
            late.remove()


def test_hooks_of_all_optimizers_run_once_a_step(pair):
    seen = []
    before = register_optimizer_step_pre_hook(lambda o, *_: seen.append(("before", id(o))))
    after = register_optimizer_step_post_hook(lambda o, *_: seen.append(("after", id(o))))
    try:
        with pair(model=Matrices) as t:
            t.train(2)
    finally:
        before.remove()
        after.remove()
    one, other = id(t.optimizer), id(t.own)
    assert seen == [(when, o) for o in (one, other) for when in ("before", "after")] * 2


def test_a_closure_of_a_class_of_ones_own_is_refused_and_none_is_none(pair):
    class Mine(optim.Adam):
        shards_by = "element"

    with pair(lambda model: Mine(model.parameters())) as t:
        t.train(1)
        t.backward(1)
        if t.size > 1:
            with pytest.raises(ConfigError, match=r"Mine\.step\(closure\).*replicated"):
                t.optimizer.step(lambda: None)
        t.optimizer.step(None)
        t.own.step(closure=None)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_around_it(pair, fused):
    def scaled_adam(model):
        return optim.Adam(model.parameters(), fused=fused)

    with pair(scaled_adam, model=Matrices) as t:
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in "ab"]
        for step in range(4):
            factor = float("inf") if step == 2 else 1.0
            for _, optimizer in t.both:
                optimizer.zero_grad()
            loss = t.replica(chunk(step, t.world.rank), 0).square().mean() * factor
            t.replica.backward(scalers[0].scale(loss))
            losses = [t.alone(chunk(step, r), 0).square().mean() for r in range(t.size)]
            scalers[1].scale(sum(losses) * factor / t.size).backward()
            for scaler, (_, optimizer) in zip(scalers, t.both, strict=True):
                scaler.step(optimizer)
                scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()


def test_join_and_on(pair):
    with pair(model=Matrices) as t:
        t.train(2)
        with t.replica.join():
            for step in range(2):
                t.step(step)
        t.train(2, start=2)


def test_saving_writes_no_more_than_its_bytes(world, engines):
    t = Twins(world, engines["mpi"], adamw)
    t.train(1)

    def size(thing):
        file = io.BytesIO()
        torch.save(thing, file)
        return file.tell()

    weight = t.model.first.weight
    num_bytes = weight.numel() * weight.element_size()
    state = t.optimizer.state[weight]
    everything = sum(v.numel() * v.element_size() for v in tensors_of(t.optimizer))
    if t.size > 1:  # alone, gradients are views of one buffer
        assert size(weight.grad) < num_bytes + 4096
    assert size(state["exp_avg"]) < num_bytes + 4096
    assert size(t.model.first) < num_bytes + 8192
    assert size(t.optimizer.state_dict()) < everything + 40_000
    assert len(copy.deepcopy(state["exp_avg"]).untyped_storage()) == num_bytes
    t.replica.close()


def test_everything_is_there_after_the_block(world, engines):
    t = Twins(world, engines["mpi"], adamw)
    t.train(2)
    t.replica.close()
    before = t.model.first.weight.grad.clone()
    check_states(t.optimizer.state_dict(), t.own.state_dict())
    for step in range(2, 4):  # on one's own
        for model, optimizer in t.both:
            optimizer.zero_grad()
            sum(model(chunk(step, rank), step).square().mean() for rank in range(2)).backward()
            optimizer.step()
    assert not torch.equal(before, t.model.first.weight.grad)
    check_states(t.optimizer.state_dict(), t.own.state_dict())
