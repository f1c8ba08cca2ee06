"""`gather`: results of all ranks in the order of the data set, each sample exactly once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.data.alike import require_alike
from hpctrain.data.exchange import Route, exchange
from hpctrain.data.table import Form, Table, check_chunk
from hpctrain.errors import ConfigError
from hpctrain.log import format_ranges, name_ranks
from hpctrain.world import World, agree, takes_timeout

__all__ = ["find_trouble", "gather"]

_CHUNK_BYTES = 16 << 20
_MOST_NAMED = 8


@takes_timeout
def gather(
    world: World,
    values: Any,
    indices: npt.ArrayLike,
    *,
    root: int | None = 0,
    num_samples: int | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
    timeout_s: float | None = None,
) -> Any:
    """Collective: bring results together in the order of the data set; options must match.

    Args:
        world: The ranks.
        values: This rank's results, one row a sample: an array, a tensor, a list, or a dict or
            tuple of these; None where it has none.
        indices: The sample in the data set that each row belongs to.
        root: Who gets them; None gives them to all.
        num_samples: How many samples the data set has; None: as many as were received.
        chunk_bytes: Memory for the rows on their way.
        timeout_s: How long to wait for a rank that is missing or stuck.
            None: as long as the world waits for any rank.

    Returns:
        On the root (or on all ranks) the results in the form in which they were given, row i for
        sample i; None elsewhere, and where no rank has any.

    Raises:
        ConfigError: on all ranks: a sample is duplicated, missing (they are named) or does not
            exist; forms differ.
    """
    timeout_s = world.watching.limit_s(timeout_s)
    settings = {"root": root, "num_samples": num_samples, "chunk_bytes": chunk_bytes}
    require_alike(world, "gather", settings, timeout_s=timeout_s)
    table, own, trouble = _examine(world, values, indices, root, chunk_bytes)
    agree(world.comm, trouble and f"gather: {trouble}", error=ConfigError, timeout_s=timeout_s)
    form = _common_form(world, table)
    counts: list[int] = world.comm.allgather(len(own))
    total = sum(counts) if num_samples is None else num_samples
    limits: dict[str, Any] = {"chunk_bytes": chunk_bytes, "timeout_s": timeout_s}

    judge = 0 if root is None else root
    places = np.arange(len(own)) + sum(counts[: world.rank])
    route = Route(np.arange(len(own)), np.full(len(own), judge), places)
    to_come = sum(counts) if world.rank == judge else 0
    numbers = Table(own)
    told: np.ndarray = exchange(world, numbers, route, to_come, form=numbers.form, **limits)
    trouble = find_trouble(told, counts, total) if world.rank == judge else None
    trouble = world.comm.bcast(trouble, root=judge)
    if trouble is not None:
        raise ConfigError(f"gather: {trouble}")
    if form is None:
        return None

    targets = np.arange(world.size) if root is None else np.array([root])
    route = Route(
        np.tile(np.arange(len(own)), len(targets)),
        np.repeat(targets, len(own)),
        np.tile(own, len(targets)),
    )
    wanted = root in (None, world.rank)
    rows = table if len(own) else None  # an empty list does not know what it would hold
    result = exchange(world, rows, route, total if wanted else 0, form=form, **limits)
    return result if wanted else None


def find_trouble(indices: npt.NDArray[np.int64], counts: list[int], total: int) -> str | None:
    """Check that all samples were received exactly once; returns what is wrong. Pure.

    Args:
        indices: Of all ranks, one rank's after the other's.
        counts: How many were received from each rank.
        total: How many samples there are.
    """
    strange = indices[(indices < 0) | (indices >= total)]
    if len(strange):
        return (
            f"index {int(strange[0])} does not exist in a data set of {total} samples; give "
            "num_samples=, or the indices that the samples have in the data set"
        )
    times = np.bincount(indices, minlength=total)
    twice = np.flatnonzero(times > 1)
    if len(twice):
        owners = np.repeat(np.arange(len(counts)), counts)[indices == twice[0]]
        return (
            f"sample {format_ranges(twice[: 10 * _MOST_NAMED].tolist(), limit=_MOST_NAMED)} was "
            f"given more than once ({len(twice)} in all; sample {int(twice[0])} from "
            f"{name_ranks(sorted(set(owners.tolist())), limit=_MOST_NAMED)}); each sample "
            "belongs to one rank: do not pad"
        )
    missing = np.flatnonzero(times == 0)
    if len(missing):
        named = format_ranges(missing.tolist(), limit=_MOST_NAMED)
        return f"{len(missing)} of {total} samples are missing: {named}"
    return None


def _examine(
    world: World, values: Any, indices: npt.ArrayLike, root: int | None, chunk_bytes: int
) -> tuple[Table | None, npt.NDArray[np.int64], str | None]:
    """This rank's rows and their indices, or what is wrong with them."""
    none = np.empty(0, np.int64)
    if root is not None and not 0 <= root < world.size:
        return None, none, f"root={root} is not a rank; choose 0 <= root < {world.size}, or None"
    trouble = check_chunk(chunk_bytes)
    if trouble is not None:
        return None, none, trouble
    try:
        given = np.asarray(indices)
    except (TypeError, ValueError) as error:
        return None, none, f"indices must be whole numbers in one dimension ({error})"
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        kind = f"{given.ndim} dimensions of {given.dtype}"
        return None, none, f"indices must be whole numbers in one dimension, not {kind}"
    own = given.astype(np.int64)
    if values is None:
        return None, own, None if not len(own) else f"{len(own)} indices, but values is None"
    try:
        table = Table(values)
    except ConfigError as error:
        return None, none, str(error)
    if table.num_rows != len(own):
        return None, none, f"{table.num_rows} rows of values for {len(own)} indices"
    return table, own, None


def _common_form(world: World, table: Table | None) -> Form | None:
    """Collective: the form of those ranks that have rows; None if no rank has any."""
    told: list[Form | None] = world.comm.allgather(
        table.form if table is not None and table.num_rows else None
    )
    first = next((rank for rank, form in enumerate(told) if form is not None), None)
    if first is None:  # perhaps all have empty arrays: their form is still one
        told = world.comm.allgather(None if table is None else table.form)
        first = next((rank for rank, form in enumerate(told) if form is not None), None)
        return None if first is None else told[first]
    common = told[first]
    for rank, form in enumerate(told):
        if form is not None and common is not None and form != common:
            raise ConfigError(
                f"gather: rank {rank} gives {form.difference(common)} as on rank {first}; give "
                "values of the same form on all ranks"
            )
    return common
