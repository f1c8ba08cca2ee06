"""The order of an epoch: pure functions of (seed, epoch), the same on any number of ranks.

A plain shuffle is an `Order`. `keyed` is a bijection on the indices that is computed where it is
needed: no memory, for 10^12 samples too. It is a Feistel network on pairs (index // width, index %
width): each round adds to one half a keyed hash of the other, modulo the half's size, which can be
undone and therefore repeats nothing. The pairs are hardly more than the samples; an index beyond
them walks on along its cycle until it is back inside. `numpy` is numpy's own permutation, held in
memory and faster to read. `stored` is the order of the data.

A `Draw` is an epoch that is not a plain shuffle: samples drawn by weight, batches of similar
lengths.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from hpctrain.data.partition import Batching, Indices
from hpctrain.errors import ConfigError
from hpctrain.world import derive_seed

__all__ = [
    "LARGEST_IN_MEMORY",
    "Draw",
    "EpochPlan",
    "Kind",
    "LengthDraw",
    "Order",
    "WeightedDraw",
    "choose_kind",
]


Kind: TypeAlias = Literal["keyed", "numpy", "stored"]

LARGEST_IN_MEMORY = 2**20
"""Data sets up to this size are shuffled by numpy (8 MiB per rank), larger ones by the key."""

_MOST_SAMPLES = 2**62
_ROUNDS = 8
_FINGERPRINTED = 256


def choose_kind(num_samples: int) -> Kind:
    """How a data set of this size is shuffled unless the user says otherwise. Pure."""
    return "numpy" if num_samples <= LARGEST_IN_MEMORY else "keyed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of one epoch: which sample stands at which position. Pure."""

    kind: Kind
    num_samples: int
    seed: int
    """Of the run; every epoch derives its own."""
    epoch: int

    def __post_init__(self) -> None:
        """Refuse invalid orders."""
        if self.kind not in get_args(Kind):
            raise ConfigError(f"order {self.kind!r} is unknown; choose from {get_args(Kind)}")
        if not 0 <= self.num_samples <= _MOST_SAMPLES:
            raise ConfigError(f"num_samples={self.num_samples} must be from 0 to 2**62")
        if self.epoch < 0:
            raise ConfigError(f"epoch={self.epoch} must not be negative")

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples at these positions, each from 0 to `num_samples - 1`."""
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.num_samples:
            raise ConfigError(
                f"positions from {positions.min()} to {positions.max()} are not all from 0 to "
                f"{self.num_samples - 1}"
            )
        if self.kind == "stored":
            return positions
        if self.kind == "numpy":
            return _numpy_permutation(self)[positions]
        return _walk(positions, self.num_samples, _round_keys(self))

    def between(self, start: int, stop: int, step: int = 1) -> npt.NDArray[np.int64]:
        """The samples at `start, start + step, ...` below `stop`; not to be written to."""
        if self.kind == "numpy" and start >= 0 and stop <= self.num_samples:
            return _numpy_permutation(self)[start:stop:step]
        return self.at(np.arange(start, stop, step, dtype=np.int64))

    def fingerprint(self) -> int:
        """A number that distinguishes this order from others, such as that of another numpy."""
        count = min(self.num_samples, _FINGERPRINTED)
        stride = max(1, self.num_samples // _FINGERPRINTED)
        samples = self.at(np.arange(count, dtype=np.int64) * stride)
        return zlib.crc32(samples.astype("<i8").tobytes())

    def equals(self, other: Order) -> bool:
        """Whether both put the same samples at the same positions; the data's own has no epochs."""
        if self.kind == "stored" == other.kind:
            return self.num_samples == other.num_samples
        return self == other

    def of_epoch(self, epoch: int) -> Order:
        """The order of another epoch of the same run."""
        return Order(kind=self.kind, num_samples=self.num_samples, seed=self.seed, epoch=epoch)


@lru_cache(maxsize=4)
def _numpy_permutation(order: Order) -> npt.NDArray[np.int64]:
    generator = np.random.default_rng(derive_seed(order.seed, "shuffle", order.epoch))
    permutation = generator.permutation(order.num_samples).astype(np.int64, copy=False)
    permutation.flags.writeable = False
    return permutation


@lru_cache(maxsize=4)
def _round_keys(order: Order) -> tuple[np.uint64, ...]:
    return tuple(
        np.uint64(derive_seed(order.seed, "order", order.epoch, number))
        for number in range(_ROUNDS)
    )


def _walk(
    positions: npt.NDArray[np.int64], size: int, keys: tuple[np.uint64, ...]
) -> npt.NDArray[np.int64]:
    """Follow each position's cycle through the pairs until it is an index again."""
    width = isqrt(max(size - 1, 0)) + 1
    height = -(-size // width)
    found = _encipher(positions.astype(np.uint64), height, width, keys)
    outside = np.flatnonzero(found >= size)
    while len(outside):  # few: there are at most `width` more pairs than indices
        found[outside] = _encipher(found[outside], height, width, keys)
        outside = outside[found[outside] >= size]
    return found.view(np.int64)


def _encipher(
    numbers: npt.NDArray[np.uint64], height: int, width: int, keys: tuple[np.uint64, ...]
) -> npt.NDArray[np.uint64]:
    """A bijection on the numbers below `height * width`."""
    rows, columns = np.divmod(numbers, np.uint64(width))
    for number, key in enumerate(keys):
        if number % 2:
            rows = _add(rows, _hash(columns, key), np.uint64(height))
        else:
            columns = _add(columns, _hash(rows, key), np.uint64(width))
    return rows * np.uint64(width) + columns


def _add(
    half: npt.NDArray[np.uint64], hashed: npt.NDArray[np.uint64], size: np.uint64
) -> npt.NDArray[np.uint64]:
    """Add a 32-bit hash, scaled to the half's size, modulo that size; without slow divisions."""
    total = half + (hashed * size >> np.uint64(32))
    return np.minimum(total, total - size)  # below zero wraps around to something huge


def _hash(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Mix well into 32 bits: multiply by odd constants, fold high bits into low ones."""
    mixed = (numbers + key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return mixed >> np.uint64(32)


BUCKET_BATCHES = 100
"""Batches whose samples are sorted by length together."""


class EpochPlan(Protocol):
    """Which sample stands at which position of an epoch."""

    def at(self, positions: Indices) -> Indices:
        """The samples at these positions."""

    def fingerprint(self) -> int:
        """A number that distinguishes this plan from others."""


class Draw(Protocol):
    """How the samples of every epoch are chosen."""

    kind: str
    num_drawn: int
    """Samples in an epoch."""
    repeats: bool
    """Whether a sample can occur twice in an epoch."""
    digest: int
    """Digest of everything that determines the plans, besides seed and epoch."""

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """The plan of an epoch."""


class WeightedDraw:
    """Every position draws one sample, with replacement, as likely as its weight says.

    A draw is a hash of (seed, epoch, position), so that a position can be looked up without those
    before it. Memory: 8 bytes a sample.

    Args:
        weights: One number for each sample, at least 0; their sum need not be 1.
        num_drawn: Draws in an epoch; None: as many as there are samples.
    """

    kind = "weighted"
    repeats = True

    def __init__(self, weights: Sequence[float] | Any, num_drawn: int | None = None) -> None:
        given = _numbers("sample_weights", weights, np.float64)
        if given.min(initial=0) < 0 or not np.isfinite(given).all() or not given.any():
            raise ConfigError(
                "sample_weights must be finite, not negative, and not all 0; they are from "
                f"{given.min(initial=0):g} to {given.max(initial=0):g}"
            )
        if num_drawn is not None and num_drawn < 1:
            raise ConfigError(f"num_draws={num_drawn} must be at least 1")
        self.num_drawn = len(given) if num_drawn is None else num_drawn
        self.num_samples = len(given)
        self.sums = np.cumsum(given / given.max())
        self.last = int(np.flatnonzero(given)[-1])
        self.digest = zlib.crc32(given.tobytes(), self.num_drawn & 0xFFFFFFFF)

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """The draws of an epoch."""
        return _Draws(self, derive_seed(seed, "weighted", epoch))


class _Draws:
    def __init__(self, draw: WeightedDraw, key: int) -> None:
        self._draw = draw
        self._key = np.uint64(key)

    def at(self, positions: Indices) -> Indices:
        total = self._draw.sums[-1]
        thrown = _uniform(positions.astype(np.uint64), self._key) * total
        found: Indices = np.searchsorted(self._draw.sums, thrown, side="right").astype(np.int64)
        return np.minimum(found, self._draw.last)

    def fingerprint(self) -> int:
        return zlib.crc32(self._key.tobytes(), self._draw.digest)


def _uniform(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.float64]:
    """A number from 0 to 1 for each: SplitMix64, whose steps can be computed apart."""
    with np.errstate(over="ignore"):
        mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


class LengthDraw:
    """Every sample once, in global batches of similar lengths that come in a random order.

    The shuffled epoch is cut into pools of `bucket_batches` batches; each pool is sorted by length
    and cut into batches, and the full batches are shuffled. Memory: 8 bytes a sample.

    Args:
        lengths: One number for each sample.
        batching: How the epoch is cut; the plan is made for these batches.
        bucket_batches: Batches in a pool: more of them make lengths more similar, fewer make
            batches more random.
    """

    kind = "lengths"
    repeats = False

    def __init__(
        self, lengths: Sequence[int] | Any, batching: Batching, bucket_batches: int | None = None
    ) -> None:
        self.lengths = _numbers("lengths", lengths, np.int64)
        self.batching = batching
        self.bucket_batches = BUCKET_BATCHES if bucket_batches is None else bucket_batches
        if self.bucket_batches < 1:
            raise ConfigError(f"bucket_batches={bucket_batches} must be at least 1")
        self.num_drawn = self.num_samples = len(self.lengths)
        told = f"{batching} {self.bucket_batches}".encode()
        self.digest = zlib.crc32(told, zlib.crc32(self.lengths.tobytes()))
        self._make = lru_cache(maxsize=1)(self._arrange)

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """The order of an epoch."""
        return _Arranged(self, seed, epoch)

    def arranged(self, seed: int, epoch: int) -> Indices:
        """The samples of an epoch, in order."""
        return self._make(seed, epoch)

    def _arrange(self, seed: int, epoch: int) -> Indices:
        num, full = self.num_samples, self.batching.global_batch
        shuffled = _order(num, seed, epoch).between(0, num)
        sizes = [len(cut) for cut in self.batching.cut(0, num)]
        num_used, num_full = sum(sizes), sizes.count(full)
        used = shuffled[:num_used]
        pools = np.arange(num_used) // (full * self.bucket_batches)
        used = used[np.lexsort((self.lengths[used], pools))]
        batches = _order(num_full, derive_seed(seed, "buckets"), epoch).between(0, num_full)
        body = used[: num_full * full].reshape(num_full, full)[batches].reshape(-1)
        # Short batches stand where the epoch's cuts have them; what drop_last leaves is random.
        return np.concatenate([body, used[num_full * full :], shuffled[num_used:]])


class _Arranged:
    def __init__(self, draw: LengthDraw, seed: int, epoch: int) -> None:
        self._draw, self._seed, self._epoch = draw, seed, epoch

    def at(self, positions: Indices) -> Indices:
        return self._draw.arranged(self._seed, self._epoch)[positions]

    def fingerprint(self) -> int:
        shuffled = _order(self._draw.num_samples, self._seed, self._epoch).fingerprint()
        return zlib.crc32(str(shuffled).encode(), self._draw.digest)


def _order(num_samples: int, seed: int, epoch: int) -> Order:
    return Order(kind=choose_kind(num_samples), num_samples=num_samples, seed=seed, epoch=epoch)


def _numbers(name: str, given: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A list of numbers, one for each sample."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be numbers, one for each sample ({error})") from error
    whole = np.issubdtype(found.dtype, np.integer)
    if found.ndim != 1 or not (
        whole or (np.issubdtype(found.dtype, np.floating) and dtype != np.int64)
    ):
        kind = "whole numbers" if dtype == np.int64 else "numbers"
        raise ConfigError(
            f"{name} must be a list of {kind}, one for each sample; it is of shape {found.shape} "
            f"and dtype {found.dtype}"
        )
    return found.astype(dtype)
