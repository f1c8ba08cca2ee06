"""Backward passes that nobody announced: `loss.backward()` in a loop that knows only torch.

The first gradient of such a pass tells the replica; a callback of the autograd engine, which runs
before `backward` returns, exchanges what the pass has made. (Hooks on a gradient's way to `p.grad`
would come earlier, and in `torch.autograd.grad` as well, which adds to no gradient.) A replica that
is trained by `replica.backward(loss)` takes these hooks away: they cost a Python call for each
parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain.fusion import hook_gradient

__all__ = ["PlainPasses", "own_pass", "unfrozen"]

_serials = itertools.count()


class _Running:
    """The backward passes under way in this process, by the engine's number of their graph."""

    def __init__(self) -> None:
        self.owned = 0
        """How many passes of some replica's own are running: those are announced."""
        self.plain: dict[int, list[PlainPasses]] = {}
        self.deferred: list[PlainPasses] = []
        """Whose first gradient came in a pass inside another, which has ended before the other."""

    def join(self, number: int, one: PlainPasses) -> None:
        """A replica takes part in a pass; the first one has its end announced."""
        if number not in self.plain:
            self.plain[number] = []
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.end(number))
        self.plain[number].append(one)

    def end(self, number: int) -> None:
        """Collective: a pass has ended; every replica in it exchanges, in the order of creation.

        A pass inside another (reentrant activation checkpoints) ends while gradients of the same
        parameters are still to come: whatever it brought is exchanged with the outer one.
        """
        ended = self.plain.pop(number, [])
        if torch._C._current_autograd_node() is not None:
            self.deferred += ended
            return
        # Numbers that are left were interrupted by an exception.
        self.plain.clear()
        ended, self.deferred = [*ended, *self.deferred], []
        for one in sorted(dict.fromkeys(ended), key=lambda each: each.serial):
            one.end()


_running = _Running()


@contextmanager
def own_pass() -> Iterator[None]:
    """A backward pass that a replica has announced: other replicas' hooks stay quiet in it."""
    _running.owned += 1
    try:
        yield
    finally:
        _running.owned -= 1


class PlainPasses:
    """Watches a replica's parameters for passes that were not announced.

    Args:
        begin: Called when a pass has added its first gradient; may be called more than once in one.
        end: Collective: called when all gradients of the pass are there.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.serial = next(_serials)
        self._begin = begin
        self._end = end
        self._handles: list[RemovableHandle] = []
        self._number: int | None = None
        self.is_open = False
        """Whether a pass has begun and not ended: one is running, or was interrupted."""

    @property
    def watches(self) -> bool:
        """Whether plain passes are seen at all."""
        return bool(self._handles)

    def watch(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Hook these parameters, frozen ones too: they may be unfrozen later."""
        self.stop()
        with unfrozen(parameters):
            self._handles = [hook_gradient(p, self._arrive) for p in parameters]

    def stop(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._number = None
        self.is_open = False

    def forget(self) -> None:
        """What an interrupted pass has left was dropped."""
        self._number = None
        self.is_open = False

    def _arrive(self, _parameter: Tensor) -> None:
        if _running.owned:
            return
        number = torch._C._current_graph_task_id()
        if number != self._number:
            self._number = number
            self._begin()
            self.is_open = True
            if self not in _running.plain.get(number, ()):
                _running.join(number, self)

    def end(self) -> None:
        """Collective: the pass has ended."""
        self._number = None
        self.is_open = False
        self._end()


@contextmanager
def unfrozen(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Let parameters be hooked that are frozen now, so that they may be unfrozen later."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
