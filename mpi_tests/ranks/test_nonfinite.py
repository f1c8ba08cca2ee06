"""NaN on one rank in a loop of one's own: named on all ranks, before it reaches the weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError, NonFiniteError
from mpi_tests.models import batch
from mpi_tests.ranks.pair import build

WAYS = {
    "node": ("mpi", {}),
    "arena": ("mpi", {"bucket_bytes": 512}),
    "overlap": ("mpi", {"bucket_bytes": 512, "overlap": True}),
    "torch": ("torch", {}),
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_nan_on_one_rank_stops_all_before_the_weights_change(world, engines, way, plain):
    name, options = WAYS[way]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    replica = hpc.distribute(world, model, optimizer, engine=engines[name], **options)
    culprit = world.size - 1
    for step in range(4):
        x, y = batch(step, [3] * world.size)[world.rank]
        if step == 3 and world.rank == culprit:
            x[0, 0] = math.nan
        before = [p.detach().clone() for p in model.parameters()]

        optimizer.zero_grad()
        loss = cross_entropy(model(x, 0), y)
        loss.backward() if plain else replica.backward(loss)
        if step < 3:
            optimizer.step()
            continue
        with pytest.raises(NonFiniteError, match=rf"rank {culprit}\b.*step 3.*(loss|gradient)"):
            optimizer.step()
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, old)
    # All raised together, so all may go on together.
    x, y = batch(9, [3] * world.size)[world.rank]
    replica.zero_grad()
    replica.backward(cross_entropy(replica(x, 0), y))
    assert replica.step()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    replica.close()


def test_ignored_where_that_is_asked_for(world, engines):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"], nonfinite="ignore")
    x, y = batch(0, [3] * world.size)[world.rank]
    replica.backward(cross_entropy(replica(x * math.nan, 0), y))
    assert replica.step()
    assert all(bool(torch.isnan(p).all()) for p in model.parameters())
    replica.close()


def test_unknown_choices_are_refused(world, engines):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(ConfigError, match="'stop' or 'ignore'"):
        hpc.distribute(world, model, optimizer, engine=engines["mpi"], nonfinite="warn")


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_the_loop_leaves_out_is_forgotten(world, engines, plain, set_to_none):
    """As a GradScaler does after an overflow: the steps after it are made."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    for step in range(4):
        x, y = batch(step, [3] * world.size)[world.rank]
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = cross_entropy(model(x, 0), y) * (math.inf if step == 1 else 1.0)
        loss.backward() if plain else replica.backward(loss)
        if step != 1:
            optimizer.step()
    assert replica.num_steps == 3
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    replica.close()
