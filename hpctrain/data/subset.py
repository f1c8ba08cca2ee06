"""Some samples of a source, such as its training part. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.data.partition import split
from hpctrain.data.shuffle import Order, choose_kind
from hpctrain.data.source import Batch, Indices, Source
from hpctrain.errors import ConfigError

__all__ = ["SubsetSource", "split_source"]


class SubsetSource:
    """These samples of a source: positions of an order, or any indices."""

    def __init__(self, source: Source, chosen: Indices | range, order: Order | None = None) -> None:
        first, last = _ends(chosen)
        if first < 0 or last >= len(source):
            raise ConfigError(
                f"samples from {first} to {last} are not all from 0 to {len(source) - 1}"
            )
        self._source = source
        self._chosen = chosen
        self._order = order
        self.bytes_per_sample: int | None = getattr(source, "bytes_per_sample", None)
        self.is_in_memory: bool = getattr(source, "is_in_memory", False)

    def __len__(self) -> int:
        return len(self._chosen)

    def take(self, indices: Indices) -> Batch:
        """These samples of the chosen ones."""
        if isinstance(self._chosen, range):
            rows = self._chosen.start + indices * self._chosen.step
        else:
            rows = self._chosen[indices]
        return self._source.take(rows if self._order is None else self._order.at(rows))


def _ends(chosen: Indices | range) -> tuple[int, int]:
    if len(chosen) == 0:
        return 0, -1
    if isinstance(chosen, range):
        return min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1])
    return int(chosen.min()), int(chosen.max())


def split_source(
    source: Source, sizes: Mapping[str, float], *, seed: int | None
) -> dict[str, SubsetSource]:
    """Split into named parts that never overlap, such as train, validation and test.

    Args:
        source: What to split.
        sizes: Counts or fractions by name, as in `partition.split`.
        seed: Shuffle before splitting, the same on every rank and in every run with this seed;
            None cuts the data in their own order.
    """
    num = len(source)
    order = None
    if seed is not None:
        order = Order(kind=choose_kind(num), num_samples=num, seed=seed, epoch=0)
    return {name: SubsetSource(source, part, order) for name, part in split(num, sizes).items()}
