"""Whether all ranks gather the same units of a sharded model: compared on the host, a step later.

On a GPU the control words are read some exchanges late, so that the host never waits for it. What a
rank has gathered is known on the host at once: it travels there by a reduction that nobody waits
for before the next exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from hpctrain.errors import CollectiveError
from hpctrain.replica.control_words import GATHERED_DIFFERENTLY

if TYPE_CHECKING:
    from hpctrain.engines import Engine

__all__ = ["GatherOrder"]


class GatherOrder:
    """Collective: compares digests of what the ranks gather.

    Args:
        engine: Over the ranks that gather together; its watchdog names a rank that does not come.
        comm: The same ranks; duplicated.
    """

    def __init__(self, engine: Engine, comm: MPI.Comm) -> None:
        self._engine = engine
        self._comm: MPI.Comm = comm.Dup()
        self._words = np.zeros(2, dtype=np.int64)
        self._request: MPI.Request | None = None
        self._compared = "step"

    def check(self, digest: int, what: str = "step") -> None:
        """Collective: compare the digests of a pass; those of the last one are known now.

        Args:
            digest: This rank's.
            what: The pass, in words.

        Raises:
            CollectiveError: on all ranks; those of the last one differed.
        """
        is_same, last, self._compared = self._finish(), self._compared, what
        self._words[:] = digest, -digest  # the largest and the smallest of all ranks
        self._request = self._comm.Iallreduce(MPI.IN_PLACE, self._words, op=MPI.MAX)
        if not is_same:
            raise CollectiveError(f"in the last {last} {GATHERED_DIFFERENTLY}")

    def _finish(self) -> bool:
        """Whether the digests of the last exchange were the same."""
        request, self._request = self._request, None
        if request is not None:
            self._engine.meet(request.Wait, "comparing what was gathered", "", None)
        is_same = bool(self._words[0] == -self._words[1])
        self._words[:] = 0  # told once
        return is_same

    def close(self) -> None:
        """Collective: end what is under way.

        Raises:
            CollectiveError: on all ranks; the digests of the last pass differed.
        """
        is_same = self._finish()
        self._comm.Free()
        if not is_same:
            raise CollectiveError(f"in the last {self._compared} {GATHERED_DIFFERENTLY}")
