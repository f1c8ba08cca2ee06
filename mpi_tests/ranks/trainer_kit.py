"""A small model, its data and its trainer, for the suites of the trainer."""

from __future__ import annotations

import torch

import hpctrain as hpc
from hpctrain.train.config import Logging

QUIET = Logging(display="off", every_steps=1)


def data(num=40):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num, 6, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def make(world, engines, *, accumulate=1, batch=12):
    """With dropout and BatchNorm: random numbers and statistics of each rank's own."""
    torch.manual_seed(5)
    layers = (torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh())
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    world.streams.bind_equal()
    name = "local" if world.size == 1 else "mpi"
    replica = hpc.distribute(world, model, optimizer, engine=engines[name], accumulate=accumulate)
    loader = hpc.Loader(world, data(), global_batch=batch // accumulate)
    return replica, loader, schedule


def held_out(world):
    return hpc.Loader(world, data(15), global_batch=8, shuffle=False)


def bits(replica):
    return [value.detach().clone() for value in replica.model.state_dict().values()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def line(width=6):
    """For configurations: a model."""
    return torch.nn.Sequential(torch.nn.Linear(width, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def shared_data(world, num=40):
    """For configurations: data that want the world."""
    x, y = data(num)
    return hpc.share(world, (x.numpy(), y.numpy()) if world.rank == 0 else None)


def pair():
    """For configurations: two models, which `pair_step` trains."""
    return {"first": line(), "second": line()}


def pair_step(trainer, batch):
    """Each model learns what the other one says of the inputs, and the target."""
    x, y = batch
    losses = {}
    for name, other in (("first", "second"), ("second", "first")):
        replica = trainer.replicas[name]
        with torch.no_grad():
            told = trainer.replicas[other](x)
        losses[name] = ((replica(x) - y).square() + 0.1 * (replica(x) - told).square()).mean()
        replica.backward(losses[name], num_samples=trainer.loader.num_samples)
        trainer.update(name)
    return losses
