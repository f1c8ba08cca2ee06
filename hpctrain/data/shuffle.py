"""Global orders of samples: pure functions of (seed, epoch), the same on any number of ranks.

`keyed` is a bijection on the indices that is computed where it is needed: no memory, for 10^12
samples too. It is a Feistel network on pairs (index // width, index % width): each round adds to
one half a keyed hash of the other, modulo the half's size, which can be undone and therefore
repeats nothing. The pairs are hardly more than the samples; an index beyond them walks on along
its cycle until it is back inside. `numpy` is numpy's own permutation, held in memory and faster to
read. `stored` is the order of the data.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from hpctrain.errors import ConfigError
from hpctrain.world import derive_seed

__all__ = ["LARGEST_IN_MEMORY", "Kind", "Order", "choose_kind"]

Kind: TypeAlias = Literal["keyed", "numpy", "stored"]

LARGEST_IN_MEMORY = 2**20
"""Data sets up to this size are shuffled by numpy (8 MiB a rank), larger ones by the key."""

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
        """Refuse what is no order."""
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
        """A number that tells this order from another, such as that of another numpy."""
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
