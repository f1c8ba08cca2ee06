"""Random numbers by a stated rule.

Every stream is keyed by (seed, stream name, indices) and nothing else:

- `init` has no index: all ranks build the same model.
- per-rank streams (dropout, augmentation) are keyed by the rank, never by the number of ranks:
  rank 2 draws the same numbers in a job of 3 as in a job of 300.
- ranks of a grid that train on the same samples share their streams: they are keyed by the data
  coordinate instead of the rank. Stages of a pipeline behind the first have streams of their own,
  since they hold other layers.
- a job resumed on another number of ranks adds its position (samples consumed), so that every rank
  of the new job has a defined stream that no rank of the old one has used.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["Streams", "derive_seed"]


def derive_seed(seed: int, stream: str, *indices: int) -> int:
    """Derive an independent 63-bit seed from a base seed, a stream's name and indices. Pure."""
    text = "\0".join(["hpctrain", str(seed), stream, *map(str, indices)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class Streams:
    """The random streams of one rank."""

    def __init__(self, seed: int, rank: int) -> None:
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed={seed} is out of range; choose 0 <= seed < 2**63")
        self.seed = seed
        self.rank = rank
        """What per-rank streams are keyed by: the rank, or a grid's data coordinate."""
        self.stage = 0
        """The stage of a pipeline that draws from them."""

    @property
    def place(self) -> tuple[int, int]:
        """By what this rank's streams differ from other ranks'."""
        return self.rank, self.stage

    def move(self, rank: int, stage: int = 0) -> None:
        """Key per-rank streams by a place in a grid from now on."""
        self.rank, self.stage = rank, stage

    def seed_for(self, stream: str, *indices: int, per_rank: bool = True) -> int:
        """The seed of a named stream: this rank's, or with `per_rank=False` that of all ranks."""
        if not per_rank:
            return derive_seed(self.seed, stream, *indices)
        name = f"{stream} of stage {self.stage}" if self.stage else stream
        return derive_seed(self.seed, name, self.rank, *indices)

    def numpy(self, stream: str, *indices: int, per_rank: bool = True) -> np.random.Generator:
        """A numpy generator on a named stream."""
        import numpy as np

        return np.random.default_rng(self.seed_for(stream, *indices, per_rank=per_rank))

    def torch(self, stream: str, *indices: int, per_rank: bool = True) -> torch.Generator:
        """A torch CPU generator on a named stream."""
        import torch

        return torch.Generator().manual_seed(self.seed_for(stream, *indices, per_rank=per_rank))

    def bind_equal(self) -> None:
        """Seed the global generators identically on every rank: models built now start equal."""
        _bind(self.seed_for("init", per_rank=False))

    def bind_own(self, position: int = 0) -> None:
        """Seed the global generators with this rank's own stream: dropout now differs by rank.

        Args:
            position: Samples the whole run has consumed; 0 at its start. A resumed run passes its
                own, so that no stream is drawn from twice.
        """
        _bind(self.seed_for("rank", position))


def _bind(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # all devices
