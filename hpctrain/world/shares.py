"""How many samples of the batch in hand are this rank's, as loaders have told. Pure.

A plain `loss.backward()` has no argument that says how many samples its loss is the mean over. The
loaders of a world record it for every batch they return. Where it is not clear which batch a loss
came from, that matters only if shares differ: then the call is refused.
"""

from __future__ import annotations

import threading

from hpctrain.errors import ConfigError

__all__ = ["Shares"]


class Shares:
    """The batches that loaders have returned for training."""

    def __init__(self) -> None:
        self.num_batches = 0
        """Batches returned so far in the main thread; the same on all ranks that do the same."""
        self._last: float | None = 1.0
        """Share of the current batch; None: there is none."""
        self._waiting: list[float] = []
        """Shares of returned batches that no backward call has used yet."""
        self._is_uneven = False

    def note(self, *, num_samples: int, global_samples: int, size: int) -> None:
        """A loader returns a batch.

        Args:
            num_samples: This rank's.
            global_samples: All ranks'.
            size: The number of ranks.
        """
        share = num_samples * size / global_samples if global_samples else 1.0
        self._is_uneven = self._is_uneven or share != 1.0
        if threading.current_thread() is not threading.main_thread():
            self._waiting += [share, 1.0]  # passed on by a thread at an unknown time
            return
        self.num_batches += 1
        self._waiting.append(share)

    def end_epoch(self) -> None:
        """A loader is exhausted; it does not know about later batches."""
        self._last = None
        if len(set(self._waiting)) <= 1:
            self._waiting.clear()

    def take(self) -> float:
        """This rank's samples over the mean of all ranks, for a backward pass that starts now.

        1 where every rank has as many, and where no loader has told.

        Raises:
            ConfigError: it is not known which batch the loss is of, and their shares differ.
        """
        waiting, self._waiting = self._waiting, []
        unknown = len(set(waiting)) > 1 or (not waiting and self._last is None)
        if unknown and self._is_uneven:
            raise ConfigError(
                "batches were not divided evenly among the ranks, and it is unknown which batch "
                f"this loss is from ({len(waiting)} were returned since the last backward), so "
                "this rank's weight is unknown; call replica.backward(loss, "
                "num_samples=len(y)), or loop over the loader itself with one backward for each "
                "batch (evaluate under torch.no_grad())"
            )
        if waiting:
            self._last = waiting[0]
            self._waiting = waiting[1:2]  # a loop that looks ahead, or leaves batches out
        return 1.0 if self._last is None else self._last

    @property
    def is_uneven(self) -> bool:
        """Whether the batch in hand is not divided evenly, as far as is known."""
        return any(share != 1.0 for share in self._waiting[-1:])

    def forget(self) -> None:
        """Samples are counted in another way."""
        self._last, self._is_uneven = 1.0, False
        self._waiting.clear()
