"""Random numbers of data sets: keyed by the sample, apart from those of the model.

A data set draws from the global generators of torch, numpy and Python, as augmentation does. They
are lent to it for the time of a call and put back afterwards, so that what a sample looks like
depends on (seed, epoch, sample) alone: not on ranks, workers, prefetching or stops, and dropout
does not notice.
"""

from __future__ import annotations

import random
from types import TracebackType

import numpy as np
import torch
from numpy.random import mtrand

__all__ = ["OwnGenerators"]


class OwnGenerators:
    """A context in which the global generators belong to the data; they go on at the next entry."""

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._numpy = np.random.MT19937(seed)
        self._python: tuple[object, ...] = random.Random(seed).getstate()

    def seed(self, seed: int) -> None:
        """Inside the context: begin anew."""
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
