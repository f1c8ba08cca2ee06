"""What was scattered or shared goes into a loader; data sets that can be scattered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError

TOTAL = 53


def test_a_loader_reads_shares_and_exchanges_them_between_epochs(world):
    data = {"x": torch.arange(TOTAL * 2.0).reshape(TOTAL, 2), "i": np.arange(TOTAL)}
    shard = hpc.scatter(world, data if world.rank == 0 else None)
    loader = hpc.Loader(world, shard, global_batch=8)
    orders = []
    for _ in range(2):
        own = []
        for batch in loader:
            assert torch.equal(batch["x"][:, 0], 2.0 * batch["i"])
            own += batch["i"].tolist()
        together = [index for part in world.comm.allgather(own) for index in part]
        assert sorted(together) == list(range(TOTAL))
        orders.append(together)
    assert orders[0] != orders[1]
    assert shard.order.epoch == 1


def test_a_loader_reads_the_nodes_copy(world):
    given = (np.arange(TOTAL * 2.0).reshape(TOTAL, 2), np.arange(TOTAL))
    shared = hpc.share(world, given if world.rank == 0 else None)
    own = []
    for x, index in hpc.Loader(world, shared, global_batch=8):
        assert torch.equal(x[:, 0], 2.0 * index)
        own += index.tolist()
    together = [index for part in world.comm.allgather(own) for index in part]
    assert sorted(together) == list(range(TOTAL))


class Samples(Dataset):
    """Samples one at a time; one of them may be odd."""

    def __init__(self, odd: int | None = None) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int):
        return np.full(3 if index != self.odd else 4, index, "f4"), index


def test_data_sets_are_scattered_sample_by_sample(world):
    tensors = TensorDataset(torch.arange(TOTAL), torch.arange(TOTAL) * 3)
    for dataset in (tensors, Samples()):
        for keep in (True, False):
            shard = hpc.scatter(
                world, dataset if world.rank == 0 else None, keep_whole=keep, chunk_bytes=100
            )
            first, second = shard.data
            if isinstance(dataset, Samples):
                assert first.tolist() == [[i] * 3 for i in shard.indices]
                assert second.tolist() == shard.indices.tolist()
            else:
                assert second.tolist() == (3 * shard.indices).tolist()
        hpc.reshuffle(world, shard)
        assert (
            shard.data[1].tolist()
            == (shard.indices * (1 if isinstance(dataset, Samples) else 3)).tolist()
        )


def test_samples_that_differ_and_streams_are_refused(world):
    if world.size > 1:
        given = Samples(odd=29) if world.rank == 0 else None
        with pytest.raises(CollectiveError, match=r"rank 0 of .* cannot be read") as caught:
            hpc.scatter(world, given, shuffle=False, chunk_bytes=160)
        assert len(set(world.comm.allgather(str(caught.value)))) == 1
        assert len(hpc.scatter(world, None if given is None else Samples())) == TOTAL

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

        def __len__(self):
            return 3

    with pytest.raises(ConfigError, match="by number"):
        hpc.scatter(world, Stream() if world.rank == 0 else None)
