"""Saving and loading state on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hpctrain import log
from hpctrain.checkpoint.agreeing import Holdings
from hpctrain.checkpoint.directory import (
    Entry,
    Keep,
    Neighbours,
    await_own_writing,
    describe_owner,
    list_checkpoints,
    sweep,
    verify,
)
from hpctrain.checkpoint.loading import Loaded, load
from hpctrain.checkpoint.offline import read_state
from hpctrain.checkpoint.parts import Staging
from hpctrain.checkpoint.saving import Saving, Settings, begin, prepare
from hpctrain.checkpoint.writing import Background, Record
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.world import World, agree, parse_cpus, roll_call

__all__ = ["Loaded", "Store"]

_GRACE_S = 60.0
"""How much longer rank 0 may take than the others before all learn how a save ended."""
_MARGIN_S = 5.0


class Store:
    """A directory of checkpoints. Collective to make, save, load, wait and close.

    A checkpoint is complete or it is not there: it is written under another name and renamed when
    all of it is on disk.
    """

    def __init__(
        self,
        world: World,
        directory: str | Path,
        *,
        keep: Keep | None = None,
        writers_per_node: int | None = None,
        asynchronous: bool = True,
        timeout_s: float = 1800.0,
        late_s: float | None = None,
    ) -> None:
        """Collective: open or make the directory; the arguments must match.

        Args:
            world: The ranks.
            directory: On a file system that all nodes share.
            keep: Which checkpoints stay; None: the last three.
            writers_per_node: How many ranks of each node write; None: as many as the size of the
                state deserves, at most four.
            asynchronous: Let a thread write during training; False: every save waits.
            timeout_s: How long a save may take until it counts as failed.
            late_s: How long a rank may be late for a save or a load before the job ends and names
                it; None: as long as a save may take.

        Raises:
            ConfigError: on all ranks: an argument is wrong.
            CheckpointError: on all ranks: the directory cannot be made.
        """
        self.directory = Path(directory).absolute()
        self.timeout_s = timeout_s
        self._world = world
        self._asynchronous = asynchronous
        self._settings = Settings(
            directory=self.directory,
            keep=Keep() if keep is None else keep,
            writers_per_node=writers_per_node,
            timeout_s=timeout_s,
            late_s=timeout_s if late_s is None else late_s,
        )
        self._neighbours = Neighbours(self.directory)
        mistake = self._settings.mistake()
        with self._waiting() if mistake is None else nullcontext():
            agree(world.comm, mistake, error=ConfigError)
            agree(world.comm, self._difference(), error=ConfigError)
            agree(world.comm, self._open(), error=CheckpointError)
        self._saving: Saving | None = None
        self._last: Path | None = None
        self._staging = Staging()
        self._holdings = Holdings()
        self._background, self._foreground = self._make_threads()
        self._is_closed = self._is_claimed = False
        world.at_exit(self.close)

    def save(
        self,
        state: object,
        *,
        step: int,
        own: object | None = None,
        note: object = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Collective: save a state; blocked until it is copied, or with `wait` until it is there.

        A save that is still being written is waited for.

        Args:
            state: A tree of dictionaries, lists, tuples, tensors, arrays and plain values, the same
                on all ranks. Each writer copies and writes its part of it. Where a tensor is
                sharded, each rank gives its `Piece`; together they must be the whole, and what
                several ranks hold is written once.
            step: The number of steps it stands for; must match.
            own: A tree of this rank's own state, such as its random state; on all ranks or on
                none.
            note: Plain values for the manifest, rank 0's.
            metrics: Numbers by name, rank 0's; `keep` may choose by them.
            wait: Return only when the checkpoint is complete.

        Raises:
            CheckpointError: on all ranks: something in the state cannot be stored or differs
                between ranks (the place is named), or the save before this one failed.
        """
        if self._is_closed:
            raise CheckpointError(f"the store of {self.directory} is closed")
        with self._waiting():
            self._save(state, step=step, own=own, note=note, metrics=metrics, wait=wait)

    def _save(
        self,
        state: object,
        *,
        step: int,
        own: object | None,
        note: object,
        metrics: Mapping[str, float] | None,
        wait: bool,
    ) -> None:
        """Collective: what `save` does, while the ranks wait for each other."""
        self.claim()
        if self._saving is not None:
            if self._world.rank == 0 and self.is_saving:
                log.notice(f"waiting for {self._saving.path}, which is still being written")
            self.wait()
        prepared, trouble = None, None
        try:
            prepared = prepare(state, step=step, own=own, note=note, metrics=metrics)
        except CheckpointError as error:
            trouble = str(error)
        saving = begin(
            self._world,
            self._settings,
            prepared,
            trouble,
            self._staging,
            self._neighbours,
            self._holdings,
        )
        self._saving = saving
        at_once = wait or not self._asynchronous
        if saving.task is not None:
            (self._foreground if at_once else self._background).start(saving.task)
        if at_once:
            self.wait()

    @property
    def is_saving(self) -> bool:
        """Whether this rank is writing; on rank 0, whether the checkpoint is not complete yet."""
        task = self._saving.task if self._saving else None
        return task is not None and task.is_running

    @property
    def failed(self) -> str | None:
        """What has gone wrong on this rank with the save that was begun last, or None."""
        task = self._saving.task if self._saving else None
        return None if task is None else task.trouble(self.timeout_s)

    def poll(self) -> None:
        """Raise if writing has failed on this rank. Cheap; not collective.

        Raises:
            CheckpointError: the disk is full, too slow, or something else; the file is named.
        """
        trouble = self.failed
        if trouble is not None:
            raise CheckpointError(trouble)

    def wait(self) -> Path | None:
        """Collective: wait until the last save is complete.

        Returns:
            The newest checkpoint that this store has saved.

        Raises:
            CheckpointError: on all ranks: it has failed. The next save starts afresh.
        """
        saving = self._saving
        if saving is None:
            return self._last
        with self._waiting():
            return self._wait(saving)

    def _wait(self, saving: Saving) -> Path:
        """Collective: what `wait` does with a save that has begun.

        A rank that waits for its disk extends the others' timeout; one that does not reply gets no
        extension.
        """
        patience = self._world.watching.patience
        with patience(self.timeout_s + _GRACE_S):
            trouble = self._await_own(saving)
        roll_call(self._world.comm, "waiting for a checkpoint", timeout_s=self.timeout_s + _GRACE_S)
        told: list[tuple[str | None, list[Record]]] = self._world.comm.allgather(
            (trouble, saving.written if saving.records is None else [])
        )
        if saving.records is not None and saving.task is not None:
            for why, written in told:
                for record in written:
                    saving.records.add(record)
                if why is not None:
                    saving.records.fail(why)
            # A little longer than its own deadline: its message names the missing ranks.
            with patience(self.timeout_s + _GRACE_S):
                trouble = saving.task.outcome(self.timeout_s + _MARGIN_S)
        self._saving = None
        if saving.task is not None and saving.task.is_running:
            # It hangs in the file system and holds its memory: the next save has others.
            self._staging = Staging()
            self._background, self._foreground = self._make_threads()
        agree(
            self._world.comm,
            trouble,
            error=CheckpointError,
            timeout_s=self.timeout_s + 2 * _GRACE_S,
        )
        self._last = saving.path
        return self._last

    def load(
        self, path: str | Path | None = None, *, like: Mapping[str, object] | None = None
    ) -> Loaded | None:
        """Collective: load the newest valid checkpoint, whatever number of ranks wrote it.

        Damaged ones are warned about by name, and the one before is taken.

        Args:
            path: A certain checkpoint; None: the newest valid one of the directory.
            like: For some keys of the state a tree whose tensors must have the same names and
                shapes, such as `{"model": model.state_dict()}`; others are refused. Where it has a
                `Piece`, this rank gets that piece of the tensor, regardless of who wrote it. A
                function of place and shape instead of a tree says which piece of each tensor is
                wanted.

        Returns:
            None if the directory holds no checkpoint.

        Raises:
            CheckpointError: on all ranks: there are checkpoints and none is valid, or the one that
                was asked for is not.
        """
        self.wait()
        if self._world.rank == 0:
            self._neighbours.look()
        with self._waiting():
            return load(
                self._world,
                self.directory,
                path=None if path is None else Path(path).absolute(),
                like=like,
                timeout_s=self.timeout_s,
            )

    def list(self) -> Sequence[Entry]:
        """The checkpoints of the directory, oldest first, damaged ones included. Not collective."""
        return list_checkpoints(self.directory)

    @staticmethod
    def entries(directory: Path) -> Sequence[Entry]:
        """The same of any directory."""
        return list_checkpoints(directory)

    @staticmethod
    def verify(path: Path) -> Sequence[str]:
        """Read a whole checkpoint and compare all checksums; returns what is wrong."""
        return verify(path)

    @staticmethod
    def read(path: Path) -> Any:
        """The state of a checkpoint, checked, on the CPU, pieces put together."""
        return read_state(path)

    def claim(self) -> None:
        """Collective: refuse a directory that another job of rank 0's host is saving into.

        The first save does it; earlier is better for who is going to save. Again: nothing happens.

        Raises:
            CheckpointError: on all ranks: the other process is named.
        """
        if self._is_claimed:
            return
        self._is_claimed = True
        trouble = self._neighbours.find_running_writer() if self._world.rank == 0 else None
        with self._waiting():
            agree(self._world.comm, trouble, error=CheckpointError)

    def close(self) -> None:
        """Collective: wait for the last save and end the thread. Again: nothing happens."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            for thread in (self._background, self._foreground):
                thread.close(timeout_s=_GRACE_S)

    def _waiting(self) -> AbstractContextManager[None]:
        """A block whose collectives end the job when a rank is late for them."""
        return self._world.watching.allow(self._settings.late_s)

    def _await_own(self, saving: Saving) -> str | None:
        """Wait for this rank's part; rank 0 also has the end to wait for, later."""
        if saving.task is None or saving.records is not None:
            return None
        return saving.task.outcome(self.timeout_s)

    def _difference(self) -> str | None:
        """Collective: how the settings differ from rank 0's, or None."""
        mine = (self._settings, self._asynchronous)
        first = self._world.comm.bcast(mine, root=0)
        if mine != first:
            return f"a store of {mine} is opened here and one of {first} on rank 0; use the same"
        return None

    def _open(self) -> str | None:
        """Rank 0's part: the directory, without what killed saves have left."""
        if self._world.rank != 0:
            return None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._world.watching.patience(self.timeout_s + _GRACE_S):
                unfinished = await_own_writing(self.directory, self.timeout_s)
            swept = sweep(self.directory, describe_owner(self._world.launch.job_id))
            self._neighbours.look()
        except OSError as error:
            return f"{self.directory} cannot be written to ({error.strerror})"
        if unfinished is not None:
            return (
                f"this process has been writing {unfinished} for more than {self.timeout_s:g} s; "
                "the disk does not respond: save into another directory"
            )
        if swept:
            log.notice(f"{self.directory}: removed {len(swept)} unfinished checkpoints")
        return None

    def _make_threads(self) -> tuple[Background, Background]:
        """For background saves, and for those that training waits for."""
        here = [info for info in self._world.ranks if info.node_rank == self._world.node_rank]
        cpus = [cpu for info in here for cpu in parse_cpus(info.cpus)]
        return Background(cpus), Background(cpus, low_priority=False)
