"""The saver: checkpoints, signals and walltime around a loop that stays the user's own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain import log
from hpctrain.checkpoint import CheckpointStore, Keep, Loaded, store_class
from hpctrain.data import Batch, Loader
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.exit_codes import REQUEUE
from hpctrain.faults import (
    SIGNALS,
    Agreed,
    Boundary,
    BoundaryMessage,
    Governor,
    Preemption,
    injection_of,
    time_left_s,
)
from hpctrain.log import format_seconds
from hpctrain.saver.parts import Parts, capture_randomness, restore_randomness
from hpctrain.saver.timing import SaveClock, check_timing
from hpctrain.world import AgreedExit, World, agree, roll_call

__all__ = ["EVENTS", "Batches", "Restored", "Saver"]

EVENTS = ("restored", "saved", "stopping")


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The checkpoint that a run resumes from."""

    step: int
    path: str
    metrics: Mapping[str, float]
    note: Mapping[str, Any]
    num_ranks: int
    """Of the run that wrote it. With the same number of ranks, the run resumes bit for bit."""


class Batches(Iterator[Batch]):
    """An iterator over batches, with a length if known, for progress bars.

    Args:
        batches: The batches.
        length: How many there are from the first to the last; None: unknown.
    """

    def __init__(self, batches: Iterator[Batch], length: int | None) -> None:
        self._batches, self._length = batches, length

    def __next__(self) -> Batch:
        """Collective: the next batch; the previous one is done."""
        return next(self._batches)

    def __len__(self) -> int:
        """Batches of the whole loop, including those already returned.

        Raises:
            TypeError: the data are a stream, which has no length.
        """
        if self._length is None:
            raise TypeError("a stream has no length")
        return self._length


class Saver:
    """Collective: saves a run and resumes it; every rank makes it with the same arguments.

    Each turn of `for batch in saver.resume()` is a step boundary. There all ranks learn the same
    things at the same step: that one of them got a signal, that a checkpoint is due, that the
    walltime is nearly over, that a disk is full.

    Args:
        world: The ranks.
        directory: Where checkpoints are, and go; on a file system that all nodes see.
        parts: Replicas, and the loader that the loop is over.
        named: Anything else with `state_dict` and `load_state_dict`, by name.
        keep: Which checkpoints stay.
        every_s: Seconds between checkpoints; `auto` measures what a save costs and chooses what
            loses least at one failure in `mtbf_hours`; None: by `every_steps` alone.
        every_steps: Step boundaries between checkpoints.
        mtbf_hours: Mean time between failures of the whole job.
        lead_s: Time that stays unused at the end of the walltime, besides that of the last save.
        signals: Those that stop the run; none leaves all signals unchanged.
        writers_per_node: Ranks of each node that write; None decides.
        asynchronous: Train while the checkpoint is written.
        note: Plain data for the manifest, such as the configuration.
        timeout_s: How late a rank may be, at a boundary, for a save or for a load, before the
            job ends and names it.
        store: The checkpoint store, by name: `hpctrain`, or one that an installed package adds.

    Raises:
        ConfigError: on all ranks, when an argument is wrong on any.
        CheckpointError: on all ranks; the directory cannot be used.
    """

    def __init__(
        self,
        world: World,
        directory: str | os.PathLike[str],
        *parts: object,
        named: Mapping[str, object] | None = None,
        keep: Keep | None = None,
        every_s: float | Literal["auto"] | None = "auto",
        every_steps: int | None = None,
        mtbf_hours: float = 24.0,
        lead_s: float = 60.0,
        signals: Sequence[str] = SIGNALS,
        writers_per_node: int | None = None,
        asynchronous: bool = True,
        note: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        store: str = "hpctrain",
    ) -> None:
        self.world = world
        self._preemption: Preemption | None = None
        trouble = None if timeout_s > 0 else f"timeout_s={timeout_s:g} must be more than 0"
        try:
            self._parts = Parts(parts, named or {})
            self._timing = check_timing(every_s, every_steps, mtbf_hours, lead_s)
            kind = store_class(store)
            self._preemption = Preemption(signals) if signals else None
        except ConfigError as error:
            trouble = trouble or str(error)
        self._late_s = timeout_s
        with self._waiting() if trouble is None else nullcontext():
            agree(world.comm, trouble, error=ConfigError)
            self._store: CheckpointStore = kind(
                world,
                Path(directory),
                keep=keep or Keep(),
                writers_per_node=writers_per_node,
                asynchronous=asynchronous,
                late_s=timeout_s,
            )
            self._boundary = Boundary(world, timeout_s=timeout_s, watchdog=self._parts.watchdog)
        self._note = dict(note or {})
        self._listeners: dict[str, list[Callable[..., object]]] = {name: [] for name in EVENTS}
        self._step = 0
        self._saved_step: int | None = None
        self._begun = False
        self._due = Agreed()
        self._is_due_by_count = False
        """Until the step is finished in which the count said so."""
        self._stop_reason: str | None = None
        self._agreed = Agreed()
        self._governor = Governor(self._timing.pace, now_s=time.monotonic())
        self._clock = SaveClock(self._governor)
        self._began = self._at = time.monotonic()
        self._num_saves = 0
        self._slow: tuple[int, ...] = ()
        self._told_unseen = False
        self._injection = injection_of(world)
        world.at_exit(self.close)

    @property
    def step(self) -> int:
        """Step boundaries that the whole run has passed, over all its jobs."""
        return self._step

    @property
    def agreed(self) -> Agreed:
        """What all ranks learned at the last boundary: a signal, a save due, the time left."""
        return self._agreed

    def on(self, event: str, function: Callable[..., object]) -> None:
        """Call a function on all ranks: `restored` gets a Restored, `saved` a step, `stopping` why.

        Raises:
            ConfigError: there is no such event.
        """
        if event not in self._listeners:
            raise ConfigError(f"event {event!r} is none of {', '.join(EVENTS)}")
        self._listeners[event].append(function)

    def restore(self) -> Restored | None:
        """Collective: take over the newest valid checkpoint that fits; None where there is none.

        Model, optimizer, loss scale, loader, further parts, and with the same number of ranks the
        random generators and buffers of every rank; with another number, or on another grid, every
        rank gets a random stream that no rank has drawn from before.

        Raises:
            CheckpointError: on all ranks; checkpoints are there, and none of them can be used.
        """
        with self._waiting():
            return self._restore()

    def _waiting(self) -> AbstractContextManager[None]:
        """A block whose collectives end the job when a rank is late for them."""
        return self.world.watching.allow(self._late_s)

    def _restore(self) -> Restored | None:
        """Collective: what `restore` does, while the ranks wait for each other."""
        self._begun = True
        roll_call(self.world.comm, "restoring a run")  # parts may wait longer than the saver
        loaded = self._store.load(like=self._parts.like)
        if loaded is None:
            self.world.streams.bind_own()
            return None
        self._take(loaded)
        restored = Restored(
            step=loaded.step,
            path=str(loaded.path),
            metrics=loaded.metrics or {},
            note=(loaded.note or {}).get("user", {}),
            num_ranks=(loaded.note or {})["num_ranks"],
        )
        if self.world.rank == 0:
            log.notice(f"resuming from step {restored.step} of {restored.path}")
        self._notify("restored", restored)
        return restored

    def _take(self, loaded: Loaded) -> None:
        own = loaded.own
        trouble = self._parts.trouble_with(list(loaded.state))
        trouble = trouble or self._parts.trouble_with_optimizers(loaded.state)
        if trouble is None:
            changes = self._parts.changed_options(loaded.state)
            if changes and self.world.rank == 0:
                log.warn(f"the checkpoint's options are kept: {', '.join(changes)}")
            try:
                self._parts.restore(loaded.state, own)
            except (KeyError, ValueError, RuntimeError) as error:
                trouble = str(error)
        whole = trouble and f"{loaded.path} is not a checkpoint of this run: {trouble}"
        agree(self.world.comm, whole, error=CheckpointError)
        self._step = self._saved_step = loaded.step
        if own is not None and self._is_same_place(own):
            restore_randomness(own["random"], self.world.device)
        else:
            position = self._parts.num_samples
            self.world.streams.bind_own(loaded.step if position is None else position)
        self._at = time.monotonic()
        self._governor.saved(self._at)

    def _is_same_place(self, own: Mapping[str, Any]) -> bool:
        """Collective: whether every rank draws from the stream that it drew from, as on one grid.

        On another grid other ranks must draw the same numbers.
        """
        was = tuple(own.get("place", (self.world.rank, 0)))
        return all(self.world.comm.allgather(was == self.world.streams.place))

    def resume(self, num_epochs: int = 1) -> Batches:
        """Collective: the batches that are left of `num_epochs` epochs, in this job.

        Work on a batch must be done when the next one is requested: that is the
        step boundary. A partial accumulation window at the end of an epoch is stepped by
        `replica.step()` on the last batch. After the last epoch the run is saved; started again,
        there is nothing left to do, and rank 0 says so. `len` says how many batches are left.

        Raises:
            SystemExit: with code 75 on all ranks, saved, when a signal or the walltime says so.
        """
        self._begin()
        loader = self._loader()
        num_next, num_more = loader.num_next, num_epochs - loader.epoch - 1
        length = None if num_next is None else num_next + num_more * len(loader)
        return Batches(self._batches_of(self.epochs(num_epochs)), 0 if num_more < 0 else length)

    def _batches_of(self, epochs: Iterator[int]) -> Iterator[Batch]:
        for _ in epochs:
            yield from self.batches()

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Collective: the epochs that are left; loop over `batches()` in each, then evaluate.

        A job that was stopped between the last batch and the end of an epoch resumes at that
        epoch with no batches, so that what follows the batches is done once.
        """
        loader = self._loader()
        self._begin()
        if loader.epoch >= num_epochs and self.world.rank == 0:
            done = log.format_done(loader.epoch, num_epochs, "epochs")
            log.notice(
                f"nothing is left to do: {done}, at step {self._step} of "
                f"{self._store.directory}; raise num_epochs to train further, or give another "
                "directory to start over"
            )
        while loader.epoch < num_epochs:
            epoch = loader.epoch
            yield epoch
            if loader.epoch == epoch:  # the loop over its batches was left early
                loader.end_epoch()
            self._act(None)
        if self._saved_step != self._step:
            self.save(wait=True)
        self._store.wait()

    def batches(self) -> Batches:
        """Collective: what is left of this epoch; each turn is a step boundary.

        Replicas get to know which batch is the last, so that `step()` on it completes a partial
        accumulation window and the loop sees every step. `len` says how many batches are left.
        """
        self._begin()
        loader = self._loader()
        return Batches(self._turns(loader), loader.num_next)

    def _turns(self, loader: Loader) -> Iterator[Batch]:
        replicas = self._parts.replicas.values()
        if any(replica.accumulate > 1 for replica in replicas):
            loader.look_ahead()
        try:
            for batch in loader:
                for replica in replicas:
                    replica.begin_batch(last=loader.is_last is True)
                yield batch
                self.boundary()
            self._flush()
        finally:
            for replica in replicas:
                replica.begin_batch(last=False)

    def _flush(self) -> None:
        """Collective: step the windows that the loop has left open at the end of an epoch."""
        for replica in self._parts.replicas.values():
            if not replica.is_mid_step:
                continue
            replica.step(flush=True)
            if not self._told_unseen and self.world.rank == 0:
                log.warn(
                    "the last accumulation window of an epoch was open when the loop over its "
                    "batches ended, and was stepped after it: schedules and averages that follow "
                    "replica.step() miss this step; call replica.step() after every backward, the "
                    "same number of times on every batch, or replica.step(flush=True) on the last"
                )
            self._told_unseen = True

    def _loader(self) -> Loader:
        if self._parts.loader is None:
            raise ConfigError(
                "this Saver has no loader to loop over; give it one, or loop over your own data "
                "and call saver.boundary() after each step"
            )
        return self._parts.loader

    def _begin(self) -> None:
        """Collective: restore, once; a new run saves what it begins with.

        So a disk that is full or not writable is known at once and not after hours, and so is what
        a save costs.
        """
        if not self._begun:
            if self.restore() is None and self._timing.by_time:
                self.save()
            self._at = time.monotonic()

    def boundary(self, metrics: Mapping[str, float] | None = None) -> None:
        """Collective: a step is done; call it once per step, on every rank.

        Args:
            metrics: What is known of the weights now, for a checkpoint that may be made here.

        Raises:
            SystemExit: with code 75 on all ranks, saved, when a signal or the walltime says so.
            CheckpointError: on all ranks; a checkpoint could not be written.
        """
        self._store.claim()
        self._step += 1
        if self._injection is not None:
            self._injection.act(self._step, self._parts.replicas.values())
        now = time.monotonic()
        took_s, self._at = now - self._at, now
        self._clock.look(now, is_saving=self._store.is_saving)
        self._governor.step_took(took_s)
        self._agreed = self._boundary.meet(self._message(now))
        with self._waiting():
            self._act(metrics)

    def _message(self, now: float) -> BoundaryMessage:
        """What this rank has to say; time is kept by rank 0 alone."""
        signal = None if self._preemption is None else self._preemption.requested
        first = self.world.rank == 0
        left_s = time_left_s() if first else None
        is_due = first and self._is_due(now)
        save_due = is_due or self._is_due_by_count or self._timing.is_due_by_count(self._step)
        is_late = first and self._governor.must_stop(left_s, save_due=save_due)
        return BoundaryMessage(
            signal=signal,
            save=is_due,
            stop=self._stop_reason is not None or is_late,
            failure=self._store.failed is not None,
            left_s=left_s,
        )

    def _is_due(self, now: float) -> bool:
        return self._timing.save_is_due(
            self._governor, now, running_s=now - self._began, num_saves=self._num_saves
        )

    def _act(self, metrics: Mapping[str, float] | None) -> None:
        """Collective: do what the ranks have agreed on, unless a step is unfinished."""
        self._due = _either(self._due, self._agreed)
        if self._timing.is_due_by_count(self._step) and self._saved_step != self._step:
            self._is_due_by_count = True
        if self._parts.is_mid_step:
            return
        due, self._due = self._due, Agreed()
        counted = self._is_due_by_count
        if due.failure is not None:
            agree(self.world.comm, self._store.failed, error=CheckpointError)
        if due.signal is not None or due.stop is not None:
            self._leave(due, metrics)
        if due.save is not None or counted:
            self.save(metrics=metrics)

    def save(self, metrics: Mapping[str, float] | None = None, *, wait: bool = False) -> None:
        """Collective: make a checkpoint now; between steps only.

        Args:
            metrics: What is known of these weights; `keep` may choose the best by them.
            wait: Return when it is complete on disk.

        Raises:
            ConfigError: a step is unfinished.
            CheckpointError: on all ranks; this one, or the one before, could not be written.
        """
        if self._parts.is_mid_step:
            raise ConfigError(
                "a checkpoint was requested in the middle of a step, with pending gradients; "
                "save after replica.step(), or step(flush=True) first"
            )
        with self._waiting():
            self._save(metrics, wait=wait)

    def _save(self, metrics: Mapping[str, float] | None, *, wait: bool) -> None:
        """Collective: what `save` does, while the ranks wait for each other."""
        began = time.monotonic()
        roll_call(self.world.comm, "saving a run")  # parts may wait longer than the saver
        common, own = self._parts.capture(self.world)
        own["random"] = capture_randomness(self.world.device)
        own["place"] = list(self.world.streams.place)
        self._store.save(
            common,
            step=self._step,
            own=own,
            note={"num_ranks": self.world.size, "user": self._note},
            metrics=dict(metrics or {}),
            wait=wait,
        )
        self._governor.saved(began)
        self._saved_step = self._step
        self._is_due_by_count = False
        self._num_saves += 1
        self._at = time.monotonic()
        self._clock.began(began, self._at)
        self._clock.look(self._at, is_saving=self._store.is_saving)
        self._name_stragglers()
        self._notify("saved", self._step)

    def _name_stragglers(self) -> None:
        """Collective: say which ranks hold the others up, when that changes."""
        finding = self._boundary.compare_ranks(step=self._step)
        slow = finding.slow if finding.is_news else ()
        if finding.is_news and slow != self._slow and self.world.rank == 0:
            log.notice(finding.text)
        self._slow = slow

    def request_stop(self, reason: str) -> None:
        """Make all ranks save and exit at the next boundary, as a signal would."""
        self._stop_reason = reason

    def _leave(self, due: Agreed, metrics: Mapping[str, float] | None) -> None:
        if due.signal_by is not None:
            why = f"rank {due.signal_by.rank} got {due.signal}"
        else:
            left = "" if due.left_s is None else f", {format_seconds(due.left_s)} are left"
            reason = self._stop_reason or "the walltime is nearly over"
            why = (
                reason if due.stop is None else self._boundary.broadcast(due.stop, reason)
            ) + left
        if self._saved_step != self._step:
            self.save(metrics, wait=True)
        self._store.wait()
        if self.world.rank == 0:
            log.notice(f"{why}; saved step {self._step}: run this job again to resume")
        self._notify("stopping", why)
        raise AgreedExit(REQUEUE)

    def describe(self) -> str:
        """What was measured and what is done about it, in plain words."""
        return self._governor.describe(self._agreed.left_s)

    def _notify(self, event: str, said: object) -> None:
        for function in self._listeners[event]:
            function(said)

    def close(self) -> None:
        """Collective: end the writing that is under way; signals become what they were."""
        if self._preemption is not None:
            self._preemption.close()
        with self._waiting():
            self._store.close()
            self._boundary.close()


def _either(before: Agreed, now: Agreed) -> Agreed:
    """What is still to be acted on: the first of each kind."""
    return Agreed(
        signal=before.signal or now.signal,
        signal_by=before.signal_by or now.signal_by,
        save=before.save or now.save,
        stop=before.stop or now.stop,
        failure=before.failure or now.failure,
        left_s=now.left_s,
    )
