"""What a loader decides from its arguments, without ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from hpctrain.data.adopting import as_source
from hpctrain.data.arguments import LoaderArguments, digest_data, resolve_arguments
from hpctrain.data.shuffle import LARGEST_IN_MEMORY, Order
from hpctrain.data.source import split_source
from hpctrain.errors import ConfigError
from mpi_tests.datasets import Counting, Noisy

NOTHING = LoaderArguments(
    global_batch=8, shuffle=None, drop_last=None, even_last=True, weights=None, prefetch=None,
    num_workers=None, start_method=None, collate=None,
)  # fmt: skip


def decide(data, has_spare=True, num_ranks=2, **said):
    fields = {name: getattr(NOTHING, name) for name in NOTHING.__slots__} | said
    return resolve_arguments(
        data, LoaderArguments(**fields), rank=0, num_ranks=num_ranks, has_spare=has_spare
    )


class Slow:
    """A source with `take` and nothing else."""

    def __len__(self):
        return 10

    def take(self, indices):
        return indices


class Shares(Slow):
    order = Order(kind="keyed", num_samples=10, seed=1, epoch=0)

    def reorder(self, order):
        raise NotImplementedError


def test_a_thread_where_it_pays():
    small, large = np.zeros((64, 10)), np.zeros((64, 65536), dtype=np.float32)
    assert decide(small).depth == 0
    assert decide(large, global_batch=8).depth == 0  # four rows of 256 KiB each
    assert decide(large, global_batch=16).depth == 2
    assert decide(large, global_batch=16, has_spare=False).depth == 0
    assert decide(Slow(), has_spare=False).depth == 2
    assert decide(Slow()).depth == 2
    assert decide(split_source(as_source(small, None), {"a": 0.5}, seed=1)["a"]).depth == 0
    assert decide(large, prefetch=0).depth == 0
    assert decide(small, prefetch=5).depth == 5


def test_memory_maps_are_read_by_a_thread(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((64, 10)))
    assert decide(np.load(tmp_path / "x.npy", mmap_mode="r")).depth == 2


def test_orders():
    assert decide(np.zeros(10)).order == "numpy"
    assert decide(range(LARGEST_IN_MEMORY + 1)).order == "keyed"
    assert decide(np.zeros(10), shuffle=True).order == "numpy"
    assert decide(np.zeros(10), shuffle="keyed").order == "keyed"
    assert decide(np.zeros(10), shuffle=False).order == "stored"
    assert decide(Counting(3)).order == "stream"
    assert decide(Shares()).order == "keyed"  # what they were scattered by
    assert decide(Shares(), shuffle="local").order == "local"
    assert decide(DataLoader(range(9), batch_size=4)).order == "stored"
    assert decide(DataLoader(range(9), batch_size=4), shuffle=True).order == "numpy"


def test_what_is_said_wins_over_a_data_loader():
    data = DataLoader(TensorDataset(torch.zeros(9)), batch_size=4, drop_last=True)
    assert decide(data, global_batch=None).batching.global_batch == 4
    assert decide(data).batching.global_batch == 8
    assert decide(data).batching.drop_last
    assert not decide(data, drop_last=False).batching.drop_last


@pytest.mark.parametrize(
    ("data", "said", "message"),
    [
        (np.zeros(9), {"global_batch": 1}, "leaves some of the 2 ranks without samples"),
        (np.zeros(9), {"weights": [1.0]}, "one number above 0 for each of 2 ranks"),
        (np.zeros(9), {"weights": [1.0, float("inf")]}, "one number above 0"),
        (np.zeros(9), {"shuffle": "riffle"}, "shuffle='riffle' is not possible"),
        (Shares(), {"weights": [1.0, 2.0]}, "scattered shares are equal"),
        (Counting(9), {"weights": [1.0, 2.0]}, "dealt out evenly"),
        (Counting(9), {"num_workers": 2}, "use 0 or 1"),
        (Noisy(9), {"prefetch": 2}, "use num_workers"),
        (Noisy(9), {"num_workers": -1}, "num_workers=-1"),
        (Noisy(9), {"num_workers": 1, "start_method": "fork"}, "unsafe"),
        (Slow(), {"num_workers": 1}, "use prefetch"),
        (
            Noisy(9),
            {"num_workers": 2, "collate": lambda samples: samples},
            r"num_workers=2: collate \(<lambda>, test_data_arguments.py line \d+\) cannot be sent",
        ),
        (np.zeros(9), {"split": "already"}, "is for streams"),
        (np.zeros(9), {"sample_weights": [1.0] * 8}, "has 8 numbers, and there are 9 samples"),
        (np.zeros(9), {"sample_weights": [-1.0] * 9}, "not negative"),
        (np.zeros(9), {"sample_weights": [0] * 9}, "not all 0"),
        (np.zeros(9), {"sample_weights": ["a"] * 9}, "must be a list of numbers"),
        (np.zeros(9), {"sample_weights": [1] * 9, "num_draws": 0}, "num_draws=0"),
        (np.zeros(9), {"num_draws": 5}, "belongs to sample_weights"),
        (np.zeros(9), {"bucket_batches": 5}, "belongs to lengths"),
        (np.zeros(9), {"lengths": [1] * 9, "bucket_batches": 0}, "bucket_batches=0"),
        (np.zeros(9), {"lengths": [1.5] * 9}, "must be a list of whole numbers"),
        (np.zeros(9), {"lengths": [1] * 9, "sample_weights": [1] * 9}, "give one of them"),
        (np.zeros(9), {"lengths": [1] * 9, "shuffle": False}, "leave shuffle out"),
        (np.zeros(9), {"lengths": [1] * 9, "split": "same"}, "is for streams"),
        (Shares(), {"lengths": [1] * 10}, "needs random access"),
        (Counting(9), {"sample_weights": [1] * 9}, "needs random access"),
    ],
)
def test_what_does_not_go_together_is_named(data, said, message):
    with pytest.raises(ConfigError, match=message):
        decide(data, **said)


def test_the_batch_size_of_a_distributed_sampler_is_that_of_one_rank():
    data = list(range(12))
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    with pytest.raises(
        ConfigError, match=r"that of one rank; over 2 ranks it is 6.*global_batch=6"
    ):
        decide(loader, global_batch=None)
    assert decide(loader, global_batch=6).batching.global_batch == 6
    assert decide(loader, global_batch=6).order == "numpy"


def test_data_are_compared_by_what_can_be_read_at_no_cost():
    rows = np.arange(60).reshape(20, 3)
    same = digest_data(rows)
    assert same == digest_data(rows.copy())
    for number in (0, 10, 19):
        other = rows.copy()
        other[number] += 1
        assert digest_data(other) != same
    assert digest_data(list(range(9))) != digest_data(list(range(1, 10)))
    assert digest_data(Subset(Noisy(9), [1, 2])) != digest_data(Subset(Noisy(9), [1, 3]))
    assert digest_data(Noisy(9)) is digest_data(Counting(9)) is digest_data(Shares()) is None
    assert digest_data(np.zeros(0)) is None
    assert digest_data(np.zeros(1)) != digest_data(np.ones(1))
    large = np.zeros((3, 5 << 20), np.float32)
    first = digest_data(large)
    large[2] = 1
    assert digest_data(large) == first  # 20 MiB a sample: one is read
