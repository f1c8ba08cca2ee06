"""How gradients travel: exact counts, overlap with backward, activation checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.replica.equal_ranks import digest
from mpi_tests.built import BUILT
from mpi_tests.models import MODELS, batch
from mpi_tests.ranks.pair import STEPS, Pair


def test_messages_and_hooks_are_exact(pair):
    p = pair(optimizer="sgd", overlap=False)
    for step in range(3):
        p.replica.backward(p.loss(step))
        p.replica.step()
    before = p.replica.counts()
    for step in range(10):
        p.replica.backward(p.loss(step))
        p.replica.step()
    after = p.replica.counts()
    # one bucket, one dtype, nothing else; and nothing at all where there is nobody to send to
    assert after["messages"] - before["messages"] == (10 if p.world.size > 1 else 0)
    assert after["hooks"] == before["hooks"] == 0
    p.replica.close()


@pytest.mark.parametrize("model_name", ["mlp", "branches", "complex"])
@pytest.mark.parametrize("engine_name", ["mpi", "torch"])
def test_overlap_sends_buckets_while_backward_runs(world, engines, engine_name, model_name):
    engine = engines[engine_name]
    p = Pair(world, engine, model=model_name, overlap=True, bucket_bytes=600)
    num_buckets = len(p.replica._exchange.mode.arena.buckets)
    assert num_buckets > 1
    for step in range(STEPS):
        before = p.replica.counts()
        p.replica.backward(p.loss(step))
        p.replica.step()
        after = p.replica.counts()
        assert after["messages"] - before["messages"] == num_buckets
        assert after["hooks"] - before["hooks"] <= num_buckets  # one per bucket at most
        p.own.zero_grad()
        p.whole_loss(step).backward()
        p.own.step()
    p.check()


class Shuffled(nn.Module):
    """Layers that are not used in the order in which they are registered."""

    ORDER = (1, 3, 0, 2)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.out = nn.Linear(12, 4)

    def forward(self, x, chunk):
        for place in self.ORDER:
            x = torch.tanh(self.layers[place](x))
        return self.out(x)


@pytest.mark.parametrize("engine_name", BUILT)
def test_buckets_follow_the_order_of_use_from_the_second_step_on(
    world, engines, engine_name, monkeypatch
):
    monkeypatch.setitem(MODELS, "shuffled", Shuffled)
    digests = []
    for _ in range(2):
        p = Pair(world, engines[engine_name], model="shuffled", overlap=True, bucket_bytes=1200)
        backwards = p.replica._exchange.mode.arena.buckets
        for step in range(STEPS):
            before = p.replica.counts()
            p.replica.backward(p.loss(step))
            p.replica.step()
            after = p.replica.counts()
            arena = p.replica._exchange.mode.arena
            assert after["messages"] - before["messages"] == len(arena.buckets)
            p.own.zero_grad()
            p.whole_loss(step).backward()
            p.own.step()
            digests.append(digest(p.model.parameters()))
        weights = [arena.names[i] for b in arena.buckets for i in b.members]
        used = [name for name in weights if name.startswith("layers") and "weight" in name]
        wanted = sorted(range(4), reverse=True) if world.size == 1 else reversed(Shuffled.ORDER)
        assert used == [f"layers.{place}.weight" for place in wanted]
        assert (arena.buckets == backwards) == (world.size == 1)
        hooks = [len(q._post_accumulate_grad_hooks) for q in p.model.parameters()]
        assert max(hooks) <= 2  # the arena's own and, once per bucket, the one that sends
        p.check()
    if engine_name == "mpi":
        assert digests[:STEPS] == digests[STEPS:]  # two runs are bit-identical


def test_an_order_that_is_right_already_lays_nothing_out_anew(world, engines):
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replica = hpc.distribute(
        world, model, optimizer, engine=engines["mpi"], overlap=True, bucket_bytes=8
    )
    arena = replica._exchange.mode.arena
    assert len(arena.buckets) == 4
    for _ in range(3):
        replica.backward(replica(torch.ones(2, 8).double()).mean())
        assert replica.step()
        assert replica._exchange.mode.arena is arena
    replica.close()


class Checkpointed(nn.Module):
    """One layer in two activation checkpoints."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.out = nn.Linear(12, 12).double(), nn.Linear(12, 4).double()
        self.reentrant = reentrant

    def forward(self, x, chunk):
        from torch.utils.checkpoint import checkpoint

        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda v: torch.tanh(self.layer(v)), x, use_reentrant=self.reentrant)
        return self.out(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_activation_checkpoints(world, engines, reentrant, overlap):
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(Checkpointed(reentrant))
    model, alone = models
    optimizer, own = (torch.optim.SGD(m.parameters(), 0.1) for m in models)
    engine = engines["mpi"]
    replica = hpc.distribute(
        world, model, optimizer, engine=engine, overlap=overlap, bucket_bytes=8
    )
    for step in range(4):
        chunks = batch(step, [3] * world.size)
        x, y = chunks[world.rank]
        loss = cross_entropy(replica(x, 0), y)
        if reentrant and overlap:
            with pytest.raises(ConfigError, match="pass overlap=False"):
                replica.backward(loss)
            break
        replica.backward(loss)
        replica.step()
        own.zero_grad()
        losses = [cross_entropy(alone(x, 0), y) for x, y in chunks]
        (sum(losses) / len(losses)).backward()
        own.step()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine, other, rtol=0, atol=1e-9)
    replica.close()


def test_overlap_with_accumulation(world, engines):
    p = Pair(world, engines["mpi"], overlap=True, bucket_bytes=600, accumulate=2)
    for step in range(STEPS):
        for part in range(2):
            p.replica.backward(p.loss(2 * step + part))
            p.replica.step()
        p.own.zero_grad()
        ((p.whole_loss(2 * step) + p.whole_loss(2 * step + 1)) / 2).backward()
        p.own.step()
    p.check()


def test_describe_says_what_was_chosen(pair):
    p = pair()
    text = p.replica.describe()
    assert "mpi" in text
    assert ("1 a step" if p.world.size > 1 else "exchanges nothing") in text
    assert "AdamW" in text
    shares = p.replica.engine.capabilities.shares_memory and p.world.size > 1
    assert not shares or "node: several ranks of a node share memory" in text
    p.replica.close()
