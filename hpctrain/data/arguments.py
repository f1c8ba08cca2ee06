"""A loader's arguments, and what the loader runs with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from torch.utils.data import Subset, TensorDataset

from hpctrain.data.adopting import Adopted, adopt, as_source, is_stream
from hpctrain.data.feeds import Feed, MapFeed, ScatteredFeed, SourceFeed, StreamFeed
from hpctrain.data.fingerprint import digest_sample
from hpctrain.data.mapped import Collate, MapSource
from hpctrain.data.partition import Batching, Seat
from hpctrain.data.shuffle import Draw, LengthDraw, WeightedDraw, choose_kind
from hpctrain.data.source import Scattered, leaves
from hpctrain.data.stream import Split, Stream
from hpctrain.data.workers import WorkerOptions, trouble_with_function
from hpctrain.errors import ConfigError

__all__ = ["LoaderArguments", "LoaderSetup", "Shuffle", "digest_data", "resolve_arguments"]


Shuffle: TypeAlias = bool | Literal["keyed", "numpy", "local"] | None

SPLITS = ("already", "same")

_INLINE_BYTES = 1 << 20
"""Batches of arrays in memory up to this size are gathered in the loop: a thread costs just as
much.

Larger ones too if all cores compute: a thread would only take time from the loop.
"""
_DEPTH = 2
_COMPARED_BYTES = 16 << 20
"""For larger samples only one is read to compare the data of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderArguments:
    """What the user gave to a `Loader`."""

    global_batch: int | None
    shuffle: Shuffle
    drop_last: bool | None
    even_last: bool
    weights: Sequence[float] | None
    prefetch: int | None
    num_workers: int | None
    start_method: str | None
    collate: Collate | None
    split: Split = None
    sample_weights: Any = None
    num_draws: int | None = None
    lengths: Any = None
    bucket_batches: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSetup:
    """What a loader runs with."""

    feed: Feed
    batching: Batching
    order: str
    """`keyed`, `numpy`, `stored`, `local`, `stream`, `split`, `weighted` or `lengths`."""
    depth: int
    """Batches that a thread fetches ahead; 0 fetches in the loop."""
    draw: Draw | None = None
    """How epochs are drawn that are not a plain shuffle."""


def resolve_arguments(
    data: Any,
    given: LoaderArguments,
    *,
    rank: int,
    num_ranks: int,
    has_spare: bool,
    on_grid: bool = False,
) -> LoaderSetup:
    """Decide everything that can be decided without communication.

    Args:
        data: What the user passed.
        given: The other arguments.
        rank: This rank.
        num_ranks: How many there are.
        has_spare: Whether something else than the loop's cores can fetch large batches: there are
            more cores, or batches go to a GPU.
        on_grid: Whether several ranks of the job have this rank's part of every batch.

    Raises:
        ConfigError: an argument is wrong, or does not go together with the data.
    """
    adopted = adopt(data)
    batching = _batching(adopted, given, num_ranks)
    seat = Seat(rank=rank, num_ranks=num_ranks, weights=_weights(given.weights, num_ranks))
    source = as_source(adopted.dataset, given.collate or adopted.collate)
    shuffle = adopted.shuffle if given.shuffle is None else given.shuffle
    order = _order(source, shuffle, given.split)
    draw = _draw(source, adopted, given, batching)
    order = order if draw is None else draw.kind
    options = _workers(adopted, given)
    if options.num_workers:
        trouble = trouble_with_function("collate", given.collate or adopted.collate)
        if trouble is not None:
            raise ConfigError(f"num_workers={options.num_workers}: {trouble}")
    if isinstance(source, Stream):
        _check_stream(options, seat)
        feed: Feed = StreamFeed(source, batching, seat, options, given.split)
    elif isinstance(source, MapSource):
        feed = MapFeed(source, draw or order, batching, seat, options)
    else:
        if options.num_workers:
            raise ConfigError(
                f"num_workers={options.num_workers}: batches of arrays and of sources with take() "
                "are one gather each, which a thread does; use prefetch"
            )
        if isinstance(source, Scattered):
            if on_grid:
                raise ConfigError(
                    "scattered shares are one for each rank, and on this grid several ranks need "
                    "the same samples; give every rank the whole data set (hpctrain.share keeps it "
                    "once on each node)"
                )
            if seat.weights is not None:
                raise ConfigError("weights need random access; scattered shares are equal")
            feed = ScatteredFeed(source, order, batching, seat)
        else:
            feed = SourceFeed(source, draw or order, batching, seat)
        depth = _depth(source, given.prefetch, batching.global_batch // num_ranks, has_spare)
        return LoaderSetup(feed=feed, batching=batching, order=order, depth=depth, draw=draw)
    if given.prefetch and not options.num_workers:
        raise ConfigError(
            f"prefetch={given.prefetch} without workers: in a thread the random numbers of a data "
            "set would mix with the model's; use num_workers"
        )
    return LoaderSetup(feed=feed, batching=batching, order=order, depth=0, draw=draw)


def digest_data(data: Any) -> bytes | None:
    """A digest by which ranks see whether they hold the same data of random access.

    Of arrays and sources the first, middle and last sample are read (the first alone where samples
    are large), of lists they are looked at, of a `Subset` the indices are. Other data sets are
    asked for nothing: what `__getitem__` opens or draws belongs to the worker processes. None where
    there is nothing to compare.
    """
    dataset = adopt(data).dataset
    if is_stream(dataset):
        return None
    if isinstance(dataset, Subset) and type(dataset.dataset) is not TensorDataset:
        return digest_sample((list(dataset.indices), digest_data(dataset.dataset)))
    source = as_source(dataset, None)
    if isinstance(source, Stream | Scattered) or len(source) == 0:
        return None
    rows = np.unique(np.array([0, len(source) // 2, len(source) - 1], np.int64))
    if isinstance(source, MapSource):
        return digest_sample([dataset[row] for row in rows]) if isinstance(dataset, list) else None
    first = source.take(rows[:1])
    if sum(getattr(leaf, "nbytes", 0) for _, leaf in leaves(first)) > _COMPARED_BYTES:
        return digest_sample(first)
    return digest_sample((first, source.take(rows[1:])))


def _batching(adopted: Adopted, given: LoaderArguments, num_ranks: int) -> Batching:
    size = adopted.global_batch if given.global_batch is None else given.global_batch
    if size is None and adopted.rank_batch is not None:
        whole = adopted.rank_batch * num_ranks
        raise ConfigError(
            f"the DataLoader has a DistributedSampler, so its batch_size={adopted.rank_batch} is "
            f"that of one rank; over {num_ranks} ranks it is {whole}. A Loader divides the data "
            f"over the ranks itself: write hpctrain.Loader(world, dataset, global_batch={whole}), "
            "and leave the DataLoader and its sampler out"
        )
    if size is None:
        raise ConfigError("global_batch is missing; give the samples of a step over all ranks")
    if size < num_ranks:
        raise ConfigError(
            f"global_batch={size} leaves some of the {num_ranks} ranks without samples in every "
            f"step; choose at least {num_ranks}, or fewer ranks"
        )
    drop = adopted.drop_last if given.drop_last is None else given.drop_last
    return Batching(global_batch=size, drop_last=drop, even_last=given.even_last)


def _weights(weights: Sequence[float] | None, num_ranks: int) -> tuple[float, ...] | None:
    if weights is None:
        return None
    if len(weights) != num_ranks or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(
            f"weights={list(weights)} must be one number above 0 for each of {num_ranks} ranks"
        )
    return tuple(weights)


def _order(source: Any, shuffle: Shuffle, split: Split) -> str:
    if split not in (None, *SPLITS):
        raise ConfigError(f"split={split!r} is unknown; leave it out, or choose from {SPLITS}")
    scattered = isinstance(source, Scattered)
    if isinstance(source, Stream):
        if shuffle:
            raise ConfigError(
                f"shuffle={shuffle!r}: a stream has no random access; shuffle inside the data "
                "set, in the same way on all ranks"
            )
        return "split" if split == "already" else "stream"
    if split is not None:
        raise ConfigError(
            f"split={split!r} is for streams (IterableDataset); of data with random access, "
            "give every rank the whole data set, or distribute it with hpctrain.scatter"
        )
    if shuffle is None:
        return source.order.kind if scattered else choose_kind(len(source))
    if shuffle is True:
        kept = source.order.kind if scattered else "stored"
        return choose_kind(len(source)) if kept == "stored" else kept
    if shuffle is False:
        return "stored"
    if shuffle not in ("keyed", "numpy", "local") or (shuffle == "local" and not scattered):
        raise ConfigError(
            f"shuffle={shuffle!r} is not possible here; choose True, False, 'keyed' or 'numpy', "
            "and for scattered data also 'local'"
        )
    return shuffle


def _draw(source: Any, adopted: Adopted, given: LoaderArguments, batching: Batching) -> Draw | None:
    weights, num_draws = given.sample_weights, given.num_draws
    if weights is None and given.lengths is None:
        weights, num_draws = adopted.sample_weights, num_draws or adopted.num_draws
    if weights is None and num_draws is not None:
        raise ConfigError(f"num_draws={num_draws} belongs to sample_weights; leave it out")
    if given.lengths is None and given.bucket_batches is not None:
        raise ConfigError(f"bucket_batches={given.bucket_batches} belongs to lengths; leave it out")
    if weights is None and given.lengths is None:
        return None
    name = "lengths" if weights is None else "sample_weights"
    if weights is not None and given.lengths is not None:
        raise ConfigError("sample_weights and lengths both choose the samples; give one of them")
    if isinstance(source, Stream | Scattered):
        raise ConfigError(
            f"{name} needs random access, which streams and scattered data do not have; give "
            "arrays, files or a data set with __getitem__"
        )
    if given.shuffle not in (None, True):
        raise ConfigError(
            f"shuffle={given.shuffle!r}: {name} determines the order; leave shuffle out"
        )
    draw: WeightedDraw | LengthDraw
    if weights is not None:
        draw = WeightedDraw(weights, num_draws)
    else:
        draw = LengthDraw(given.lengths, batching, given.bucket_batches)
    if draw.num_samples != len(source):
        raise ConfigError(
            f"{name} has {draw.num_samples} numbers, and there are {len(source)} samples; give one "
            "for each sample"
        )
    return draw


def _workers(adopted: Adopted, given: LoaderArguments) -> WorkerOptions:
    prefetch = adopted.prefetch if given.prefetch is None else given.prefetch
    return WorkerOptions(
        num_workers=adopted.num_workers if given.num_workers is None else given.num_workers,
        depth=prefetch or _DEPTH,
        start_method=given.start_method or adopted.start_method or "forkserver",
        timeout_s=adopted.timeout_s,
        initialize=adopted.initialize,
    )


def _check_stream(options: WorkerOptions, seat: Seat) -> None:
    if options.num_workers > 1:
        raise ConfigError(
            f"num_workers={options.num_workers}: every worker would read the whole stream; use 0 "
            "or 1, or a data set with random access"
        )
    if seat.weights is not None:
        raise ConfigError("weights need random access; a stream is dealt out evenly")


def _depth(source: Any, prefetch: int | None, per_rank: int, has_spare: bool) -> int:
    if prefetch is not None:
        if prefetch < 0:
            raise ConfigError(f"prefetch={prefetch} must not be negative")
        return prefetch
    in_memory = getattr(source, "is_in_memory", False)
    small = (getattr(source, "bytes_per_sample", None) or 0) * per_rank <= _INLINE_BYTES
    return 0 if in_memory and (small or not has_spare) else _DEPTH
