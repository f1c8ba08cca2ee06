"""Epochs that are no plain shuffle: samples drawn by weight, batches of similar lengths. Pure.

Both are plans of the whole epoch, made from (seed, epoch) alone: every rank has the same one, on
any number of ranks and after any stop, and takes its positions from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.data.batches import Batching
from hpctrain.data.shuffle import Order, choose_kind
from hpctrain.data.source import Indices
from hpctrain.errors import ConfigError
from hpctrain.world import derive_seed

__all__ = ["Draw", "LengthDraw", "Plan", "WeightedDraw"]

BUCKET_BATCHES = 100
"""Batches whose samples are sorted by length together."""


class Plan(Protocol):
    """Which sample stands at which position of an epoch."""

    def at(self, positions: Indices) -> Indices:
        """The samples at these positions."""

    def fingerprint(self) -> int:
        """A number that tells this plan from others."""


class Draw(Protocol):
    """How the samples of every epoch are chosen."""

    kind: str
    num_drawn: int
    """Samples in an epoch."""
    repeats: bool
    """Whether a sample can come twice in an epoch."""
    digest: int
    """Of everything that the plans follow from, beside seed and epoch."""

    def plan(self, seed: int, epoch: int) -> Plan:
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

    def plan(self, seed: int, epoch: int) -> Plan:
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
        bucket_batches: Batches in a pool: more of them make lengths more alike, fewer make batches
            more random.
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

    def plan(self, seed: int, epoch: int) -> Plan:
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
