"""Data that run dry, empty batches, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.replica.equal_ranks import digest
from mpi_tests.ranks.pair import STEPS, Pair, build


@pytest.mark.parametrize("stepped_by", ["replica", "optimizer"])
@pytest.mark.parametrize("with_counts", [True, False])
def test_join_neither_hangs_nor_shrinks_gradients(world, engines, with_counts, stepped_by):
    p = Pair(world, engines["mpi"], optimizer="adamw")
    schedule = torch.optim.lr_scheduler.ExponentialLR(p.optimizer, 0.9)
    own_schedule = torch.optim.lr_scheduler.ExponentialLR(p.own, 0.9)
    mine = 3 + 2 * p.world.rank
    with p.replica.join():
        for step in range(mine):
            p.optimizer.zero_grad()
            p.replica.backward(p.loss(step), num_samples=3 if with_counts else None)
            getattr(p, stepped_by).step()
            schedule.step()
    assert p.replica.num_steps == 3 + 2 * (world.size - 1)
    for step in range(3 + 2 * (world.size - 1)):
        chunks = [c for i, c in enumerate(p.chunks(step)) if step < 3 + 2 * i]
        first = world.size - len(chunks)
        losses = [cross_entropy(p.alone(x, first + i), y) for i, (x, y) in enumerate(chunks)]
        p.own.zero_grad()
        (sum(losses) / len(losses)).backward()
        p.own.step()
        own_schedule.step()
    assert p.optimizer.param_groups[0]["lr"] == p.own.param_groups[0]["lr"]
    p.check()


def test_an_empty_batch_takes_part_with_nothing(pair):
    p = pair(optimizer="adamw")
    for step in range(STEPS):
        empty = p.world.size > 1 and step % p.world.size == p.world.rank
        x, y = p.chunks(step)[p.world.rank]
        count = 0 if empty else len(y)
        loss = cross_entropy(p.replica(x[:count], p.world.rank), y[:count])
        p.replica.backward(loss, num_samples=count)
        p.replica.step()
        p.own.zero_grad()
        skipped = step % p.world.size if p.world.size > 1 else -1
        kept = [(i, c) for i, c in enumerate(p.chunks(step)) if i != skipped]
        losses = [cross_entropy(p.alone(x, i), y) for i, (x, y) in kept]
        (sum(losses) / len(losses)).backward()
        p.own.step()
    p.check()


def test_no_samples_anywhere_moves_nothing(pair):
    p = pair()
    before = digest(p.model.parameters())
    p.replica.backward(torch.zeros(()), num_samples=0)
    assert p.replica.step().reason == "no samples"
    assert p.replica.step().reason == "no gradients"
    assert digest(p.model.parameters()) == before
    p.check()


# Refused by name


def test_a_plain_backward_after_one_of_the_replicas_own_is_refused_by_name(pair):
    p = pair()
    p.replica.backward(p.loss(1))
    p.loss(2).backward()
    with pytest.raises(ConfigError, match=r"layers\.\d\.(weight|bias)"):
        p.replica.step()
    p.replica.close()


def test_a_head_that_is_replaced_becomes_rank_zeros(world, engines):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    groups = [{"params": list(layer.parameters())} for layer in model]
    optimizer = torch.optim.SGD(groups, 0.1)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    replica.backward(replica(torch.ones(2, 4).double()).mean())
    replica.step()
    torch.manual_seed(world.rank)
    model[1] = nn.Linear(4, 1).double()
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    for step in range(3):
        x = torch.full((2, 4), 1.0 + step + world.rank).double()
        replica.backward(replica(x).square().mean())
        assert replica.step()
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    replica.close()


@pytest.mark.parametrize("edit", ["clip", "zero", "none"])
def test_changing_gradients_in_the_middle_of_a_window_is_refused(pair, edit):
    p = pair(accumulate=2)
    p.replica.backward(p.loss(0))
    if edit == "clip":
        nn.utils.clip_grad_norm_(p.model.parameters(), 1e-3)
    else:
        p.optimizer.zero_grad(set_to_none=edit == "none")
    with pytest.raises(ConfigError, match="between backward calls 1 and 2"):
        p.replica.backward(p.loss(1))
    p.replica.close()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, loss: r.backward(loss.expand(3)), "reduce it to one number"),
        (lambda r, loss: r.backward(loss, num_samples=-1), "must not be negative"),
    ],
)
def test_wrong_arguments_of_backward(pair, call, message):
    p = pair()
    with pytest.raises(ConfigError, match=message):
        call(p.replica, p.loss(0))
    p.replica.close()


def test_combinations_that_cannot_be(pair, world, engines):
    p = pair(accumulate=2)
    with (
        pytest.raises(ConfigError, match="both control when to exchange"),
        p.replica.no_sync(),
    ):
        pass
    p.replica.backward(p.loss(0), num_samples=3)
    with pytest.raises(ConfigError, match="to all of them or to none"):
        p.replica.backward(p.loss(1))
    p.replica.backward(p.loss(1), num_samples=3)
    with pytest.raises(ConfigError, match="without a step"):
        p.replica.backward(p.loss(2), num_samples=3)
    p.replica.close()
    model = build()
    with pytest.raises(ConfigError, match="cannot be distributed"):
        hpc.distribute(
            world, model, torch.optim.SparseAdam(model.parameters()), engine=engines["mpi"]
        )
    for options, word in (
        ({"accumulate": 0}, "accumulate=0"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
    ):
        with pytest.raises(ConfigError, match=word):
            hpc.distribute(
                world,
                model,
                torch.optim.SGD(model.parameters(), 0.1),
                engine=engines["mpi"],
                **options,
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_large_counts_overflow_nothing_in_half_precision(world, engines, dtype, accumulate):
    torch.manual_seed(5)
    model = nn.Linear(4, 1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    options = {"engine": engines["mpi"], "accumulate": accumulate}
    replica = hpc.distribute(world, model, optimizer, **options)
    for step in range(3):
        x = torch.full((2, 4), 3.0 + step, dtype=dtype)
        alone = torch.autograd.grad((model(x) - 50).square().mean(), model.weight)[0]
        for _ in range(accumulate):
            replica.backward((replica(x) - 50).square().mean(), num_samples=70_000)
        assert torch.allclose(model.weight.grad, alone, rtol=0.02)
        assert replica.step()
    replica.close()
