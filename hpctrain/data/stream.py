"""`IterableDataset`: a stream that every rank reads whole and keeps its own part of."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from hpctrain.data.batches import Batching
from hpctrain.data.mapped import Collate, no_rows
from hpctrain.data.plan import Part, Seat
from hpctrain.data.randomness import OwnGenerators
from hpctrain.data.source import Batch
from hpctrain.data.structure import map_leaves
from hpctrain.errors import DataError
from hpctrain.world.seeding import derive_seed

__all__ = ["Stream"]


class Stream:
    """A stream of samples, the same on every rank; position p belongs to rank `p % num_ranks`.

    Its random numbers begin anew with every epoch, alike on all ranks, so that a resumed run reads
    again what the stopped one has read. What collating draws is apart from them, for ranks collate
    different samples: it is keyed by the first one.
    """

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset = dataset
        self._collate: Collate = collate or default_collate

    def read(
        self, batching: Batching, seat: Seat, *, start: int, seed: int, epoch: int
    ) -> Iterator[tuple[Part, Batch]]:
        """Every batch that is left of an epoch, as this rank sees it.

        Args:
            batching: How the stream is cut.
            seat: Whose parts are asked for.
            start: Samples that are consumed already; they are read and passed over.
            seed: Of the run.
            epoch: Which epoch; a data set that has `set_epoch` is told.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        own = OwnGenerators(derive_seed(seed, "stream", epoch))
        with own:
            samples = iter(self.dataset)
            num_read = sum(1 for _ in islice(samples, start))
        if num_read < start:
            raise DataError(
                f"the stream ended after {num_read} samples, and {start} are consumed already; "
                "go on with the stream that the run was stopped in"
            )
        collating = OwnGenerators(seed)
        ahead: deque[Any] = deque()  # this rank's samples that are read and not handed out
        latest: Any = None
        while True:
            wanted = batching.lookahead - (num_read - start)
            with own:
                for sample in islice(samples, wanted):
                    latest = sample
                    if num_read % seat.num_ranks == seat.rank:
                        ahead.append(sample)
                    num_read += 1
            size = batching.next_size(num_read - start)
            if size == 0:
                return
            places = seat.part_of(range(start, start + size))
            count = len(places)
            mine = [ahead.popleft() for _ in range(count)]
            with collating:
                collating.seed(derive_seed(seed, "collate", epoch, places[0] if count else start))
                batch = self._collate(mine or [latest])
            start += size
            yield Part(start, size, count), batch if mine else map_leaves(no_rows, batch)
