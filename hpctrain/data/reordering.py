"""A new order for scattered shares: ranks find out where their rows go, and send them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.data.alike import require_alike
from hpctrain.data.chunks import share_length
from hpctrain.data.exchange import Route, exchange
from hpctrain.data.reading import SourceRows
from hpctrain.data.shuffle import Order
from hpctrain.data.table import Table
from hpctrain.errors import ConfigError
from hpctrain.world import World, takes_timeout

__all__ = ["CHUNK_BYTES", "reorder"]

CHUNK_BYTES = 16 << 20

_Rows = npt.NDArray[np.int64]


@takes_timeout
def reorder(
    world: World,
    table: Table | SourceRows,
    old: Order,
    new: Order,
    *,
    locate: Callable[[_Rows], _Rows],
    chunk_bytes: int = CHUNK_BYTES,
    timeout_s: float | None = None,
) -> Table:
    """Collective: exchange rows so that shares which follow `old` follow `new`, which must match.

    An order tells which sample stands where, not where a sample stands. So a third rank, the one
    that its number points to, hears of each sample who has it and who wants it, and tells the one
    who has it. No rank needs memory for more than its share of the samples.

    Args:
        world: The ranks.
        table: Where this rank's rows are.
        old: What the shares follow.
        new: What they shall follow.
        locate: Which rows of the table this rank's share consists of.
        chunk_bytes: Memory for the rows on their way.
        timeout_s: How long to wait for a rank that does not come or does not go on.
            None: as long as the world waits for any rank.

    Raises:
        ConfigError: on all ranks, when the orders are of different numbers of samples.
    """
    timeout_s = world.watching.limit_s(timeout_s)
    require_alike(world, "reorder", {"order": new, "chunk_bytes": chunk_bytes}, timeout_s=timeout_s)
    total, rank, size = old.num_samples, world.rank, world.size
    if new.num_samples != total:
        raise ConfigError(
            f"reorder: the order is of {new.num_samples} samples and the shares have {total}; "
            "give an order of as many"
        )

    def move(rows: Table | SourceRows, route: Route) -> Any:
        return exchange(
            world,
            rows,
            route,
            count,
            form=rows.form,
            chunk_bytes=chunk_bytes,
            timeout_s=timeout_s,
        )

    def tell(values: np.ndarray, ranks: _Rows, places: _Rows) -> np.ndarray:
        route = Route(np.arange(len(values)), ranks, places)
        told: np.ndarray = move(Table(values), route)
        return told

    count = share_length(total, rank, size)
    here = np.stack([np.full(count, rank), np.arange(count)], axis=1)
    has = old.between(rank, total, size)
    wants = new.between(rank, total, size)
    holders = tell(here, has % size, has // size)
    takers = tell(here, wants % size, wants // size)
    targets = tell(takers, holders[:, 0].copy(), holders[:, 1].copy())
    del here, has, wants, holders, takers
    route = Route(locate(np.arange(count)), targets[:, 0].copy(), targets[:, 1].copy())
    return Table(move(table, route))
