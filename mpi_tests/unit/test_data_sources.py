"""Arrays, data sets, subsets, threads and random numbers, without ranks."""

from __future__ import annotations

import random
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from hpctrain.data.adopting import adopt, as_source
from hpctrain.data.mapped import MapSource, OwnGenerators
from hpctrain.data.source import ArraySource, SubsetSource, split_source
from hpctrain.data.stream import Stream
from hpctrain.data.transfer import read_ahead
from hpctrain.errors import ConfigError

ROWS = np.array([4, 0, 4, 2])
NONE = np.array([], dtype=np.int64)
Pair = namedtuple("Pair", "x y")


def reference(kind):
    """Ten rows of some array, and what taking ROWS of it must give."""
    base = np.arange(60).reshape(10, 6)
    if kind == "transposed":
        return np.asfortranarray(base)
    if kind == "swapped":
        return base.astype(">i4")
    if kind == "sliced":
        return base[:, ::2]
    if kind == "flat":
        return base[:, 0].copy()
    return base.astype(kind)


@pytest.mark.parametrize(
    "kind",
    ["f4", "f8", "f2", "i8", "u1", "u2", "?", "c8", "transposed", "swapped", "sliced", "flat"],
)
def test_numpy_arrays_come_as_tensors(kind):
    array = reference(kind)
    batch = ArraySource(array).take(ROWS)
    assert isinstance(batch, torch.Tensor)
    assert batch.is_contiguous()
    assert np.array_equal(batch.numpy(), array[ROWS])
    assert ArraySource(array).take(NONE).shape == (0, *array.shape[1:])
    batch.zero_()  # the caller's own: the data stay
    assert np.array_equal(array, reference(kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool])
@pytest.mark.parametrize("contiguous", [True, False])
def test_tensors_come_as_they_are(dtype, contiguous):
    tensor = torch.arange(60).reshape(10, 6).to(torch.float32).to(dtype)
    tensor = tensor if contiguous else tensor.t().contiguous().t()
    batch = ArraySource(tensor).take(ROWS)
    assert batch.dtype == dtype
    assert torch.equal(batch.float(), tensor.float()[torch.from_numpy(ROWS)])


def test_structures_are_kept():
    x, y = torch.arange(20).reshape(10, 2), np.arange(10)
    as_dict = ArraySource({"x": x, "more": (y, [y])}).take(ROWS)
    assert torch.equal(as_dict["x"], x[torch.from_numpy(ROWS)])
    assert as_dict["more"][1][0].tolist() == ROWS.tolist()
    named = ArraySource(Pair(x, y)).take(ROWS)
    assert type(named) is Pair
    assert named.y.tolist() == ROWS.tolist()
    assert type(ArraySource((x, y)).take(ROWS)) is tuple


def test_what_torch_has_no_dtype_for_stays_an_array():
    words = np.array(["a", "bc", "d", "e", "f"])
    taken = ArraySource((words, words.astype(object))).take(ROWS)
    assert [list(part) for part in taken] == [["f", "a", "f", "d"]] * 2


def test_memory_maps_are_read_row_by_row(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(60.0).reshape(10, 6))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = ArraySource((mapped[2:], np.arange(8)))
    assert not source.is_in_memory
    assert ArraySource(np.arange(8)).is_in_memory
    assert np.array_equal(source.take(ROWS)[0].numpy(), mapped[2:][ROWS])
    assert source.bytes_per_sample == 48 + 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.zeros(3), np.zeros(4)), r"different numbers of samples: \[0\]: 3, \[1\]: 4"),
        (np.zeros(()), "without an axis of samples"),
        (torch.eye(3).to_sparse(), "sparse"),
        ((), "tuple must hold only arrays"),
        ((np.zeros(3), [1, 2, 3]), "tuple must hold only arrays"),
        ({"x": "y"}, "dict must hold only arrays"),
        (7, "int is not a data source"),
    ],
)
def test_what_is_no_data_is_named(data, message):
    with pytest.raises(ConfigError, match=message):
        as_source(data, None)


class Noisy(Dataset):
    """Samples with random numbers from all three generators."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, torch.rand(()).item(), np.random.rand(), random.random()


def test_samples_have_random_numbers_of_their_own():
    source = MapSource(Noisy(), None)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    first = [t.tolist() for t in source.fetch(ROWS, 5)]
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == expected
    index = first[0]
    assert index == ROWS.tolist()
    for column in first[1:]:
        assert column[0] == column[2]  # the same sample
        assert len(set(column)) == 3  # different samples
    # alone or together, in this order or another, here or elsewhere: the same
    again = MapSource(Noisy(), None)
    alone = [[t.item() for t in again.fetch(ROWS[i : i + 1], 5)] for i in (3, 2, 1, 0)][::-1]
    assert [list(row) for row in zip(*first, strict=True)] == alone
    assert again.fetch(ROWS, 6)[1].tolist() != first[1]
    assert [t.shape for t in again.fetch(NONE, 5)] == [(0,)] * 4


def test_lent_generators_go_on_and_come_back_after_an_error():
    own = OwnGenerators(3)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), own:  # noqa: PT012
        first = torch.rand(()).item(), np.random.rand(), random.random()
        raise KeyError
    with own:
        second = torch.rand(()).item(), np.random.rand(), random.random()
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    with OwnGenerators(3):
        assert (torch.rand(()).item(), np.random.rand(), random.random()) == first


def test_strings_from_collate_cannot_be_cut_to_none():
    source = MapSource(["a", "b"], None)
    assert source.fetch(np.array([1, 0]), 0) == ["b", "a"]
    with pytest.raises(ConfigError, match="use drop_last=True"):
        source.fetch(NONE, 0)


def test_many_at_once_where_a_data_set_offers_it():
    class Together(Noisy):
        def __getitems__(self, indices):
            return [torch.tensor(i) for i in indices]

    assert MapSource(Together(), None).fetch(ROWS, 0).tolist() == ROWS.tolist()


# Subsets


def test_splits_never_overlap_and_follow_the_seed():
    source = ArraySource(np.arange(100))
    sizes = {"train": 0.7, "validation": 0.1, "test": 0.2}
    parts = split_source(source, sizes, seed=4)
    found = {name: part.take(np.arange(len(part))).tolist() for name, part in parts.items()}
    assert sorted(sum(found.values(), start=[])) == list(range(100))  # noqa: RUF017
    assert found["train"] != sorted(found["train"])
    again = split_source(source, sizes, seed=4)["test"]
    assert again.take(np.arange(20)).tolist() == found["test"]
    plain = split_source(source, {"first": 3}, seed=None)["first"]
    assert plain.take(np.arange(3)).tolist() == [0, 1, 2]
    assert plain.is_in_memory


def test_subsets_in_steps_and_outside():
    source = ArraySource(np.arange(10))
    assert SubsetSource(source, range(9, 0, -3)).take(np.array([0, 2])).tolist() == [9, 3]
    assert len(SubsetSource(source, NONE)) == 0
    for chosen in (range(5, 11), np.array([3, 10]), range(-1, 4)):
        with pytest.raises(ConfigError, match="not all from 0 to 9"):
            SubsetSource(source, chosen)


# What a user hands over


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_everything_is_taken_for_what_it_is():
    tensors = TensorDataset(torch.arange(10), torch.arange(10))
    assert type(as_source(tensors, None)) is ArraySource
    assert type(as_source(tensors, list)) is MapSource
    subset = as_source(Subset(tensors, [3, 5]), None)
    assert subset.take(np.array([1]))[0].tolist() == [5]
    assert type(as_source([1, 2], None)) is MapSource
    assert type(as_source(Noisy(), None)) is MapSource
    assert type(as_source(Numbers(), None)) is Stream
    assert as_source(subset, None) is subset
    with pytest.raises(ConfigError, match="collate"):
        as_source(np.zeros(3), list)


def test_a_data_loader_says_what_the_loader_needs():
    data = list(range(10))
    told = adopt(DataLoader(data, batch_size=4, shuffle=True, drop_last=True))
    assert (told.global_batch, told.shuffle, told.drop_last) == (4, True, True)
    assert told.collate is None
    told = adopt(DataLoader(data, batch_size=3, collate_fn=list))
    assert (told.global_batch, told.shuffle, told.collate) == (3, False, list)
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    told = adopt(DataLoader(data, batch_size=3, sampler=sampler))
    assert (told.global_batch, told.shuffle) == (None, False)
    context = {"num_workers": 2, "multiprocessing_context": "spawn", "prefetch_factor": 3}
    told = adopt(DataLoader(data, batch_size=3, timeout=5, **context))
    assert (told.num_workers, told.start_method, told.prefetch) == (2, "spawn", 3)
    assert told.timeout_s == 5
    assert adopt(DataLoader(Numbers(), batch_size=5)).global_batch == 5
    told = adopt(DataLoader(data, batch_size=3, sampler=WeightedRandomSampler([1.0] * 10, 40)))
    assert (list(told.sample_weights), told.num_draws, told.shuffle) == ([1.0] * 10, 40, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sampler": WeightedRandomSampler([1.0] * 10, 10, replacement=False)},
            "WeightedRandomSampler",
        ),
        ({"sampler": RandomSampler(range(10), replacement=True)}, "RandomSampler"),
        ({"batch_size": None}, "without batches"),
        ({"num_workers": 1, "multiprocessing_context": "fork"}, "cannot be used with MPI"),
    ],
)
def test_data_loaders_that_cannot_be_dealt_out(options, message):
    with pytest.raises(ConfigError, match=message):
        adopt(DataLoader(range(10), **options))


def test_a_batch_sampler_of_ones_own_cannot_be_dealt_out():
    class Own(BatchSampler):
        pass

    own = Own(SequentialSampler(range(10)), 2, False)
    with pytest.raises(ConfigError, match="batch_sampler of its own"):
        adopt(DataLoader(range(10), batch_sampler=own))


# Threads


def test_a_thread_reads_ahead_in_order_and_ends():
    assert list(read_ahead(lambda: iter(range(100)), 3)) == list(range(100))
    drawn = []

    def endless():
        while True:
            drawn.append(1)
            yield len(drawn)

    items = read_ahead(endless, 2)
    assert next(items) == 1
    items.close()
    assert not any(t.name == "hpctrain-loader" for t in threading.enumerate())
    assert len(drawn) <= 5


def test_an_error_in_the_thread_comes_where_its_item_would_have():
    def broken():
        yield 1
        raise OSError("the disk is gone")

    items = read_ahead(broken, 4)
    assert next(items) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
