"""What a loader can read: the one small protocol between data and loaders.

Two kinds. *Random access* (arrays, memory maps, files, one copy per node): any rank can take any
sample, so every epoch has a new global order on any number of ranks. *Scattered* (every rank holds
only its share): the shares follow the epoch's order cyclically, and a new order is an exchange.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from hpctrain.data.shuffle import Order

__all__ = ["Batch", "Indices", "Scattered", "Source"]

Batch: TypeAlias = Any
"""Tensors or arrays whose first axis is the samples, alone or in tuples, lists and dicts."""
Indices: TypeAlias = npt.NDArray[np.int64]


@runtime_checkable
class Source(Protocol):
    """Random access: every rank can take every sample.

    `take` is called from a loader's thread, one call at a time, and draws no random numbers.
    """

    def __len__(self) -> int:
        """How many samples there are; the same on every rank."""

    def take(self, indices: Indices) -> Batch:
        """These samples, in this order, as one batch: one gather of rows. No index is an error.

        The batch belongs to the caller; no indices give a batch of no rows.
        """


@runtime_checkable
class Scattered(Protocol):
    """Every rank holds only its share: row i of rank r is position `i * size + r` of the order.

    So "k samples consumed" means the same set of samples on every number of ranks.
    """

    @property
    def order(self) -> Order:
        """What the shares follow now; the same on every rank."""

    def __len__(self) -> int:
        """How many samples there are over all ranks; the same on every rank."""

    def take(self, rows: Indices) -> Batch:
        """These rows of this rank's share, as one batch; as `Source.take` otherwise."""

    def reorder(self, order: Order) -> None:
        """Collective: exchange samples until the shares follow `order`, which must match."""
