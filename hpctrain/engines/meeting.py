"""How a rank goes into a collective: checked, announced to the watch, and with errors in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from hpctrain.engines import wire
from hpctrain.engines.control import Control
from hpctrain.engines.op import Op
from hpctrain.errors import CollectiveError, ConfigError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["Finish", "Meeting", "Pending", "Watch", "Watchdog", "Work"]

T = TypeVar("T")
Finish = Callable[[], None]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the tensor holds the result."""


class Watch(Protocol):
    """Who is told about every collective, so that a rank that stays out of one can be named."""

    def enter(self, call: str) -> None:
        """A collective begins; `call` names it and is the same on all ranks."""

    def leave(self) -> None:
        """The collective has ended."""


class Watchdog(Watch, Protocol):
    """A watch over all ranks, which can give each part of them a watch of its own."""

    def among(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> Watch:
        """A watch for the collectives of some ranks only."""

    @property
    def all_waited_s(self) -> float:
        """Seconds that this thread has spent in collectives, in all."""


class Meeting:
    """What engines share besides the collectives: ranks, device, checks, watch.

    Args:
        comm: The ranks; duplicated here. None for a rank alone.
        device: Where this rank's tensors are, besides the CPU.
        watch: Who is told when this rank waits in a collective.
    """

    name: ClassVar[str]
    reason: str = "asked for"
    """Why this engine was chosen."""

    def __init__(self, comm: Comm | None, device: torch.device, *, watch: Watchdog | None) -> None:
        self._control = Control(comm)
        self._watchdog = watch
        self._watch: Watch | None = watch
        self._closed = False
        self._cure = ""
        self.rank = self._control.rank
        self.size = self._control.size
        self.device = device
        self.members: tuple[int, ...] = tuple(range(self.size))
        """The ranks of the world that this engine is over, in the order of its own."""
        self.on_post: Callable[[str], None] | None = None
        """Who is told of collectives that are started now and waited for later."""

    @property
    def watchdog(self) -> Watchdog | None:
        """Who watches over its collectives, for others who make calls of their own."""
        return self._watchdog

    def watch_among(self, watchdog: Watchdog | None, members: Sequence[int]) -> None:
        """Collective over a part of the ranks: count its calls apart from everybody's."""
        self.members = tuple(members)
        self._watchdog = watchdog
        self._watch = None if watchdog is None else watchdog.among(members)

    def _check(
        self,
        call: str,
        tensor: Tensor,
        op: Op | None = None,
        ops: frozenset[Op] = frozenset(),
        *,
        written: bool = True,
    ) -> None:
        self.check_open(call)
        written = written and call != "reduce_scatter"
        wire.check_tensor(tensor, call=call, device=self.device, written=written)
        if op is not None:
            wire.check_op(tensor, op, call=call, ops=ops, engine=self.name)

    def check_open(self, call: str) -> None:
        """Refuse a call of an engine that was closed.

        Raises:
            ConfigError: with what to do.
        """
        if self._closed:
            raise ConfigError(f"{call}: this {self.name} engine is closed; {self._cure}")

    def meet(
        self,
        exchange: Callable[[], T],
        call: str,
        what: str,
        tensor: Tensor | None,
        *,
        rows_vary: bool = False,
    ) -> T:
        """Run what waits for other ranks, and let the watch know."""
        if self._watch is None:
            return self._run(exchange, call)
        if tensor is None:
            self._watch.enter(call)
        else:
            self._watch.enter(wire.describe(call, what, tensor, rows_vary=rows_vary))
        try:
            return self._run(exchange, call)
        finally:
            self._watch.leave()

    def _run(self, exchange: Callable[[], T], call: str) -> T:
        try:
            return exchange()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # MPI's, Horovod's and torch.distributed's errors all are
            raise CollectiveError(f"{call} failed in the {self.name} engine: {error}") from error


class Pending:
    """A collective that `wait` finishes once."""

    def __init__(self, finish: Finish | None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Block until the tensor holds the result."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
