"""A weight or loss that is wrong on one rank is named on all ranks: parameter, rank, step."""

from __future__ import annotations

import re

import pytest
import torch
from mpi4py import MPI
from torch import nn

import hpctrain as hpc
from hpctrain import faults
from hpctrain.checkpoint import Piece
from hpctrain.errors import ConfigError, DriftError, NonFiniteError
from mpi_tests.sharding import by_pairs

ENGINE = "mpi" if MPI.COMM_WORLD.Get_size() > 1 else "local"


def make_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_equal_weights_are_left_alone_and_statistics_may_differ(world):
    model = make_model()
    model[1].running_mean.fill_(world.rank)
    sentinel = hpc.Sentinel(world, model, every=3)
    assert [sentinel.step() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert [sentinel.step(number) for number in (29, 30)] == [False, True]
    sentinel.close()
    sentinel.close()


@pytest.mark.parametrize("bit", [0, 23, 31])
def test_a_flipped_bit_names_parameter_rank_and_step(world, bit):
    model = make_model()
    sentinel = hpc.Sentinel(world, model, every=2)
    sentinel.step()
    odd = world.size - 1
    if world.rank == odd:
        model[2].weight.data.view(torch.int32)[1, 3] ^= 1 << bit if bit < 31 else -(1 << 31)
    if world.size == 1:
        assert sentinel.step()
        return
    with pytest.raises(DriftError) as caught:
        sentinel.step()
    text = str(caught.value)
    assert text.startswith(f"step 2: 2.weight of rank {odd} of {world.size} differs from that of")
    assert re.search(rf"rank {odd} on \S+: 1 of 16 elements differ, element 11 is .*1 bit a", text)
    assert ("no majority" in text) == (world.size == 2)
    assert "one flipped bit suggests faulty memory" in text
    assert world.comm.allgather(text) == [text] * world.size
    sentinel.close()


def test_a_rank_that_missed_an_update_is_named_under_the_watchdog(world):
    model = make_model()
    dog = faults.start(world, timeout_s=60)
    sentinel = hpc.Sentinel(world, model, exclude=["1.*"], watchdog=dog)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 if world.rank > 0 or world.size < 3 else 0.0)
    if world.size < 3:
        sentinel.compare(step=7)
    else:
        with pytest.raises(DriftError, match=r"step 7: 0.weight of rank 0 of .*; also 0.bias, 2.w"):
            sentinel.compare(step=7)
    sentinel.close()
    world.comm.Barrier()
    dog.stop()


def test_wrong_arguments_are_refused_on_all_ranks(world):
    model = make_model()
    last = world.rank == world.size - 1
    with pytest.raises(ConfigError, match="every=0 must be a whole number"):
        hpc.Sentinel(world, model, every=0 if last else 5)
    with pytest.raises(ConfigError, match="nothing is left to compare"):
        hpc.Sentinel(world, model, exclude=["*"])
    if world.size > 1:
        with pytest.raises(ConfigError, match="model or every differs from rank 0"):
            hpc.Sentinel(world, nn.Linear(1, 1) if last else model)


def test_a_loss_that_is_nan_on_one_rank_ends_all_of_them(world):
    torch.manual_seed(5)
    model = nn.Linear(4, 2)
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.1), engine=ENGINE)
    bad = world.size - 1
    for step in range(5):
        nan = step == 4 and world.rank == bad
        loss = replica(torch.ones(3, 4)).square().mean()
        replica.backward(loss * torch.nan if nan else loss)
        if step < 4:
            assert replica.step()
    with pytest.raises(NonFiniteError) as caught:
        replica.step()
    assert f"rank {bad} of {world.size}: step 4: the loss is nan;" in str(caught.value)
    replica.close()


def test_a_training_has_equal_weights_and_a_nan_is_named_where_it_began(world):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    replica = hpc.distribute(world, model, optimizer, engine=ENGINE)
    sentinel = hpc.Sentinel(world, model, every=1)
    bad = world.size - 1
    for step in range(4):
        x = torch.full((3, 4), float(world.rank + step))
        if step == 3 and world.rank == bad:
            x[1, 2] = torch.nan
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step < 3:
            optimizer.step()
            assert sentinel.step()
    who = rf"rank {bad} of {world.size}: step 3: the gradient of 2\.bias has 2 of 2 elements"
    with pytest.raises(NonFiniteError, match=who):
        optimizer.step()
    assert sentinel.step()  # the NaN has reached no rank's weights
    sentinel.close()
    replica.close()


def test_pieces_are_compared_between_the_ranks_that_hold_them(world):
    """Two ranks hold the same rows; what one rank alone holds has nothing to be compared with."""
    whole = torch.arange(24.0).view(6, 4)
    alone = Piece(torch.full((1, 2), float(world.rank)), (world.rank, 0), (world.size, 2))
    state = {
        "bias": torch.ones(3),
        "alone": alone,
        "rows": by_pairs(whole, world.rank, world.size),
        "flat": Piece(whole.reshape(-1)[4:9].clone(), 4, (6, 4)),
    }
    sentinel = hpc.Sentinel(world, state, every=1)
    assert sentinel.step()
    odd = world.size - 1
    shared = world.size % 2 == 0
    if world.rank == odd:
        state["rows" if shared else "flat"].tensor.view(-1)[1] += 1
    if world.size == 1:
        assert sentinel.step()
    else:
        where = r"rows\[\d:\d, 0:4\]" if shared else r"flat\[1:2, 0:4\]"
        with pytest.raises(DriftError, match=rf"step 2: {where} of rank {odd} of {world.size}"):
            sentinel.step()
    sentinel.close()
