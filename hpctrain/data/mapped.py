"""Map-style data sets (`torch.utils.data.Dataset`) as a source: sample by sample, then collated.

Every sample has its own random numbers, on any rank or worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import default_collate

from hpctrain.data.partition import Indices
from hpctrain.data.source import Batch, map_leaves
from hpctrain.errors import ConfigError

__all__ = ["Collate", "MapSource", "OwnGenerators", "no_rows"]


Collate = Callable[[list[Any]], Batch]


class MapSource:
    """Anything with `__len__` and `__getitem__`; every sample has random numbers of its own."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate: Collate = collate or default_collate
        self._generators: OwnGenerators | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, indices: Indices, seed: int, keys: Indices | None = None) -> Batch:
        """These samples as one batch; no indices give a batch of no rows.

        Args:
            indices: Which samples.
            seed: Of the epoch; every sample derives its own.
            keys: What each derives it by; None: by its index. Draws that can repeat a sample give
                their positions.
        """
        if self._generators is None:  # made where it is used: in a worker, or here
            self._generators = OwnGenerators(seed)
        wanted = indices.tolist() or [0]
        keyed = wanted if keys is None else keys.tolist() or [0]
        with self._generators as generators:
            batch = self._collate(self._samples(wanted, keyed, seed, generators))
        return batch if len(indices) else map_leaves(no_rows, batch)

    def _samples(
        self, wanted: Sequence[int], keys: Sequence[int], base: int, generators: OwnGenerators
    ) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)
        if together is not None:
            generators.seed(_mix(base, keys[0]))
            return list(together(wanted))
        samples = []
        for index, key in zip(wanted, keys, strict=True):
            generators.seed(_mix(base, key))
            samples.append(self._dataset[index])
        return samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generators": None}  # generators are not sent to workers


def _mix(base: int, index: int) -> int:
    """A 63-bit seed of a sample, cheaply: there is one per sample."""
    mixed = (base + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93) & (2**64 - 1)
    return (mixed ^ mixed >> 32) >> 1


def no_rows(leaf: Any) -> Any:
    """A leaf of a batch without its rows."""
    if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0:
        return leaf[:0]
    raise ConfigError(
        f"a rank has no sample of the last batch, and a {type(leaf).__name__} from collate cannot "
        "be cut to none; use drop_last=True, or a global_batch of at least twice the ranks"
    )


class OwnGenerators:
    """A context in which the global generators belong to the data; the next entry continues."""

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._numpy = np.random.MT19937(seed)
        self._python: tuple[object, ...] = random.Random(seed).getstate()

    def seed(self, seed: int) -> None:
        """Inside the context: start over."""
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def __enter__(self) -> OwnGenerators:
        lent = torch.get_rng_state(), mtrand.get_bit_generator(), random.getstate()
        self._lent = lent
        torch.set_rng_state(self._torch)
        mtrand.set_bit_generator(self._numpy)
        random.setstate(self._python)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        torch.set_rng_state(self._lent[0])
        mtrand.set_bit_generator(self._lent[1])
        random.setstate(self._lent[2])
