"""What must be equal on all ranks, compared before anything moves: arguments, and streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hpctrain import log
from hpctrain.data.stream import Opening, Split
from hpctrain.errors import ConfigError, DataError
from hpctrain.log import format_ranges
from hpctrain.world import World, roll_call

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["require_alike", "require_fitting_streams", "trouble_with_streams"]


def require_alike(
    world: World, call: str, settings: Mapping[str, object], *, timeout_s: float
) -> None:
    """Collective: refuse settings that differ between ranks; `call` must match.

    Raises:
        ConfigError: on all ranks, with the setting, its values and the ranks.
        CollectiveError: some ranks did not come.
    """
    roll_call(world.comm, call, timeout_s=timeout_s)
    told = world.comm.allgather(dict(settings))
    for name, first in told[0].items():
        others = [rank for rank, given in enumerate(told) if given[name] != first]
        if others:
            raise ConfigError(
                f"{call}: {name} is {told[others[0]][name]!r} on rank "
                f"{format_ranges(others, limit=16)} and {first!r} on rank 0; it must be the same "
                "on all ranks"
            )


def require_fitting_streams(
    comm: Comm, opening: Opening | None, failure: str, split: Split, *, timeout_s: float
) -> None:
    """Collective: refuse streams that are not what `split` says, which must match.

    Args:
        comm: The ranks.
        opening: How this rank's stream begins; None where it could not be read.
        failure: Why it could not.
        split: What the user said of the streams.
        timeout_s: How long to wait for ranks whose streams have not begun.

    Raises:
        DataError: the stream of another rank could not be read.
        ConfigError: on all ranks, with the ranks and what to do.
    """
    roll_call(comm, "the beginning of a stream", timeout_s=timeout_s)
    told: list[Opening | str] = comm.allgather(opening or failure)
    failed = {rank: text for rank, text in enumerate(told) if isinstance(text, str)}
    if failed:
        rank, text = next(iter(failed.items()))
        raise DataError(
            f"the stream of rank {format_ranges(failed, limit=16)} of {len(told)} could not be "
            f"read; rank {rank}: {text}"
        )
    openings = [found for found in told if not isinstance(found, str)]
    trouble = trouble_with_streams(openings, split)
    if trouble is not None:
        raise ConfigError(trouble)
    if split is None and comm.Get_rank() == 0 and not openings[0].is_read:
        log.notice(
            f"samples of type {openings[0].shown} have no content that can be compared: whether "
            "all ranks read the same stream is not checked"
        )


def trouble_with_streams(openings: Sequence[Opening], split: Split) -> str | None:
    """Why streams that begin like this cannot be read as `split` says, or None. Pure."""
    size = len(openings)
    first = openings[0].digests
    others = [rank for rank, found in enumerate(openings) if found.digests != first]
    if split is None and others:
        place = _first_difference(first, openings[others[0]].digests)
        return (
            f"the streams of the ranks differ: sample {place} on rank "
            f"{format_ranges(others, limit=16)} of {size} is not the one of rank 0 (first samples: "
            f"{openings[0].shown} on rank 0, {openings[others[0]].shown} on rank {others[0]}). "
            "A Loader expects one stream: every rank reads all of it and keeps 1 sample in "
            f"{size}, so a stream already split by rank would lose samples. Remove the split from "
            "the data set, or pass split='already'. If the samples are the same and only their "
            "augmentation differs, seed its generator alike on all ranks, or pass split='same'"
        )
    if split == "already" and size > 1:
        empty = [rank for rank, found in enumerate(openings) if not found.digests]
        if empty and len(empty) < size:
            return (
                f"split='already': the stream of rank {format_ranges(empty, limit=16)} of {size} "
                "has no samples; give every rank at least one, or use fewer ranks"
            )
        if not others and len(set(first)) > 1:
            return (
                f"split='already': the streams of all {size} ranks begin with the same "
                f"{len(first)} samples (the first is {openings[0].shown}), so every sample "
                f"would be used {size} times; leave split out, and the Loader divides them"
            )
    return None


def _first_difference(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))
