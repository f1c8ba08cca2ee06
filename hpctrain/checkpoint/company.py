"""Whether somebody else saves into the same directory: two jobs, or two savers of one. No MPI.

Each would go on from the other's checkpoints and remove them. A lock would have to be taken from
jobs that were killed; this only looks at what is there: a checkpoint that is newer than all that
this store knows of was made by somebody who is still at it.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.catalog import complete_in
from hpctrain.checkpoint.naming import checkpoint_name, number_of
from hpctrain.checkpoint.removing import is_alive_elsewhere, owner_of

__all__ = ["Company"]


class Company:
    """What one store knows of its directory; rank 0 has it.

    Args:
        directory: Of checkpoints.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: set[str] = set()
        self._newest = 0

    def look(self) -> None:
        """Everything that is there now may be gone on from."""
        for path in complete_in(self._directory):
            self._add(path.name)

    def wrote(self, number: int, step: int) -> None:
        """This store writes such a checkpoint."""
        self._add(checkpoint_name(number, step))

    def find_stranger(self) -> str | None:
        """Who else has saved here since, in words with a cure; None: nobody."""
        for path in complete_in(self._directory):
            if path.name not in self._known and (number_of(path) or 0) >= self._newest:
                return self._tell(path)
        return None

    def find_neighbour(self) -> str | None:
        """Which other process of this host wrote the newest checkpoint and still runs, or None."""
        newest = max(complete_in(self._directory), key=lambda p: number_of(p) or 0, default=None)
        return self._tell(newest) if newest is not None and is_alive_elsewhere(newest) else None

    def _add(self, name: str) -> None:
        self._known.add(name)
        self._newest = max(self._newest, number_of(name) or 0)

    def _tell(self, path: Path) -> str:
        owner = owner_of(path)
        by = "somebody else"
        if owner is not None:
            job = f", job {owner['job']}" if owner["job"] else ""
            by = f"process {owner['process']} on {owner['host']}{job}"
        return (
            f"{path} was saved by {by}, which saves into the same directory: each would go on from "
            "the other's checkpoints and remove them; end one of the jobs, give each its own "
            "directory, or several replicas of one job to one Saver"
        )
