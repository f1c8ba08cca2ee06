"""The world of a rank: where it stands, what it computes on, how it speaks with the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from hpctrain import log
from hpctrain.world import guard
from hpctrain.world.agreement import roll_call
from hpctrain.world.averaging import mean_over_ranks
from hpctrain.world.cores import parse_cpus
from hpctrain.world.devices import DeviceInfo
from hpctrain.world.launcher import Launch
from hpctrain.world.observing import Observer
from hpctrain.world.seeding import Streams
from hpctrain.world.shares import Shares
from hpctrain.world.topology import Communicators, Place
from hpctrain.world.watching import END_OF_BLOCK, Watching

if TYPE_CHECKING:
    import torch
    from mpi4py.MPI import Comm
    from torch import Tensor

__all__ = ["RankInfo", "ScriptSettings", "Setting", "World"]

Setting = TypeVar("Setting", bool, int, float, str)
_MOST_ROWS = 32


class ScriptSettings(Protocol):
    """The settings that a script may read from a sweep; `world.bench`."""

    @property
    def is_active(self) -> bool:
        """Whether a sweep decides, so that the script is being measured."""

    def global_batch(self, default: int) -> int:
        """Samples of all ranks together in a step; `default` is the script's own."""

    def value(self, name: str, default: Setting) -> Setting:
        """A setting by its name, in the type of the script's own default."""


class ScriptDefaults:
    """The script's own defaults: there is no sweep."""

    is_active = False

    def global_batch(self, default: int) -> int:
        """The script's own."""
        return default

    def value(self, name: str, default: Setting) -> Setting:
        """The script's own."""
        return default


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Facts of every rank, known on all ranks."""

    host: str
    node_rank: int
    local_rank: int
    cpus: str
    num_threads: int
    device: DeviceInfo


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """All ranks of a job, seen from one of them. Made by `init`, passed around, never global.

    A context manager: an exception that leaves the block ends all ranks with this rank's traceback.
    """

    place: Place
    comms: Communicators
    launch: Launch
    mpi: str
    """The MPI library in words."""
    device: torch.device
    ranks: tuple[RankInfo, ...]
    streams: Streams
    """Random streams by the stated rule; see `hpctrain.world.seeding`."""
    bench: ScriptSettings = field(default_factory=ScriptDefaults, repr=False)
    """What the script's batch and settings are; see `ScriptSettings`."""
    observers: list[Observer] = field(default_factory=list, repr=False)
    """Observers of what this rank does, from `distribute` on; see `hpctrain.world.observing`."""
    shares: Shares = field(default_factory=Shares, repr=False)
    """This rank's share of the current batch, as reported by loaders."""
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)
    _ended: Event = field(default_factory=Event, repr=False)

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self.place.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.place.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.place.rank == 0

    @property
    def local_rank(self) -> int:
        """This rank among those of its node, from 0."""
        return self.place.local_rank

    @property
    def local_size(self) -> int:
        """How many ranks this node has."""
        return self.place.local_size

    @property
    def node_rank(self) -> int:
        """This node, from 0, in the order of the nodes' lowest ranks."""
        return self.place.node_rank

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return self.place.num_nodes

    @property
    def comm(self) -> Comm:
        """All ranks (a duplicate: messages sent here never meet other libraries')."""
        return self.comms.comm

    @property
    def node(self) -> Comm:
        """The ranks of this node."""
        return self.comms.node

    @property
    def cross(self) -> Comm:
        """The ranks of all nodes that have this rank's local rank."""
        return self.comms.cross

    @property
    def watching(self) -> Watching:
        """Who watches over what these communicators wait for, and how long that may take."""
        return self.comms.watching

    @property
    def host(self) -> str:
        """This node's host name."""
        return self.ranks[self.rank].host

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names of the nodes, in the order of `node_rank`."""
        return tuple(dict(sorted((info.node_rank, info.host) for info in self.ranks)).values())

    @property
    def num_threads(self) -> int:
        """Threads this rank computes with."""
        return self.ranks[self.rank].num_threads

    @property
    def num_spare_cores(self) -> int:
        """Cores that the ranks may use and do not compute on, on the node that has the fewest."""
        spare = []
        for node in range(self.num_nodes):
            ranks = [info for info in self.ranks if info.node_rank == node]
            cpus = frozenset().union(*(parse_cpus(info.cpus) for info in ranks))
            spare.append(len(cpus) - sum(info.num_threads for info in ranks))
        return max(0, min(spare))

    @property
    def seed(self) -> int:
        """The seed of the run, the same on all ranks."""
        return self.streams.seed

    @property
    def has_ended(self) -> bool:
        """Whether its block has ended, and with it everything that speaks with other ranks."""
        return self._ended.is_set()

    def describe(self) -> str:
        """Draw the job as a table: node, rank, cores, threads, device. The same on every rank."""
        batch = f", {self.launch.batch_system} job {self.launch.job_id}"
        title = (
            f"{_count(self.size, 'rank')} on {_count(self.num_nodes, 'node')}, "
            f"started by {self.launch.title}, "
            f"{self.mpi}{batch if self.launch.batch_system else ''}, seed {self.seed}"
        )
        rows = [
            (info.host, rank, info.cpus, info.num_threads, str(info.device))
            for rank, info in enumerate(self.ranks[:_MOST_ROWS])
        ]
        text = log.table(("node", "rank", "cores", "threads", "device"), rows, title=title)
        hidden = self.size - len(rows)
        return text + (f"\n ... and {hidden} more ranks" if hidden > 0 else "")

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 alone, at once; the arguments are those of Python's own `print`."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Collective: wait until every rank is here.

        Raises:
            TimedOutError: some ranks did not arrive in time; they are named.
        """
        roll_call(self.comm, "world.barrier", timeout_s=timeout_s)

    @overload
    def mean(
        self, value: float, *, weight: float = ..., timeout_s: float | None = ...
    ) -> float: ...

    @overload
    def mean(
        self, value: Tensor, *, weight: float = ..., timeout_s: float | None = ...
    ) -> Tensor: ...

    def mean(
        self, value: float | Tensor, *, weight: float = 1.0, timeout_s: float | None = None
    ) -> float | Tensor:
        """Collective: the mean of every rank's value, the same on all ranks.

        For a loss or an accuracy to print. Gradients are `distribute`'s, exact metrics over a data
        set `hpctrain.metrics`'s.

        Args:
            value: A number, or a tensor of the same shape on every rank. A tensor is returned on
                its device and in its dtype, or float32 where it holds whole numbers.
            weight: How much this rank's value counts, such as the number of samples it is the mean
                over; with 0 it is not looked at.
            timeout_s: How long to wait for ranks that do not come; None: as `init` was told.

        Raises:
            ConfigError: on all ranks; values differ in kind or shape, or no rank has any weight.
            TimedOutError: some ranks did not arrive in time; they are named.
        """
        roll_call(self.comm, "world.mean", timeout_s=timeout_s)
        return mean_over_ranks(self.comm, value, weight)

    def at_exit(self, undo: Callable[[], None]) -> None:
        """Do this when the world's block ends well, last come first served."""
        self._undo.callback(undo)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Collective when the block ended well, or with an exit that all have agreed on.

        No rank is left waiting then; an aborted rank would replace the exit code with another.
        """
        not_alone = guard.whereabouts(self.launch)[1] > 1
        agreed = isinstance(error, guard.AgreedExit)
        if not_alone and error is not None and not agreed and guard.exit_code_of(error) != 0:
            guard.end_all_ranks(self.launch, error)
        self._ended.set()
        exits = not_alone and isinstance(error, SystemExit) and not agreed
        remark = guard.remark_on_waiting(self.launch) if exits else nullcontext()
        with remark, self.watching.called(END_OF_BLOCK):
            self._undo.close()
        if not_alone and isinstance(error, guard.AgreedExit):
            guard.leave_together(self.launch, error)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
