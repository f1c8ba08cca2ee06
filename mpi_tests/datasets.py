"""Data sets for tests of the loader; importable, as worker processes need them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hpctrain.data.shuffle import Order


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Every sample draws from all three global generators, as augmentation does."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), np.random.rand(), random.random()


class Fragile(Noisy):
    """One sample raises, or ends its process."""

    def __init__(self, size: int, how: str) -> None:
        super().__init__(size)
        self.how = how

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if index == self.size // 2:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(f"sample {index} is unreadable")
        return super().__getitem__(index)


class Counting(IterableDataset[Tensor]):
    """A stream of numbers with a random one beside each; a new start for every epoch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.size):
            yield torch.tensor([number + 1000 * self.epoch, random.random()])


class Parts(IterableDataset[dict[str, object]]):
    """A stream that is split by rank, as users of WebDataset write it; rank r has `lengths[r]`."""

    def __init__(self, rank: int, num_ranks: int, lengths: list[int]) -> None:
        self.rank, self.num_ranks, self.lengths = rank, num_ranks, lengths

    def __iter__(self) -> Iterator[dict[str, object]]:
        for row in range(self.lengths[self.rank]):
            number = row * self.num_ranks + self.rank
            yield {"number": number, "x": torch.full((2,), number), "name": f"sample {number}"}


class Broken(IterableDataset[int]):
    """A stream whose files are missing on one rank, from some sample on."""

    def __init__(self, rank: int, broken: int, after: int = 0) -> None:
        self.rank, self.broken, self.after = rank, broken, after

    def __iter__(self) -> Iterator[int]:
        for number in range(40):
            if number == self.after and self.rank == self.broken:
                raise OSError("shard-000.tar is gone")
            yield number


class Turning(IterableDataset[int]):
    """A stream of numbers that has others from one place on."""

    def __init__(self, size: int, *, turns_at: int | None = None) -> None:
        self.size, self.turns_at = size, turns_at

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            turned = self.turns_at is not None and number >= self.turns_at
            yield number + 1000 * turned


class Shares:
    """Scattered data: this rank holds its rows alone, and exchanges them for a new order."""

    def __init__(self, comm, size: int, order: Order) -> None:
        self.comm = comm
        self.order = order
        self.num_exchanges = 0
        self.rows = self._mine(np.arange(size) * 10, order)

    def _mine(self, whole, order: Order):
        return whole[order.between(self.comm.rank, len(whole), self.comm.size)]

    def __len__(self) -> int:
        return self.order.num_samples

    def take(self, rows):
        return {"value": self.rows[rows]}

    def reorder(self, order: Order) -> None:
        shares = self.comm.allgather(self.rows)
        whole = np.empty(len(self), dtype=np.int64)
        for rank, share in enumerate(shares):
            whole[self.order.between(rank, len(self), self.comm.size)] = share
        self.rows = self._mine(whole, order)
        self.order = order
        self.num_exchanges += 1
