"""A rank's share of a data set that nobody holds whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.data.chunks import share_length
from hpctrain.data.reading import SourceRows
from hpctrain.data.reordering import reorder
from hpctrain.data.shuffle import Order
from hpctrain.data.table import Table
from hpctrain.errors import ConfigError
from hpctrain.world import World

__all__ = ["Shard"]


class Shard:
    """This rank's rows: row i of rank r is position `i * size + r` of the order.

    Made by `scatter`. A `Scattered` source for a loader.

    Args:
        world: The ranks.
        order: What the shares of all ranks follow.
        table: This rank's rows, or the whole data set where this rank has it.
        whole: Whether it is the whole data set, of which only this rank's rows are read.
    """

    def __init__(
        self, world: World, order: Order, table: Table | SourceRows, *, whole: bool = False
    ) -> None:
        self._world = world
        self._order = order
        self._table = table
        self._whole = whole

    @property
    def order(self) -> Order:
        """What the shares follow now; the same on every rank."""
        return self._order

    @property
    def num_rows(self) -> int:
        """How many samples this rank has."""
        return share_length(len(self), self._world.rank, self._world.size)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """The number in the data set of each of this rank's samples."""
        return self._order.between(self._world.rank, len(self), self._world.size)

    @property
    def data(self) -> Any:
        """This rank's samples, in the form that the data set was given in.

        A rank that holds the whole data set copies its share out, and again at each call.
        """
        if self._whole or not isinstance(self._table, Table):
            return self.take(np.arange(self.num_rows))
        return self._table.form.outline.build(self._table.values)

    def __len__(self) -> int:
        """How many samples there are over all ranks."""
        return self._order.num_samples

    def take(self, rows: npt.NDArray[np.int64]) -> Any:
        """These rows of this rank's share, copied, in the form of the data set."""
        rows = np.asarray(rows, np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise ConfigError(
                f"rows from {rows.min()} to {rows.max()} are not all from 0 to "
                f"{self.num_rows - 1}, which this rank has"
            )
        return self._table.take(self._locate(rows))

    def reorder(self, order: Order) -> None:
        """Collective: exchange samples until the shares follow `order`, which must match.

        Raises:
            ConfigError: on all ranks, when the order is of another number of samples, or differs.
        """
        self._table = reorder(self._world, self._table, self._order, order, locate=self._locate)
        self._order = order
        self._whole = False

    def _locate(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where these rows of the share are in the table."""
        if not self._whole:
            return rows
        return self._order.at(rows * self._world.size + self._world.rank)
