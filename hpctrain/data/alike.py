"""What must be equal on all ranks: arguments, compared before anything moves, and streams."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hpctrain import log
from hpctrain.data.fingerprint import DIGEST_BYTES
from hpctrain.data.stream import Opening, Split
from hpctrain.errors import ConfigError, DataError
from hpctrain.log import name_ranks
from hpctrain.world import World, announced, finish, roll_call

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Op

__all__ = [
    "ReadReport",
    "require_alike",
    "require_fitting_streams",
    "require_same_reading",
    "sum_of_readings",
    "trouble_with_readings",
    "trouble_with_streams",
]

_NEXT_BATCH = "the next batch of a stream"


class ReadReport(NamedTuple):
    """What a rank reports to the others about its reading for one batch."""

    num_read: int
    """Samples of the epoch so far."""
    digests: bytes = b""
    """Of the samples since the batch before, one after the other; empty: not compared."""
    failure: str = ""
    """Why its stream could not be read."""


def require_alike(
    world: World, call: str, settings: Mapping[str, object], *, timeout_s: float
) -> None:
    """Collective: refuse settings that differ between ranks; `call` must match.

    Raises:
        ConfigError: on all ranks, with the setting, its values and the ranks.
        CollectiveError: some ranks did not arrive.
    """
    roll_call(world.comm, call, timeout_s=timeout_s)
    told = world.comm.allgather(dict(settings))
    for name, first in told[0].items():
        others = [rank for rank, given in enumerate(told) if given[name] != first]
        if others:
            raise ConfigError(
                f"{call}: {name} is {told[others[0]][name]!r} on "
                f"{name_ranks(others)} and {first!r} on rank 0; it must be the same "
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
    _refuse_failures([text if isinstance(text, str) else "" for text in told])
    openings = [found for found in told if not isinstance(found, str)]
    trouble = trouble_with_streams(openings, split)
    if trouble is not None:
        raise ConfigError(trouble)
    if split is None and comm.Get_rank() == 0 and not openings[0].is_read:
        log.notice(
            f"samples of type {openings[0].shown} have no comparable content: whether all ranks "
            "read the same stream is not checked"
        )


def require_same_reading(comm: Comm, said: ReadReport) -> None:
    """Collective: refuse a stream that has other samples, more or fewer, than those of other ranks.

    Every rank calls it before every batch, and when its stream has ended, so that all ranks end
    together. Costs one message of 40 bytes; only where something differs the ranks send more.

    Args:
        comm: The ranks.
        said: What this rank read.

    Raises:
        DataError: the stream of another rank could not be read.
        ConfigError: on all ranks, with the ranks and what to do.
    """
    # 63 bits: the digest and its negative must be numbers of MPI.
    digest = hashlib.blake2b(said.digests, digest_size=8).digest()
    short = int.from_bytes(digest, "little") >> 1
    from mpi4py import MPI

    own = [said.num_read, -said.num_read, short, -short, bool(said.failure)]
    most_read, least_read, highest, lowest, failed = _reduce(comm, own, MPI.MAX)
    if most_read == -least_read and highest == -lowest and not failed:
        return
    told: list[ReadReport] = comm.allgather(said)
    _refuse_failures([each.failure for each in told])
    raise ConfigError(trouble_with_readings(told))


def sum_of_readings(comm: Comm, num_samples: int, failure: str) -> int:
    """Collective: how many samples all ranks have for the next batch.

    Args:
        comm: The ranks.
        num_samples: This rank's.
        failure: Why its stream could not be read, or nothing.

    Raises:
        DataError: the stream of another rank could not be read.
    """
    from mpi4py import MPI

    total, failed = _reduce(comm, [num_samples, bool(failure)], MPI.SUM)
    if failed:
        _refuse_failures(comm.allgather(failure))
    return int(total)


def _reduce(comm: Comm, numbers: Sequence[int], op: Op) -> npt.NDArray[np.int64]:
    """Collective: numbers of all ranks, put together one by one."""
    mine, result = np.array(numbers, np.int64), np.empty(len(numbers), np.int64)
    if comm.Get_size() == 1:
        return mine
    with announced(comm, _NEXT_BATCH) as timeout_s:
        finish([comm.Iallreduce(mine, result, op)], _NEXT_BATCH, timeout_s=timeout_s)
    return result


def _refuse_failures(told: Sequence[str]) -> None:
    failed = {rank: text for rank, text in enumerate(told) if text}
    if failed:
        rank, text = next(iter(failed.items()))
        raise DataError(
            f"the stream of {name_ranks(failed)} of {len(told)} could not be "
            f"read; rank {rank}: {text}"
        )


def trouble_with_readings(told: Sequence[ReadReport]) -> str:
    """In what way ranks differ that read one stream up to the same batch. Pure."""
    size = len(told)
    first = _cut(told[0].digests)
    begin = told[0].num_read - len(first)
    places = {
        rank: _first_difference(first, own)
        for rank, own in enumerate(_cut(said.digests) for said in told)
    }
    others = [
        rank
        for rank, place in places.items()
        if place < min(len(first), len(told[rank].digests) // DIGEST_BYTES)
    ]
    if others:
        place = min(places[rank] for rank in others)
        others = [rank for rank in others if places[rank] == place]
        return (
            f"the streams of the ranks differ: sample {begin + place} on "
            f"{name_ranks(others)} of {size} is not the one of rank 0, though the "
            "streams started the same. A Loader expects one stream: every rank reads all of it and "
            f"keeps 1 sample in {size}, so samples would be lost. Make sure that all ranks read "
            "the same files in the same order, with the same shuffle seed. If each "
            "rank's stream is its own part, pass split='already'; if the samples are the same and "
            "only their augmentation differs, pass split='same'"
        )
    longest = max(said.num_read for said in told)
    short = [rank for rank, said in enumerate(told) if said.num_read < longest]
    counts = ", ".join(f"{told[rank].num_read} on rank {rank}" for rank in sorted(short[:4])) + (
        ", ..." if len(short) > 4 else ""
    )
    full = next(rank for rank, said in enumerate(told) if said.num_read == longest)
    return (
        f"the streams of the ranks differ in length: that of {name_ranks(short)} "
        f"of {size} ended early (samples: {counts}), and rank {full} has read {longest} samples. A "
        f"Loader expects one stream: every rank reads all of it and keeps 1 sample in {size}, so "
        "samples would be lost. Make sure that all ranks read the same files; if each rank's "
        "stream is "
        "its own part, pass split='already', which allows different lengths"
    )


def _cut(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def trouble_with_streams(openings: Sequence[Opening], split: Split) -> str | None:
    """Why streams that begin like this cannot be read as `split` says, or None. Pure."""
    size = len(openings)
    first = openings[0].digests
    others = [rank for rank, found in enumerate(openings) if found.digests != first]
    if split is None and others:
        place = _first_difference(first, openings[others[0]].digests)
        return (
            f"the streams of the ranks differ: sample {place} on "
            f"{name_ranks(others)} of {size} is not the one of rank 0 (first samples: "
            f"{openings[0].shown} on rank 0, {openings[others[0]].shown} on rank {others[0]}). "
            "A Loader expects one stream: every rank reads all of it and keeps 1 sample in "
            f"{size}, so a stream already split by rank would lose samples. Remove the split from "
            "the data set, or pass split='already'. If the samples are the same and only their "
            "augmentation differs, seed its generator the same on all ranks, or pass split='same'"
        )
    if split == "already" and size > 1:
        empty = [rank for rank, found in enumerate(openings) if not found.digests]
        if empty and len(empty) < size:
            return (
                f"split='already': the stream of {name_ranks(empty)} of {size} "
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
