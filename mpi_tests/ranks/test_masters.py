"""`bf16-pure`: weights in bfloat16, masters and optimizer state in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.replica.equal_ranks import digest
from mpi_tests.models import OPTIMIZERS, ConvBatchNorm, Mlp, batch


def distribute(world, engines, model, optimizer, **options):
    return hpc.distribute(
        world, model, optimizer, engine=engines["mpi"], precision="bf16-pure", **options
    )


def build(kind=Mlp):
    torch.manual_seed(5)
    return kind()


def train(world, replica, steps):
    for step in range(steps):
        x, y = batch(step, [4] * world.size)[world.rank]
        loss = nn.functional.cross_entropy(replica(x.float(), world.rank), y)
        replica.backward(loss)
        assert replica.step()


def train_by_hand(model, optimizer_of, size, steps):
    """One process: float32 copies, updated with gradients that a bfloat16 model gives."""
    half = copy.deepcopy(model).bfloat16()
    masters = copy.deepcopy(model)
    optimizer = optimizer_of(masters)
    for step in range(steps):
        half.zero_grad()
        for rank, (x, y) in enumerate(batch(step, [4] * size)):
            logits = half(x.bfloat16(), rank).float()
            (nn.functional.cross_entropy(logits, y) / size).backward()
        for master, weight in zip(masters.parameters(), half.parameters(), strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters.parameters(), half.parameters(), strict=True):
                weight.copy_(master)
    return masters, optimizer


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd"])
def test_equal_to_masters_kept_by_hand(world, engines, name):
    model = build()
    replica = distribute(world, engines, model, OPTIMIZERS[name](model))
    masters, optimizer = train_by_hand(build(), OPTIMIZERS[name], world.size, 10)
    train(world, replica, 10)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    saved = replica.state_dict()
    assert saved["masters"].keys() == dict(model.named_parameters()).keys()
    # Sums of n bfloat16 gradients round n times, which an adaptive step magnifies: alone, no bit
    # may differ.
    tolerance = 0.0 if world.size == 1 else 0.03
    for key, master in masters.named_parameters():
        assert saved["masters"][key].dtype == torch.float32
        assert torch.allclose(saved["masters"][key], master, rtol=0, atol=tolerance), key
    rounded = [master.bfloat16() for master in saved["masters"].values()]
    assert digest(rounded) == digest(model.parameters())
    moments = [v for state in replica.optimizer.state.values() for v in state.values()]
    kinds = {v.dtype for v in moments if torch.is_tensor(v)}
    assert kinds == {torch.float32}
    assert len(optimizer.state) == len(replica.optimizer.state)
    everyone = world.comm.allgather(digest([*model.parameters(), *saved["masters"].values()]))
    assert len(set(everyone)) == 1
    replica.close()


def test_updates_too_small_for_bfloat16_are_not_lost(world, engines):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4))
    replica = distribute(world, engines, model, torch.optim.SGD(model.parameters(), lr=0.001))
    for _ in range(20):
        replica.backward(model.weight.float().sum())  # 1 - 0.001 is 1 in bfloat16
        replica.step()
    assert torch.allclose(replica.state_dict()["masters"]["weight"], torch.tensor(0.98), atol=1e-5)
    assert model.weight.tolist() == [torch.tensor(0.98).bfloat16().item()] * 4
    replica.close()


def test_weights_edited_after_a_step_are_taken(world, engines):
    model = build()
    replica = distribute(world, engines, model, OPTIMIZERS["adamw"](model))
    train(world, replica, 2)
    with torch.no_grad():
        model.layers[0].weight.mul_(0.5)
    edited = model.layers[0].weight.detach().float().clone()
    masters = replica.state_dict()["masters"]
    assert torch.equal(masters["layers.0.weight"], edited)
    train(world, replica, 2)
    with replica.full_precision():
        assert model.layers[0].weight.dtype == torch.float32
        with torch.no_grad():
            model.layers[2].bias.fill_(1 / 3)
    assert model.layers[2].bias.tolist() == [torch.tensor(1 / 3).bfloat16().item()] * 4
    assert (
        replica.state_dict()["masters"]["layers.2.bias"].tolist()
        == [torch.tensor(1 / 3).item()] * 4
    )
    train(world, replica, 2)
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    replica.close()


def test_running_statistics_and_their_module_stay_float32(world, engines):
    model = build(ConvBatchNorm)
    replica = distribute(world, engines, model, OPTIMIZERS["sgd"](model))
    train(world, replica, 3)
    assert {t.dtype for t in model.norm.state_dict().values()} == {torch.float32, torch.int64}
    assert model.conv.weight.dtype == torch.bfloat16
    assert replica.state_dict()["masters"].keys() == {"conv.weight", "out.weight", "out.bias"}
    replica.close()


def test_parameters_added_later_have_masters_too(world, engines):
    model = build()
    optimizer = OPTIMIZERS["sgd"](model)
    replica = distribute(world, engines, model, optimizer)
    train(world, replica, 2)
    before = {key: value.clone() for key, value in replica.state_dict()["masters"].items()}
    torch.manual_seed(world.rank)
    model.layers.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": model.layers[3].parameters(), "lr": 0.1})
    x, _ = batch(0, [4] * world.size)[world.rank]
    replica(x.float(), world.rank)  # lays out anew: the new weights become rank 0's
    masters = replica.state_dict()["masters"]
    assert all(torch.equal(masters[key], value) for key, value in before.items())
    assert "layers.3.weight" in masters
    train(world, replica, 2)
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    replica.close()


def test_masters_are_each_ranks_own(world, engines):
    if world.size == 1:
        pytest.skip("one rank's share is everything")
    model = build()
    with pytest.raises(ConfigError, match='update="sharded" is not possible'):
        distribute(world, engines, model, OPTIMIZERS["adamw"](model), update="sharded")


def test_the_users_optimizer_steps_and_loads_with_masters(world, engines):
    model = build()
    optimizer = OPTIMIZERS["adamw"](model)
    replica = distribute(world, engines, model, optimizer)
    train(world, replica, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moments = [v for state in optimizer.state.values() for v in state.values()]
    assert {v.dtype for v in moments if torch.is_tensor(v)} == {torch.float32}
    x, y = batch(9, [4] * world.size)[world.rank]
    replica.backward(nn.functional.cross_entropy(replica(x.float(), 0), y))
    optimizer.step()  # nothing is scaled or clipped: it may
    optimizer.zero_grad()
    masters = replica.state_dict()["masters"].values()
    assert digest(m.bfloat16() for m in masters) == digest(model.parameters())
    train(world, replica, 1)
    replica.close()


def test_ranks_that_run_dry_get_the_others_masters(world, engines):
    model = build()
    replica = distribute(world, engines, model, OPTIMIZERS["adamw"](model))
    with replica.join():
        train(world, replica, 2 + world.rank)
    masters = replica.state_dict()["masters"].values()
    assert len(set(world.comm.allgather(digest([*masters, *model.parameters()])))) == 1
    train(world, replica, 1)
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    replica.close()


def test_writing_the_same_bits_leaves_the_masters_alone(world, engines):
    model = build()
    replica = distribute(world, engines, model, OPTIMIZERS["sgd"](model))
    train(world, replica, 2)
    before = {name: value.clone() for name, value in replica.state_dict()["masters"].items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.clone())  # as after an evaluation with other weights
        model.layers[0].bias[0] = 0.5
    after = replica.state_dict()["masters"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"layers.0.bias"}
    assert after["layers.0.bias"][0] == 0.5
    assert torch.equal(after["layers.0.bias"][1:], before["layers.0.bias"][1:])
    replica.close()


def dtypes(model):
    return {p.dtype for p in model.parameters()}


def test_full_precision_inside_full_precision(world, engines):
    model = build()
    optimizer = OPTIMIZERS["adamw"](model)
    replica = distribute(world, engines, model, optimizer)
    train(world, replica, 1)
    x, y = batch(1, [4] * world.size)[world.rank]
    replica.backward(nn.functional.cross_entropy(replica(x.float(), world.rank), y))
    with replica.full_precision():
        with replica.full_precision():
            assert dtypes(model) == {torch.float32}
        assert dtypes(model) == {torch.float32}
        replica.load_state_dict(copy.deepcopy(replica.state_dict()))
        assert dtypes(model) == {torch.float32}
        assert replica.step()
        assert dtypes(model) == {torch.float32}
        masters = [p.detach().clone() for p in model.parameters()]
    assert dtypes(model) == {torch.bfloat16}
    assert digest(masters) == digest(replica.state_dict()["masters"].values())
    with pytest.raises(KeyError), replica.full_precision(), replica.full_precision():
        raise KeyError
    assert dtypes(model) == {torch.bfloat16}
    train(world, replica, 1)
    replica.close()


def test_a_failed_load_or_step_leaves_bfloat16(world, engines):
    model = build()
    optimizer = OPTIMIZERS["adamw"](model)
    replica = distribute(world, engines, model, optimizer)
    train(world, replica, 2)
    masters = digest(replica.state_dict()["masters"].values())
    bad = replica.state_dict()
    bad["param_groups"] = []
    with pytest.raises(ValueError, match="different number of parameter groups"):
        replica.load_state_dict(bad)
    assert dtypes(model) == {torch.bfloat16}
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(bad)
    x, _ = batch(1, [4] * world.size)[world.rank]
    replica(x.float(), world.rank)  # by now at the latest
    assert dtypes(model) == {torch.bfloat16}
    assert digest(replica.state_dict()["masters"].values()) == masters
    with pytest.raises(ConfigError, match=r"optimizer\.step\(closure\) would run the model"):
        optimizer.step(lambda: None)
    assert dtypes(model) == {torch.bfloat16}

    def run_the_model(*_):
        replica(x.float(), world.rank)

    hook = optimizer.register_step_pre_hook(run_the_model)
    replica.backward(replica(x.float(), world.rank).sum())
    # Ours, unless the optimizer itself has met bfloat16 weights before.
    with pytest.raises((ConfigError, RuntimeError), match=r"inside the optimizer's|BFloat16"):
        replica.step()
    hook.remove()
    replica.zero_grad()
    train(world, replica, 1)
    replica.close()
