"""What a loop over a Saver iterates: batches that know how many they are."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.data import Batch

__all__ = ["Batches"]


class Batches(Iterator[Batch]):
    """An iterator over batches, with a length where that is known, as progress bars ask for.

    Args:
        batches: The batches.
        length: How many there are from the first to the last; None: nobody knows.
    """

    def __init__(self, batches: Iterator[Batch], length: int | None) -> None:
        self._batches, self._length = batches, length

    def __next__(self) -> Batch:
        """Collective: the next batch; what was handed out before is done."""
        return next(self._batches)

    def __len__(self) -> int:
        """Batches of the whole loop, those included that were handed out.

        Raises:
            TypeError: the data are a stream, which does not say how long it is.
        """
        if self._length is None:
            raise TypeError("a stream does not say how long it is")
        return self._length
