"""The loader: this rank's part of every global batch, on the device, resumable anywhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.data.arguments import (
    LoaderArguments,
    LoaderSetup,
    Shuffle,
    digest_data,
    resolve_arguments,
)
from hpctrain.data.feeds import Where, order_of
from hpctrain.data.mapped import Collate
from hpctrain.data.partition import Part
from hpctrain.data.shuffle import Order
from hpctrain.data.source import Batch
from hpctrain.data.stream import Split
from hpctrain.data.transfer import Sent, Transfer, read_ahead
from hpctrain.errors import ConfigError, DataError
from hpctrain.world import World, agree, observed

if TYPE_CHECKING:
    from hpctrain.grid import Grid

__all__ = ["Loader", "LoaderProgress", "read_state", "trouble_with"]


_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderProgress:
    """What a loader must know to resume; the same on every rank."""

    seed: int
    epoch: int
    consumed: int
    """Samples of this epoch that were returned, over all ranks.

    With `split`, places in batches: streams that have ended leave some empty.
    """
    total: int
    """Samples of the whole run that were returned, over all ranks."""
    order: str
    """How samples are ordered: `keyed`, `numpy`, `stored`, `local`, `stream`, `split`, `weighted`
    or `lengths`.
    """
    num_samples: int | None
    fingerprint: int
    """Of the epoch's order."""
    num_ranks: int
    """Over which the run that wrote this divided batches; relevant only for `local` and `split`."""

    def to_state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"version": _VERSION, **asdict(self)}


def read_state(state: Mapping[str, Any]) -> LoaderProgress:
    """What `to_state` wrote.

    Raises:
        ConfigError: it is not the state of a loader, or of another version.
    """
    names = {field.name for field in fields(LoaderProgress)}
    if state.get("version") != _VERSION or names - set(state):
        raise ConfigError(
            f"this is not the state of a loader of version {_VERSION}: it has {sorted(state)}"
        )
    return LoaderProgress(**{name: state[name] for name in names})


def trouble_with(saved: LoaderProgress, own: LoaderProgress) -> str | None:
    """Why a run cannot resume from a state with this loader, or None.

    Args:
        saved: The state.
        own: What this loader would write there, with the state's seed and epoch.
    """
    for name in ("num_samples", "order"):
        was, now = getattr(saved, name), getattr(own, name)
        if was != now:
            return (
                f"the run started with {name}={was!r}, and this loader has {now!r}; resume with "
                "the same data in the same order, or start a new run in another directory"
            )
    if saved.fingerprint != own.fingerprint and saved.order == "local":
        if saved.consumed:
            return (
                "the samples were distributed in another order when the epoch was stopped; "
                "scatter them with the same seed and epoch, or use a global shuffle"
            )
    elif saved.fingerprint != own.fingerprint and saved.order in ("weighted", "lengths"):
        if saved.consumed:
            changed = (
                "the weights" if saved.order == "weighted" else "the lengths, batches or buckets"
            )
            return (
                f"the plan of epoch {saved.epoch} is different here: {changed} have changed, or "
                "numpy has; resume with the same ones until the epoch ends"
            )
    elif saved.fingerprint != own.fingerprint:
        return (
            f"the {saved.order} order of epoch {saved.epoch} is different here, because numpy's "
            "version is; resume with the numpy that started the epoch, or use shuffle='keyed'"
        )
    if not saved.consumed or saved.num_ranks == own.num_ranks:
        return None
    stopped = f"stopped inside an epoch on {saved.num_ranks} ranks and cannot resume on"
    if saved.order == "local":
        return (
            f"a local shuffle was {stopped} {own.num_ranks}; use the same number, or a global "
            "shuffle"
        )
    if saved.order == "split":
        return (
            f"streams that are split by rank were {stopped} {own.num_ranks}: the new split puts "
            f"other samples on each rank; use {saved.num_ranks} ranks until the epoch ends, or "
            "give all ranks one stream and leave split='already' out"
        )
    return None


class Loader:
    """Collective: batches for all ranks; `for batch in loader` is one epoch.

    Every rank must create it with the same arguments and equal data, and iterate equally often.
    Every sample is returned exactly once per epoch over all ranks, in batches that do not depend on
    their number.

    Args:
        world: The ranks.
        data: Arrays or tensors, or a tuple or dict of them; a source with `take`; scattered shares;
            a `Dataset`, an `IterableDataset` or a `DataLoader` of torch.
        global_batch: Samples in a step over all ranks; a DataLoader's own where it is left out.
        shuffle: True, `numpy` or `keyed`: a new global order in every epoch; False: the data's own;
            `local`: scattered shares are shuffled within each rank. None shuffles what can be.
        seed: Of the orders; None takes the world's, or that of the scattered shares.
        drop_last: Leave out a last batch that is not full.
        even_last: Make the last two batches equal where the last would be less than half full.
        weights: How much of each batch each rank has, in proportion; None deals out evenly.
        prefetch: Batches ahead: of a thread, or of each worker. None decides: a thread where
            batches come from files, or are large and a GPU or further cores can take them.
        num_workers: Processes that fetch samples of a `Dataset`.
        start_method: `forkserver` or `spawn`.
        collate: Makes a batch of a list of samples, as in torch.
        device: Where batches go; None takes the world's.
        split: Of streams (`IterableDataset`). None: every rank has the same stream, and keeps its
            part of it; they are compared. `same`: only their lengths are compared. `already`:
            every rank's stream is its own part of the data.
        sample_weights: One number for each sample: an epoch is draws with replacement, as likely as
            they say.
        num_draws: Draws in an epoch; None: as many as there are samples.
        lengths: One number for each sample: an epoch has every sample once, in global batches of
            similar lengths that come in a random order.
        bucket_batches: Batches whose samples are sorted by length together; None: 100.
        grid: Where ranks share the model: batches are divided over its data dimension, and ranks of
            one data coordinate get the same samples. `weights` are then of its coordinates.

    Raises:
        ConfigError: on all ranks, when an argument is wrong on any, or differs.
    """

    def __init__(
        self,
        world: World,
        data: Any,
        *,
        global_batch: int | None = None,
        shuffle: Shuffle = None,
        seed: int | None = None,
        drop_last: bool | None = None,
        even_last: bool = True,
        weights: Sequence[float] | None = None,
        prefetch: int | None = None,
        num_workers: int | None = None,
        start_method: str | None = None,
        collate: Collate | None = None,
        device: torch.device | str | None = None,
        split: Split = None,
        sample_weights: Any = None,
        num_draws: int | None = None,
        lengths: Any = None,
        bucket_batches: int | None = None,
        grid: Grid | None = None,
    ) -> None:
        given = LoaderArguments(
            global_batch=global_batch,
            shuffle=shuffle,
            drop_last=drop_last,
            even_last=even_last,
            weights=weights,
            prefetch=prefetch,
            num_workers=num_workers,
            start_method=start_method,
            collate=collate,
            split=split,
            sample_weights=sample_weights,
            num_draws=num_draws,
            lengths=lengths,
            bucket_batches=bucket_batches,
        )
        self.world = world
        self._rank = world.rank if grid is None else grid.coordinate.data
        self._num_ranks = world.size if grid is None else grid.data
        self._transfer = Transfer(torch.device(world.device if device is None else device))
        self._setup = self._resolve_together(data, given)
        # Streams that are split already are counted once for each data coordinate.
        apart = grid is not None and self._setup.order == "split"
        self._comm = grid.comm("data") if grid is not None and apart else world.comm
        self._shares = getattr(data, "order", None)
        """The order in which scattered data were distributed to the ranks."""
        scattered_seed = getattr(self._shares, "seed", None)
        own_seed = world.seed if scattered_seed is None else scattered_seed
        self._seed = own_seed if seed is None else seed
        self._epoch = 0
        self._consumed = 0
        self._total = 0
        self._begun = False  # whether a loop over this epoch has begun here
        self._loops = 0
        self._part: Part | None = None
        self._looks_ahead = False
        self._ends: bool | None = None
        self._check_alike(
            "hpctrain.Loader",
            self.state_dict()
            | {"batches": self._setup.batching, "split": split}
            | {"digest of sample_weights or lengths": getattr(self._setup.draw, "digest", None)}
            | {"weights": None if weights is None else [float(w) for w in weights]},
        )
        if world.size > 1:
            self._check_same_data(data)
        world.at_exit(_closer(weakref.ref(self)))

    def _resolve_together(self, data: Any, given: LoaderArguments) -> LoaderSetup:
        """Collective: raise on all ranks what is wrong on any."""
        setup, trouble = None, None
        try:
            setup = resolve_arguments(
                data,
                given,
                rank=self._rank,
                num_ranks=self._num_ranks,
                has_spare=self.world.num_spare_cores > 0 or not self._transfer.is_idle,
                on_grid=self._num_ranks < self.world.size,
            )
        except ConfigError as error:
            trouble = str(error)
        agree(self.world.comm, trouble, error=ConfigError)
        if setup is None:
            raise ConfigError(trouble)
        return setup

    def _check_alike(self, what: str, settings: Mapping[str, object]) -> None:
        """Collective: refuse what differs between ranks."""
        first = self.world.comm.bcast(dict(settings), root=0)
        differs = [
            f"{name}={value!r} where rank 0 has {first.get(name)!r}"
            for name, value in settings.items()
            if value != first.get(name)
        ]
        trouble = f"{what}: {', '.join(differs)}; all ranks must agree" if differs else None
        agree(self.world.comm, trouble, error=ConfigError)

    def _check_same_data(self, data: Any) -> None:
        """Collective: refuse data of random access that are other samples on some rank."""
        digest, trouble = None, None
        try:
            digest = digest_data(data)
        except Exception as error:  # reading samples may raise anything, and the others wait
            trouble = f"hpctrain.Loader: {type(error).__name__}: {error}"
        agree(self.world.comm, trouble, error=DataError)
        if digest != self.world.comm.bcast(digest, root=0):
            trouble = (
                "hpctrain.Loader: the data have as many samples as rank 0's, but not the same "
                "ones. A Loader divides one data set over the ranks, so samples of data that are "
                "already split by rank would be lost: give every rank the whole data set, or "
                "distribute it with hpctrain.scatter"
            )
        agree(self.world.comm, trouble, error=ConfigError)

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, or that the next loop is over."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that were returned, over all ranks.

        Of streams that are split already: places in batches, of which streams that have ended
        leave some empty.
        """
        return self._consumed

    @property
    def total(self) -> int:
        """Samples of the whole run that were returned, over all ranks."""
        return self._total

    @property
    def num_samples(self) -> int:
        """How many samples of the current batch are this rank's: for `replica.backward`."""
        return 0 if self._part is None else self._part.num_samples

    @property
    def global_samples(self) -> int:
        """How many samples the current batch has over all ranks."""
        return 0 if self._part is None else self._part.global_samples

    @property
    def num_left(self) -> int | None:
        """Batches of this epoch that were not returned yet; None for a stream."""
        num_samples = self._setup.feed.num_samples
        if num_samples is None:
            return None
        return self._setup.batching.count(num_samples - self._consumed)

    @property
    def num_next(self) -> int | None:
        """Batches that the next loop has: the rest of an epoch that was resumed, or a whole one."""
        if self._setup.feed.num_samples is None:
            return None
        return len(self) if self._begun else self.num_left

    @property
    def is_last(self) -> bool | None:
        """Whether the current batch is the last of its epoch; None: only `look_ahead` can tell."""
        num_left = self.num_left
        return self._ends if num_left is None else num_left == 0

    def look_ahead(self) -> None:
        """Read a stream one batch further from the next loop on, so that `is_last` is known."""
        self._looks_ahead = self._setup.feed.num_samples is None

    def __len__(self) -> int:
        """Steps in a whole epoch; the same on every rank."""
        num_samples = self._setup.feed.num_samples
        if num_samples is None:
            raise TypeError("a stream has no length")
        return self._setup.batching.count(num_samples)

    def __iter__(self) -> Iterator[Batch]:
        """Collective: this rank's part of each batch of an epoch.

        After `load_state_dict` it is what is left of the epoch. After a loop that was left early,
        the next one begins the next epoch.
        """
        if self._begun:
            self._next_epoch()
        self._begun = True
        self._loops += 1
        where = Where(seed=self._seed, epoch=self._epoch, start=self._consumed)
        self._setup.feed.prepare(where, self._comm)
        return self._loop(where, self._loops)

    def _loop(self, where: Where, number: int) -> Iterator[Batch]:
        arrivals = self._observed(self._arrivals(where))
        for part, batch in self._foreseen(arrivals) if self._looks_ahead else arrivals:
            if number != self._loops:
                break
            self._part = part
            self._total += part.global_samples
            self._consumed = part.stop
            if torch.is_grad_enabled():  # evaluation batches have no gradients
                self.world.shares.note(
                    num_samples=part.num_samples,
                    global_samples=part.global_samples,
                    size=self._num_ranks,
                )
            yield batch
        if torch.is_grad_enabled():
            self.world.shares.end_epoch()
        if number != self._loops:
            raise ConfigError(
                "another loop over this loader has begun, or a state was loaded; one loop at a "
                "time, or a loader for each"
            )
        self._next_epoch()

    def _observed(self, arrivals: Iterator[tuple[Part, Batch]]) -> Iterator[tuple[Part, Batch]]:
        """The same; waiting for each batch is a phase if the world has observers."""
        observers = self.world.observers
        return observed(arrivals, observers, "input") if observers else arrivals

    def _foreseen(self, arrivals: Iterator[tuple[Part, Batch]]) -> Iterator[tuple[Part, Batch]]:
        """The same, returned when it is known whether another one follows."""
        held = next(arrivals, None)
        while held is not None:
            following = next(arrivals, None)
            self._ends = following is None
            yield held
            held = following

    def _arrivals(self, where: Where) -> Iterator[tuple[Part, Batch]]:
        """Batches on the device, by as few steps as there must be: each costs every batch."""
        feed, transfer, depth = self._setup.feed, self._transfer, self._setup.depth
        if transfer.is_idle:
            return read_ahead(lambda: feed.read(where), depth) if depth else feed.read(where)

        def send() -> Iterator[tuple[Part, Sent]]:
            return ((part, transfer.send(batch)) for part, batch in feed.read(where))

        sent = read_ahead(send, depth) if depth else send()
        return ((part, transfer.receive(item)) for part, item in sent)

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._consumed = 0
        self._begun = False

    def end_epoch(self) -> None:
        """Leave out what is left of this epoch: the next loop is over the next one."""
        self._loops += 1
        self._next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, as plain data; the same on every rank and for any number of them.

        A batch counts as consumed once it was returned.
        """
        return self._progress(self._seed, self._epoch).to_state()

    def _progress(self, seed: int, epoch: int) -> LoaderProgress:
        order, num = self._setup.order, self._setup.feed.num_samples
        fingerprint = 0
        if order == "local" and isinstance(self._shares, Order):
            fingerprint = self._shares.fingerprint()  # another deal gives each rank other samples
        elif num is not None and order != "local":
            where = Where(seed=seed, epoch=epoch, start=0)
            fingerprint = order_of(self._setup.draw or order, num, where).fingerprint()
        return LoaderProgress(
            seed=seed,
            epoch=epoch,
            consumed=self._consumed,
            total=self._total,
            order=order,
            num_samples=num,
            fingerprint=fingerprint,
            num_ranks=self._num_ranks,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective: resume where a run stopped, on any number of ranks; `state` must match.

        Raises:
            ConfigError: on all ranks, when the state does not belong to these data, or differs.
        """
        trouble = None
        try:
            saved = read_state(state)
            trouble = trouble_with(saved, self._progress(saved.seed, saved.epoch))
        except ConfigError as error:
            trouble = str(error)
        agree(self.world.comm, trouble, error=ConfigError)
        self._check_alike("load_state_dict", state)
        self._seed, self._epoch = saved.seed, saved.epoch
        self._consumed, self._total = saved.consumed, saved.total
        self._begun = False
        self._loops += 1
        self._part = None

    def close(self) -> None:
        """End worker processes; the loader can be used again and starts new ones."""
        self._setup.feed.close()


def _closer(loader: weakref.ref[Loader]) -> Callable[[], None]:
    """Closes a loader that is still there: the world must not keep its data alive."""

    def close() -> None:
        alive = loader()
        if alive is not None:
            alive.close()

    return close
