"""Results of all ranks in the order of the data set, and metrics that are exact."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

import hpctrain as hpc
from hpctrain.errors import ConfigError


def mine(world, total):
    return np.arange(world.rank, total, world.size)


def test_gather_to_the_root_and_to_all(world):
    own = mine(world, 11)
    values = {"p": torch.from_numpy(own * 2.0), "name": [f"n{i}" for i in own]}
    everywhere = hpc.gather(world, values, own, root=None)
    assert everywhere["p"].tolist() == [2.0 * i for i in range(11)]
    assert everywhere["name"] == [f"n{i}" for i in range(11)]
    last = world.size - 1
    at_last = hpc.gather(world, values, own, root=last, num_samples=11)
    assert (at_last is None) == (world.rank != last)
    if at_last is not None:
        assert at_last["name"] == everywhere["name"]


def test_ranks_without_rows(world):
    """Only the last rank has any: an empty list elsewhere says nothing about the form."""
    has = world.rank == world.size - 1
    result = hpc.gather(world, [np.zeros(3)] if has else [], [0] if has else [], root=None)
    assert [row.tolist() for row in result] == [[0.0] * 3]
    result = hpc.gather(world, np.ones(2) if has else None, [1, 0] if has else [], root=None)
    assert result.tolist() == [1.0, 1.0]
    assert hpc.gather(world, None, [], root=None) is None
    assert hpc.gather(world, np.zeros((0, 2)), [], root=None).shape == (0, 2)


def test_duplicates_are_refused_and_missing_samples_named(world):
    padded = np.append(mine(world, 10), 0)
    with pytest.raises(ConfigError, match="sample 0 was given more than once") as caught:
        hpc.gather(world, np.zeros(len(padded)), padded, num_samples=10)
    assert re.search(r"ranks? 0", str(caught.value))
    own = mine(world, 10)
    own = own[own != 4]
    with pytest.raises(ConfigError, match="1 of 10 samples are missing: 4"):
        hpc.gather(world, np.zeros(len(own)), own, num_samples=10)
    with pytest.raises(ConfigError, match="index 99 does not exist"):
        hpc.gather(world, np.zeros(1), [99], root=None)


def test_wrong_rows_and_forms_are_refused_by_all(world):
    last = world.size - 1
    wrong = world.rank == last
    with pytest.raises(ConfigError, match=f"rank {last} of .*2 rows of values for 1"):
        hpc.gather(world, np.zeros(2 if wrong else 1), [world.rank])
    with pytest.raises(ConfigError, match="whole numbers"):
        hpc.gather(world, np.zeros(1), [0.5] if wrong else [world.rank])
    if world.size > 1:
        with pytest.raises(ConfigError, match=rf"rank {last} gives .*data\['b'\]"):
            hpc.gather(world, {"b" if wrong else "a": np.zeros(1)}, [world.rank])
        with pytest.raises(ConfigError, match="float32"):
            hpc.gather(world, np.zeros(1, "f4" if wrong else "f8"), [world.rank])


def test_sums_do_not_depend_on_who_adds(world):
    values = np.random.default_rng(4).standard_normal(1000) * 10.0 ** np.arange(-150, 150, 0.3)
    adding, mean = hpc.metrics.Sum(), hpc.metrics.Mean()
    for part in np.array_split(values[world.rank :: world.size], 7):
        adding.update(part)
        mean.update(torch.from_numpy(part))
    assert adding.value(world) == math.fsum(values)
    assert mean.value(world) == pytest.approx(math.fsum(values) / 1000, rel=1e-15)
    assert len(set(world.comm.allgather(mean.value(world)))) == 1


def test_a_mean_weighs_samples_and_not_batches(world):
    mean = hpc.metrics.Mean()
    mean.update(torch.tensor(0.1 * (world.rank + 1), dtype=torch.float64), num_samples=world.rank)
    mean.update(float("nan"), num_samples=0)  # an empty batch has no say
    counts = range(world.size)
    if sum(counts) == 0:
        with pytest.raises(ConfigError, match="no mean"):
            mean.value(world)
        return
    wanted = sum(0.1 * (r + 1) * r for r in counts) / sum(counts)
    assert mean.value(world) == pytest.approx(wanted, rel=1e-15)


def test_odd_numbers_stay_odd(world):
    adding = hpc.metrics.Sum()
    adding.update([math.inf if world.rank == 0 else 1.0])
    assert adding.value(world) == math.inf
    adding.update(math.nan)
    assert math.isnan(adding.value(world))


def test_counts_and_confusion(world):
    rng = np.random.default_rng(0)
    true, taken = rng.integers(0, 5, 200), rng.integers(0, 5, 200)
    counting = hpc.metrics.Confusion(num_classes=5)
    own = mine(world, 200)
    counting.update(torch.from_numpy(taken[own]), true[own])
    matrix = counting.value(world)
    wanted = np.zeros((5, 5), int)
    np.add.at(wanted, (true, taken), 1)
    assert np.array_equal(matrix.counts, wanted)
    assert matrix.accuracy == np.mean(true == taken)
    assert matrix.recall == pytest.approx(np.diag(wanted) / wanted.sum(1))
    assert matrix.precision == pytest.approx(np.diag(wanted) / wanted.sum(0))
    assert hpc.metrics.total(world, 2**62) == 2**62 * world.size  # Python's own whole numbers
    if world.size > 1:
        with pytest.raises(ConfigError, match="64 bits"):
            hpc.metrics.total(world, np.array([2**62]))
        with pytest.raises(ConfigError, match="different kinds"):
            hpc.metrics.total(world, np.zeros(2 + (world.rank == 0), int))
    with pytest.raises(ConfigError, match="floating-point"):
        hpc.metrics.total(world, np.zeros(2))
    with pytest.raises(ConfigError, match="num_classes=5"):
        counting.update([5], [0])
