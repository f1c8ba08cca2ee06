"""Loops that know only torch: `model(x)`, `loss.backward()`, `optimizer.step()`, equal to one."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.replica import HorovodTraining
from hpctrain.replica.equal_ranks import digest
from mpi_tests.built import BUILT
from mpi_tests.models import MODELS, OPTIMIZERS, SparseEmbedding, batch
from mpi_tests.ranks.pair import STEPS, build

WAYS = {
    "node": ("mpi", {}),
    "node-replicated": ("mpi", {"update": "replicated"}),
    "node-shared-weights": ("mpi", {"update": "sharded", "share_parameters": True}),
    "arena": ("mpi", {"bucket_bytes": 512}),
    "arena-overlap": ("mpi", {"bucket_bytes": 512, "overlap": True}),
    "torch": ("torch", {}),
    "horovod-arena": ("horovod", {}),
    "horovod": ("horovod", {"horovod": HorovodTraining(fusion="horovod")}),
}


@pytest.fixture(params=[way for way, (engine, _) in WAYS.items() if engine in BUILT])
def plain(request, world, engines):
    """The same training twice, as `Pair` is, without a word to the replica in its loop."""
    name, options = WAYS[request.param]
    if world.size == 1 and options.get("share_parameters"):
        pytest.skip("one rank shares its weights with nobody")
    made = []

    def make(model="mlp", optimizer="adamw", **more):
        both = _Plain(world, engines[name], model, optimizer, options | more)
        made.append(both)
        return both

    yield make
    world.shares.forget()
    for both in made:
        both.replica.close()


class _Plain:
    def __init__(self, world, engine, model, optimizer, options):
        self.world = world
        kinds = MODELS | {"sparse": SparseEmbedding}
        torch.manual_seed(5)
        self.model = kinds[model]().double()
        torch.manual_seed(5)
        self.alone = kinds[model]().double()
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        self.optimizer, self.own = make(self.model), make(self.alone)
        self.replica = hpc.distribute(world, self.model, self.optimizer, engine=engine, **options)

    def loss(self, step):
        x, y = batch(step, [3] * self.world.size)[self.world.rank]
        return cross_entropy(self.model(x, self.world.rank), y)

    def whole(self, step):
        chunks = batch(step, [3] * self.world.size)
        return sum(cross_entropy(self.alone(x, i), y) for i, (x, y) in enumerate(chunks)) / len(
            chunks
        )

    def check(self, atol=1e-9):
        for (name, mine), other in zip(
            self.model.named_parameters(), self.alone.parameters(), strict=True
        ):
            assert torch.allclose(mine, other, rtol=0, atol=atol), name
        digests = self.world.comm.allgather(digest(self.model.parameters()))
        assert len(set(digests)) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
@pytest.mark.parametrize("model", ["mlp", "tied", "branches", "conv-batchnorm"])
def test_a_foreign_loop_needs_no_more_than_distribute(plain, model, optimizer):
    p = plain(model, optimizer)
    for step in range(STEPS):
        p.optimizer.zero_grad()
        p.loss(step).backward()
        nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
        p.optimizer.step()
        p.own.zero_grad()
        p.whole(step).backward()
        nn.utils.clip_grad_norm_(p.alone.parameters(), 0.1)
        p.own.step()
    p.check()
    assert p.replica.num_steps == STEPS
    assert not p.replica.is_mid_step


def test_gradients_are_averages_when_backward_returns(plain):
    p = plain()
    p.loss(0).backward()
    p.whole(0).backward()
    for mine, other in zip(p.model.parameters(), p.alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up_as_in_torch(plain, set_to_none, capsys):
    p = plain(optimizer="sgd")
    for step in range(STEPS):
        for optimizer, loss in ((p.optimizer, p.loss), (p.own, p.whole)):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in range(3):
                loss(3 * step + part).backward()
            optimizer.step()
    p.check()
    said = capsys.readouterr()
    if p.world.rank == 0:
        assert (said.out + said.err).count("no_sync") == 1


def test_no_sync_collects_and_exchanges_once(plain):
    p = plain(optimizer="sgd")
    for step in range(STEPS):
        p.optimizer.zero_grad()
        before = p.replica.counts()["messages"]
        with p.replica.no_sync():
            p.loss(3 * step).backward()
            p.loss(3 * step + 1).backward()
        assert p.replica.counts()["messages"] == before
        with pytest.raises(ConfigError, match=r"never exchanged.*no_sync"):
            p.optimizer.step()
        p.loss(3 * step + 2).backward()
        p.optimizer.step()
        p.own.zero_grad()
        for part in range(3):
            p.whole(3 * step + part).backward()
        p.own.step()
    p.check()


def test_steps_without_zero_grad(plain):
    p = plain(optimizer="sgd")
    for step in range(STEPS):
        for optimizer, loss in ((p.optimizer, p.loss), (p.own, p.whole)):
            loss(step).backward()
            optimizer.step()
    p.check()


def test_replica_step_after_a_plain_backward_begins_anew(plain):
    p = plain()
    for step in range(STEPS):
        p.loss(step).backward()
        assert p.replica.step()
        p.own.zero_grad()
        p.whole(step).backward()
        p.own.step()
    p.check()


def test_a_plain_pass_after_one_of_the_replicas_own_is_refused_and_then_works(plain):
    p = plain()
    p.replica.backward(p.loss(0))
    p.replica.step()
    p.loss(1).backward()
    with pytest.raises(ConfigError, match=r"not exchanged.*replica\.zero_grad"):
        p.optimizer.step()
    p.replica.zero_grad()
    p.own.zero_grad()
    p.whole(0).backward()
    p.own.step()
    for step in range(2, STEPS):
        for optimizer, loss in ((p.optimizer, p.loss), (p.own, p.whole)):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
    p.check()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_unfrozen_later(plain, set_to_none):
    p = plain()
    for model in (p.model, p.alone):
        model.layers[0].requires_grad_(False)
    for step in range(STEPS):
        if step == 4:
            for model in (p.model, p.alone):
                model.layers[0].requires_grad_(True)
                model.layers[2].requires_grad_(False)
        for optimizer, loss in ((p.optimizer, p.loss), (p.own, p.whole)):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss(step).backward()
            optimizer.step()
    p.check()


def test_a_grad_scaler_of_the_users_own(plain):
    p = plain()
    ours, own = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    for step in range(STEPS):
        for scaler, optimizer, loss in ((ours, p.optimizer, p.loss), (own, p.own, p.whole)):
            optimizer.zero_grad()
            scaler.scale(loss(step)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    p.check()
    assert ours.get_scale() == own.get_scale()


def test_sparse_gradients(plain):
    p = plain("sparse", lambda m: torch.optim.SGD(m.parameters(), 0.1))
    for step in range(STEPS):
        for optimizer, loss in ((p.optimizer, p.loss), (p.own, p.whole)):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
    p.check()


class _Checkpointed(nn.Module):
    def __init__(self, *, wholly):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).double()
        self.head = nn.Linear(8, 2).double()
        self.wholly = wholly

    def forward(self, x):
        if self.wholly:
            return checkpoint(lambda t: self.head(self.body(t)), x, use_reentrant=True)
        return self.head(checkpoint(self.body, x, use_reentrant=True))


def test_reentrant_checkpoints_exchange_at_the_end_of_the_outer_pass(world, engines):
    model, alone = (_Checkpointed(wholly=False) for _ in range(2))
    optimizer, own = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone))
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    for step in range(STEPS):
        torch.manual_seed(step)
        xs = torch.randn(world.size, 5, 4, dtype=torch.float64, requires_grad=True)
        optimizer.zero_grad()
        model(xs[world.rank]).square().mean().backward()
        optimizer.step()
        own.zero_grad()
        (sum(alone(x).square().mean() for x in xs) / world.size).backward()
        own.step()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-12)
    replica.close()


def test_a_model_wholly_inside_a_reentrant_checkpoint_is_refused(world, engines):
    model = _Checkpointed(wholly=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    model(x).square().mean().backward()
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        optimizer.step()
    replica.zero_grad()
    replica.backward(model(x).square().mean())
    assert replica.step()
    replica.close()


def test_an_interrupted_pass(plain):
    p = plain()
    for step in range(STEPS):
        p.optimizer.zero_grad()
        if step == 3:
            hidden = p.model.layers[0](batch(step, [3] * p.world.size)[p.world.rank][0])
            hidden.register_hook(lambda _gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                p.model.layers[2](p.model.layers[1](hidden)).sum().backward()
            with pytest.raises(ConfigError, match="interrupted"):
                p.optimizer.step()
            p.optimizer.zero_grad()
        p.loss(step).backward()
        p.optimizer.step()
        p.own.zero_grad()
        p.whole(step).backward()
        p.own.step()
    p.check()


def test_a_step_inside_a_backward_pass_is_refused(plain):
    """It would use this rank's own gradients, before they are averaged."""
    p = plain()
    weight = next(p.model.parameters())
    for step in (p.optimizer.step, p.replica.step):
        hook = weight.register_post_accumulate_grad_hook(lambda _, step=step: bool(step()) and None)
        with pytest.raises(ConfigError, match=r"inside a backward pass.*after backward has"):
            p.loss(0).backward()
        hook.remove()
        p.replica.zero_grad()
    for step in range(STEPS):
        p.optimizer.zero_grad()
        p.loss(step).backward()
        p.optimizer.step()
        p.own.zero_grad()
        p.whole(step).backward()
        p.own.step()
    p.check()


def test_other_optimizers_that_step_inside_a_backward_pass_are_refused(world, engines):
    """A way to save the memory of gradients; it would train each rank alone."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    for parameter in model.parameters():
        other = torch.optim.SGD([parameter], 0.1)

        def step_at_once(_, other=other):
            other.step()
            other.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_at_once)
    with pytest.raises(ConfigError, match="none is left at its end: a hook set them"):
        model(torch.randn(3, 4)).square().mean().backward()
    replica.close()


def test_gradients_that_were_assigned_by_hand(world, plain):
    p = plain()
    for step in range(STEPS):
        p.optimizer.zero_grad()
        parameters = list(p.model.parameters())
        gradients = torch.autograd.grad(p.loss(step), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if world.size > 1:
            with pytest.raises(ConfigError, match=r"replica\.synchronize"):
                p.optimizer.step()
        p.replica.synchronize()
        p.optimizer.step()
        p.own.zero_grad()
        p.whole(step).backward()
        p.own.step()
    p.check()


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"precision": "fp16"}])
def test_options_that_need_the_replicas_own_backward(world, engines, options):
    model = build().float() if options.get("precision") == "fp16" else build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"], **options)
    x = batch(0, [3] * world.size)[world.rank][0].to(model.layers[0].weight.dtype)
    with pytest.raises(ConfigError, match=next(iter(options))):
        model(x, 0).sum().backward()
    replica.close()


def test_shares_of_unequal_batches_come_from_the_loader(world, plain):
    p = plain()
    num = 5 * world.size + world.size // 2  # the last batch is not divided evenly
    x, y = batch(0, [num])[0]
    loader = hpc.Loader(world, (x, y), global_batch=3 * world.size, shuffle=False, even_last=False)
    evaluation = hpc.Loader(world, (x, y), global_batch=world.size + 1, shuffle=False)
    starts = 0
    for _epoch in range(2):
        for mine, targets in loader:
            p.optimizer.zero_grad()
            cross_entropy(p.model(mine, 0), targets).backward()
            p.optimizer.step()
            stop = starts + loader.global_samples
            p.own.zero_grad()
            cross_entropy(p.alone(x[starts:stop], 0), y[starts:stop]).backward()
            p.own.step()
            starts = stop % num
        with torch.no_grad():
            for _ in evaluation:
                pass
    p.check()


def test_two_loaders_with_different_shares_are_refused(world, plain):
    if world.size == 1:
        pytest.skip("one rank has all of every batch")
    p = plain()
    x, y = batch(0, [3 * world.size])[0]
    even = hpc.Loader(world, (x, y), global_batch=world.size, shuffle=False)
    odd = hpc.Loader(world, (x, y), global_batch=world.size + 1, shuffle=False)
    (a, s), (b, t) = next(iter(even)), next(iter(odd))
    with pytest.raises(ConfigError, match="num_samples"):
        (cross_entropy(p.model(a, 0), s) + cross_entropy(p.model(b, 0), t)).backward()


def _ahead(batches):
    batches = iter(batches)
    following = next(batches)
    while following is not None:
        current, following = following, next(batches, None)
        yield current


def _sums(batches):
    x, y = zip(*batches, strict=True)
    yield torch.cat(x), torch.cat(y)


@pytest.mark.parametrize("way", [list, lambda b: itertools.cycle(list(b)), _ahead, _sums])
def test_uneven_batches_that_are_not_trained_in_turn_are_refused(world, plain, way):
    if world.size == 1:
        pytest.skip("one rank has all of every batch")
    p = plain()
    x, y = batch(0, [5 * world.size + 1])[0]
    loader = hpc.Loader(world, (x, y), global_batch=2 * world.size, shuffle=False, even_last=False)

    def train():
        for mine, targets in itertools.islice(way(loader), 9):
            p.optimizer.zero_grad()
            cross_entropy(p.model(mine, 0), targets).backward()
            p.optimizer.step()

    with pytest.raises(ConfigError, match="unknown which batch"):
        train()


def test_even_batches_may_be_trained_in_any_order(world, plain):
    p = plain()
    x, y = batch(0, [4 * world.size])[0]
    loader = hpc.Loader(world, (x, y), global_batch=2 * world.size, shuffle=False)
    for mine, targets in reversed(list(loader)):
        p.optimizer.zero_grad()
        cross_entropy(p.model(mine, 0), targets).backward()
        p.optimizer.step()
    for part in (slice(2 * world.size, None), slice(2 * world.size)):
        p.own.zero_grad()
        cross_entropy(p.alone(x[part], 0), y[part]).backward()
        p.own.step()
    p.check()


def test_learning_rates_that_differ_are_refused(world, plain):
    if world.size == 1:
        pytest.skip("one rank has the rates it has")
    p = plain()
    p.loss(0).backward()
    p.optimizer.step()
    p.optimizer.zero_grad()
    p.optimizer.param_groups[0]["lr"] = 0.01 / (1 + world.rank)
    with pytest.raises(ConfigError, match=r"learning rates .* differ.*world\.mean"):
        p.loss(1).backward()


def _closure(optimizer, loss):
    def evaluate():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    return evaluate


def test_lbfgs(plain, request):
    def make(model):
        return torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe"
        )

    if request.node.callspec.params["plain"] == "node-shared-weights":
        with pytest.raises(ConfigError, match="sharded"):
            plain(optimizer=make)
        return
    p = plain(optimizer=make)

    def held(model):  # a few samples leave directions open in which rounding would grow
        return 0.1 * sum(parameter.square().sum() for parameter in model.parameters())

    for step in range(4):
        mine = p.optimizer.step(_closure(p.optimizer, lambda s=step: p.loss(s) + held(p.model)))
        other = p.own.step(_closure(p.own, lambda s=step: p.whole(s) + held(p.alone)))
        assert abs(float(mine) - float(other)) < 1e-9
    p.check(atol=1e-7)


def test_a_loop_need_not_hold_the_replica(world, engines):
    """What ends with the world must not end with the last name that the script has for it."""
    model = build()
    optimizer = OPTIMIZERS["sgd"](model)
    held = weakref.ref(hpc.distribute(world, model, optimizer, engine=engines["mpi"]))
    gc.collect()
    replica = held()
    assert replica is not None
    replica.close()


def test_a_closure_with_any_optimizer(plain):
    p = plain()
    for step in range(STEPS):
        mine = p.optimizer.step(_closure(p.optimizer, lambda s=step: p.loss(s)))
        other = p.own.step(_closure(p.own, lambda s=step: p.whole(s)))
        assert abs(float(mine) - float(other)) < 1e-9
    p.check()
    assert p.replica.num_steps == STEPS


def test_a_step_on_some_ranks_only_is_named(world, plain):
    if world.size == 1:
        pytest.skip("one rank is always in its own step")
    p = plain(optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1))
    if "sharded by" in p.replica.describe():
        pytest.skip("the other ranks wait in the update, and the watchdog names this one")
    p.loss(0).backward()
    if world.rank:
        p.optimizer.step()
    p.optimizer.zero_grad()
    with pytest.raises(CollectiveError, match="not in the same step"):
        p.loss(1).backward()
    p.replica.zero_grad()


def test_two_replicas_in_one_plain_loss(world, engines):
    models = [build() for _ in range(2)]
    alone = [build() for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    own = [torch.optim.SGD(m.parameters(), 0.1) for m in alone]
    replicas = [
        hpc.distribute(world, m, o, engine=engines["mpi"])
        for m, o in zip(models, optimizers, strict=True)
    ]
    for step in range(STEPS):
        chunks = batch(step, [3] * world.size)

        def loss(pair, x, y):
            return cross_entropy(pair[0](x, 0), y) + cross_entropy(pair[1](x, 0), y).square()

        for one in (*optimizers, *own):
            one.zero_grad()
        loss(models, *chunks[world.rank]).backward()
        (sum(loss(alone, x, y) for x, y in chunks) / world.size).backward()
        for one in (*optimizers, *own):
            one.step()
    for mine, other in zip(models, alone, strict=True):
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-11)
    for replica in replicas:
        replica.close()


def test_compiled_models(world, engines):
    model, alone = build(), build()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer, own = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone))
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    for step in range(3):
        chunks = batch(step, [3] * world.size)
        x, y = chunks[world.rank]
        optimizer.zero_grad()
        cross_entropy(compiled(x, 0), y).backward()
        optimizer.step()
        own.zero_grad()
        (sum(cross_entropy(alone(x, 0), y) for x, y in chunks) / world.size).backward()
        own.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)
    replica.close()


def test_ranks_that_run_out_of_data_stay_in_join(world, plain):
    p = plain(optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.01))
    lengths = [2 + rank for rank in range(world.size)]
    with p.replica.join():
        for step in range(lengths[world.rank]):
            p.optimizer.zero_grad()
            p.loss(step).backward()
            p.optimizer.step()
    for step in range(max(lengths)):
        p.own.zero_grad()
        there = [rank for rank in range(world.size) if step < lengths[rank]]
        chunks = batch(step, [3] * world.size)
        for rank in there:
            x, y = chunks[rank]
            (cross_entropy(p.alone(x, rank), y) / len(there)).backward()
        p.own.step()
    p.check()


def test_both_kinds_of_backward_at_once_are_refused(world, plain):
    if world.size == 1:
        pytest.skip("one rank does the same as itself")
    p = plain()
    p.loss(0).backward()
    p.optimizer.step()
    p.optimizer.zero_grad()
    with pytest.raises(ConfigError, match="call the same on every rank"):
        p.replica.backward(p.loss(1)) if world.rank else p.loss(1).backward()
