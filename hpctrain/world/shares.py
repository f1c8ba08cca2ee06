"""How many samples of the batch in hand are this rank's, as loaders have told. Pure.

A plain `loss.backward()` has no argument that says how many samples its loss is the mean over. The
loaders of a world note it for every batch they hand out.
"""

from __future__ import annotations

from hpctrain.errors import ConfigError

__all__ = ["Shares"]


class Shares:
    """The last batches that loaders have handed out for training."""

    def __init__(self) -> None:
        self._last = 1.0
        self._since: dict[int, float] = {}

    def note(self, loader: int, *, num_samples: int, global_samples: int, size: int) -> None:
        """A loader hands out a batch.

        Args:
            loader: Tells loaders apart.
            num_samples: This rank's.
            global_samples: All ranks'.
            size: The number of ranks.
        """
        self._since[loader] = num_samples * size / global_samples if global_samples else 1.0

    def take(self) -> float:
        """This rank's samples over the mean of all ranks, for a backward pass that starts now.

        1 where every rank has as many, and where no loader has told.

        Raises:
            ConfigError: several loaders have handed out batches with different shares.
        """
        since, self._since = self._since, {}
        found = set(since.values())
        if len(found) > 1:
            raise ConfigError(
                f"{len(since)} loaders have handed out batches since the last backward, and "
                "this rank's shares of them differ, so it is not known how much loss.backward() "
                "counts; call replica.backward(loss, num_samples=...) instead"
            )
        if found:
            self._last = found.pop()
        return self._last

    def forget(self) -> None:
        """No batch is in hand: an epoch has ended, or samples are counted in another way."""
        self._since.clear()
        self._last = 1.0
