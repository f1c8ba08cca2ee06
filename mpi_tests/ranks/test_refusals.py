"""Arguments that are wrong, or not the same on all ranks, are refused on all ranks, by name."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.replica import HorovodTraining
from hpctrain.replica.equal_ranks import digest
from mpi_tests.ranks.pair import build


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def others(world):
    if world.size == 1:
        pytest.skip("needs somebody to differ from")
    return world.size - 1


@pytest.mark.parametrize(
    ("name", "usual", "odd"),
    [
        ("accumulate", 1, 2),
        ("overlap", False, None),
        ("bucket_bytes", None, 600),
        ("timeout_s", 50.0, 60.0),
        ("engine", "mpi", "torch"),
        ("clip_norm", 0.1, 0.2),
        ("precision", "fp32", "bf16"),
    ],
)
def test_arguments_that_differ_are_refused_with_rank_and_values(world, name, usual, odd):
    last = others(world)
    model = build()
    value = odd if world.rank == last else usual
    words = rf"{name} is {usual} on rank 0 and {odd} on rank {last}; give the same"
    with pytest.raises(ConfigError, match=words):
        hpc.distribute(world, model, sgd(model), **{name: value})


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_that_belongs_to_a_replica_is_refused(world, kind, several):
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), 0.1)
    replica = hpc.distribute(world, model, optimizer)
    given = [optimizer] if several else optimizer
    with pytest.raises(ConfigError, match=rf"this {kind.__name__} belongs to a.*close\(\)"):
        hpc.distribute(world, model, given)
    replica.close()
    again = hpc.distribute(world, model, given)
    model(torch.randn(3, 4)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    again.optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    again.close()


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("by", ["optimizer", "replica"])
def test_a_state_that_is_loaded_on_one_rank_alone_is_refused(world, by, update):
    last = others(world)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    replica = hpc.distribute(world, model, optimizer, update=update, timeout_s=20)

    def train():
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()

    train()
    into = optimizer if by == "optimizer" else replica
    state = copy.deepcopy(into.state_dict())  # collective where the update is divided
    if world.rank == last:
        into.load_state_dict(state)
    with pytest.raises(ConfigError, match="load the same state on every rank"):
        train()
    if world.rank != last:
        into.load_state_dict(state)
    replica.zero_grad()
    train()  # now all have
    replica.close()


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_weights_that_are_loaded_on_one_rank_alone_are_refused(world, update):
    last = others(world)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    replica = hpc.distribute(world, model, optimizer, update=update, timeout_s=20)

    def train():
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()

    train()
    earlier = copy.deepcopy(model.state_dict())
    train()
    if world.rank == last:  # to evaluate with them
        now = copy.deepcopy(model.state_dict())
        model.load_state_dict(earlier)
        model.load_state_dict(now)
    train()
    if world.rank == last:
        model.load_state_dict(earlier)
    told = rf"after model.load_state_dict\(\) on 1 of {world.size} ranks: weight on rank"
    with pytest.raises(CollectiveError, match=told):
        train()
    model.load_state_dict(earlier)
    replica.zero_grad()
    train()  # now all have
    replica.close()


def test_copies_of_a_distributed_model_are_models(world, engines, tmp_path):
    model = build()
    replica = hpc.distribute(world, model, sgd(model), engine=engines["mpi"])
    path = tmp_path / f"{world.rank}.pt"
    torch.save(model, path)
    for other in (copy.deepcopy(model), torch.load(path, weights_only=False)):
        other.load_state_dict(model.state_dict())
        assert all(map(torch.equal, other.parameters(), model.parameters()))
    replica.close()


def _swap_groups(groups, parameters):
    return groups[::-1]


def _swap_parameters(groups, parameters):
    return [{"params": [*groups[0]["params"][::-1]]}, groups[1]]


@pytest.mark.parametrize("change", [_swap_groups, _swap_parameters])
def test_an_optimizer_in_another_order_is_refused(world, change):
    last = others(world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    if world.rank == last:
        groups = change(groups, parameters)
    told = rf"rank {last}.*the optimizer has \d.\w+ in group 0 where rank 0 has 0.weight in group 0"
    with pytest.raises(ConfigError, match=told):
        hpc.distribute(world, model, torch.optim.AdamW(groups, 0.1))


@pytest.mark.parametrize("what", ["weight_decay", "betas", "maximize", "frozen"])
def test_options_that_change_on_one_rank_alone_are_refused(world, what):
    last = others(world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    replica = hpc.distribute(world, model, optimizer, timeout_s=20)
    group = optimizer.param_groups[0]
    if world.rank == last and what == "frozen":
        model[0].requires_grad_(False)
    elif world.rank == last:
        group[what] = {"weight_decay": 0.5, "betas": (0.8, 0.9), "maximize": True}[what]

    def train():
        for _ in range(8):  # one exchange may miss it
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()

    with pytest.raises(ConfigError, match=r"options of the optimizer differ .* frozen different"):
        train()
    replica.close()


def test_a_replica_without_steps_is_named_at_the_end(comm, capfd):
    with hpc.init(comm=comm, device="cpu", num_threads=1) as world:
        model = build()
        hpc.distribute(world, model, sgd(model))
    told = "no step was made with the replica of" in capfd.readouterr().err
    assert told == (comm.rank == 0)


def test_optimizers_that_differ_are_refused(world):
    last = others(world)
    model = build()
    kind = torch.optim.Adam if world.rank == last else torch.optim.SGD
    optimizer = kind(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match=rf"SGD .* on rank 0 and Adam .* on rank {last}"):
        hpc.distribute(world, model, optimizer)


def test_parameters_frozen_on_one_rank_alone_are_refused(world, engines):
    last = others(world)
    model = build()
    model.layers[0].weight.requires_grad_(world.rank != last)
    with pytest.raises(ConfigError, match=r"layers\.0\.weight .*, frozen where rank 0 has"):
        hpc.distribute(world, model, sgd(model), engine=engines["mpi"])


@pytest.mark.parametrize("by_horovod", [False, True], ids=["arena", "horovod"])
@pytest.mark.parametrize("from_step", [0, 1])
def test_sample_counts_on_some_ranks_alone_are_refused(world, engines, by_horovod, from_step):
    last = others(world)
    if by_horovod:
        pytest.importorskip("horovod")
    model = build()
    name = "horovod" if by_horovod else "mpi"
    how = {"horovod": HorovodTraining(fusion="horovod")} if by_horovod else {}
    replica = hpc.distribute(world, model, sgd(model), engine=engines[name], **how)
    x = torch.ones(3, 12).double()
    for _ in range(from_step):
        replica.backward(replica(x, 0).mean(), num_samples=3)
        replica.step()
    count = None if world.rank == last else 3
    with pytest.raises(ConfigError, match=r"on every rank or on none") as caught:
        replica.backward(replica(x, 0).mean(), num_samples=count)
    mine = "did not give" if world.rank == last else "gave"
    assert f"this rank {mine} it" in str(caught.value)
    replica.zero_grad()
    replica.backward(replica(x, 0).mean(), num_samples=3)  # and all is well again
    assert replica.step()
    replica.close()


@pytest.mark.parametrize("count", [4.5, "4", torch.tensor(4.0)])
def test_a_number_of_samples_is_whole(pair, count):
    p = pair()
    with pytest.raises(ConfigError, match=r"num_samples=.* must be a whole number.*len\(y\)"):
        p.replica.backward(p.loss(0), num_samples=count)
    p.replica.backward(p.loss(0), num_samples=np.int64(4))
    p.replica.close()


def test_a_loss_is_a_tensor(pair):
    p = pair()
    with pytest.raises(ConfigError, match=r"loss is a float \(3\.0\).*before \.item\(\)"):
        p.replica.backward(3.0)
    p.replica.close()


def test_arguments_in_another_order(world):
    model = build()
    cure = r"call distribute\(world, model, optimizer\)"
    with pytest.raises(ConfigError, match=f"the model is a SGD.*{cure}"):
        hpc.distribute(world, sgd(model), model)
    with pytest.raises(ConfigError, match=f"first argument is a Mlp.*{cure}"):
        hpc.distribute(model, sgd(model), world)
    with pytest.raises(ConfigError, match="list of optimizers has a Parameter"):
        hpc.distribute(world, model, list(model.parameters()))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine": 5}, "engine=5 must be a name"),
        ({"accumulate": 1.5}, r"accumulate=1\.5 must be a whole number"),
        ({"bucket_bytes": "1M"}, "bucket_bytes='1M' must be a whole number"),
        ({"overlap": "yes"}, "overlap='yes' must be True, False or None"),
    ],
)
def test_options_of_another_kind(world, options, told):
    model = build()
    with pytest.raises(ConfigError, match=told):
        hpc.distribute(world, model, sgd(model), **options)


@pytest.mark.parametrize("seed", ["x", 1.5])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ConfigError, match=rf"seed={seed!r} must be a whole number"):
        hpc.init(seed=seed, device="cpu")


def test_a_world_that_has_ended(comm):
    model = build()
    with hpc.init(seed=7, device="cpu", num_threads=1, comm=comm) as world:
        replica = hpc.distribute(world, model, sgd(model), engine="mpi")
        loss = replica(torch.ones(3, 12).double(), 0).mean()
    with pytest.raises(ConfigError, match="its world is closed: do this inside"):
        replica.backward(loss)
    with pytest.raises(ConfigError, match="this world is closed"):
        hpc.distribute(world, model, sgd(model))


@pytest.mark.parametrize("name", ["mpi", "torch"])
def test_close_ends_what_the_replica_connected_and_nothing_else(world, engines, name):
    engines["mpi"].barrier()
    before = {thread.name for thread in threading.enumerate()}
    count = threading.active_count()
    model = build()
    replica = hpc.distribute(world, model, sgd(model), engine=name, overlap=True)
    replica.backward(replica(torch.ones(3, 12).double(), 0).mean())
    replica.step()
    replica.close()
    replica.close()
    after = {thread.name for thread in threading.enumerate()}
    assert (after - before, threading.active_count()) == (set(), count)
    with pytest.raises(ConfigError, match="closed; make another one"):
        replica.engine.barrier()
    given = hpc.distribute(world, model, sgd(model), engine=engines["mpi"])
    given.close()
    engines["mpi"].barrier()


def test_running_statistics_are_told_of(world, engines, capsys):
    replicas = [
        hpc.distribute(world, model, sgd(model), engine=engines["mpi"])
        for model in (build("conv-batchnorm"), build("mlp"))
    ]
    said = capsys.readouterr().err
    row = "running statistics of norm are each rank's own; evaluate and save on one rank"
    assert said.count(row) == (1 if world.rank == 0 and world.size > 1 else 0)
    assert [row in r.describe() for r in replicas] == [world.size > 1, False]
    for replica in replicas:
        replica.close()


def test_the_foreign_gradient_message_names_each_parameter_once(pair):
    p = pair()
    p.replica.backward(p.loss(0))
    p.loss(0).backward()
    (p.model.layers[2].bias.sum() * 2).backward()
    with pytest.raises(ConfigError, match=r"got gradients that were not exchanged") as caught:
        p.replica.step()
    assert str(caught.value).count("layers.2.bias") == 1
    p.replica.close()


def test_attributes_of_the_model_and_the_optimizer_are_pointed_at(pair):
    p = pair()
    for name in ("train", "eval", "parameters"):
        with pytest.raises(AttributeError, match=rf"use replica\.model\.{name}"):
            getattr(p.replica, name)
    with pytest.raises(AttributeError, match=r"use replica\.optimizer\.param_groups"):
        p.replica.param_groups  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        p.replica.nonsense  # noqa: B018
    assert not hasattr(nn.Module, "nonsense")
    p.replica.close()


def test_one_loss_with_two_replicas_is_refused_and_two_groups_are_the_cure(world, engines):
    torch.manual_seed(5)
    parts = [nn.Linear(4, 4).double(), nn.Linear(4, 1).double()]
    replicas = [hpc.distribute(world, m, sgd(m), engine=engines["mpi"]) for m in parts]
    x = torch.full((2, 4), 1.0 + world.rank).double()
    replicas[0].backward(replicas[1](replicas[0](x)).mean())
    with pytest.raises(ConfigError, match=r"from another replica's loss"):
        replicas[1].step()
    for replica in replicas:
        replica.close()
    model = nn.Sequential(*parts)
    groups = [{"params": list(m.parameters()), "lr": 0.1 * (i + 1)} for i, m in enumerate(parts)]
    both = hpc.distribute(world, model, torch.optim.SGD(groups), engine=engines["mpi"])
    both.backward(both(x).mean())
    assert both.step()
    both.close()


def test_buffers_can_be_made_rank_zeros(world, engines):
    model = build("conv-batchnorm")
    replica = hpc.distribute(world, model, sgd(model), engine=engines["mpi"])
    replica(torch.full((3, 12), 1.0 + world.rank).double().cumsum(1), 0)
    for buffer in model.buffers():  # as the docs say
        replica.engine.broadcast_(buffer)
    assert len(set(world.comm.allgather(digest(model.buffers())))) == 1
    replica.close()


def test_a_closed_replica_says_so(world):
    model = nn.Linear(4, 2)
    replica = hpc.distribute(world, model, torch.optim.AdamW(model.parameters()))
    x, y = torch.ones(3, 4), torch.ones(3, 2)
    replica.learn(nn.functional.mse_loss, x, y)
    replica.close()
    for call in (
        lambda: replica.learn(nn.functional.mse_loss, x, y),
        lambda: replica(x),
        lambda: replica.backward(model(x).mean()),
        replica.step,
        replica.synchronize,
    ):
        with pytest.raises(ConfigError, match="this replica is closed"):
            call()
    with torch.no_grad():
        assert torch.equal(replica(x), model(x))


def test_a_refused_pass_of_a_closed_replica_leaves_the_next_one_alone(world):
    def train(reentrant):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        replica = hpc.distribute(world, model, optimizer, update="auto")
        x = torch.ones(3, 4, requires_grad=True)
        out = checkpoint(model, x, use_reentrant=True) if reentrant else model(x)
        out.mean().backward()
        return optimizer, replica

    optimizer, first = train(reentrant=True)
    with pytest.raises(ConfigError, match="reentrant activation checkpoint"):
        optimizer.step()
    first.close()
    optimizer, second = train(reentrant=False)
    optimizer.step()
    assert second.num_calls == (1, 1)
    second.close()


def test_a_loss_without_a_graph_is_refused(pair):
    p = pair()
    with pytest.raises(ConfigError, match=r"no graph.*torch\.no_grad\(\).*detached"):
        p.replica.backward(torch.ones(()))
    p.replica.close()


@pytest.mark.parametrize("kind", ["lazy", "meta"])
def test_a_model_without_weights_is_refused_with_what_to_do(world, kind):
    model = nn.LazyLinear(2) if kind == "lazy" else nn.Linear(4, 2, device="meta")
    told = "run one batch through the model" if kind == "lazy" else "meta device.*to_empty"
    with pytest.raises(ConfigError, match=told):
        hpc.distribute(world, model, sgd(model))


def test_a_model_that_is_frozen_altogether_is_told_of(world, capfd):
    model = nn.Linear(4, 2).requires_grad_(False)
    hpc.distribute(world, model, sgd(model)).close()
    assert ("every parameter of the optimizer is frozen" in capfd.readouterr().err) == (
        world.rank == 0
    )
