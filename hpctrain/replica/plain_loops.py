"""Plain torch loops: `loss.backward()` and `optimizer.step()` that are not announced.

The first gradient of such a pass tells the replica; a callback of the autograd engine, which runs
before `backward` returns, exchanges what the pass has made. (Hooks on a gradient's way to `p.grad`
would come earlier, and in `torch.autograd.grad` as well, which adds to no gradient.) A replica that
is trained by `replica.backward(loss)` takes these hooks away: they cost a Python call for each
parameter.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain import log
from hpctrain.engines import Op
from hpctrain.fusion import hook_gradient
from hpctrain.optim import members_of
from hpctrain.precision import Precision
from hpctrain.replica.checks import (
    check_finished,
    check_not_in_backward,
    check_plain,
    check_stepped,
    check_untouched,
)
from hpctrain.replica.exchange import Exchange
from hpctrain.replica.modes import unfrozen
from hpctrain.world import Observer, Phase

__all__ = ["PlainLoop", "has_replica", "own_pass", "tell_stepped"]


_serials = itertools.count()


class _Running:
    """The backward passes under way in this process, by the engine's number of their graph."""

    def __init__(self) -> None:
        self.owned = 0
        """How many replica-started passes are running: those are announced."""
        self.plain: dict[int, list[PlainPasses]] = {}
        self.deferred: list[PlainPasses] = []
        """Replicas whose first gradient came in a nested pass, which ended before the outer one."""

    def join(self, number: int, one: PlainPasses) -> None:
        """A replica takes part in a pass; the first one has its end announced."""
        if number not in self.plain:
            self.plain[number] = []
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.end(number))
        self.plain[number].append(one)

    def drop(self, one: PlainPasses) -> None:
        """A replica takes part in no pass any more: none that is open or deferred ends for it."""
        self.deferred = [each for each in self.deferred if each is not one]
        for joined in self.plain.values():
            if one in joined:
                joined.remove(one)

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
        _running.drop(self)
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


class PlainLoop:
    """What a replica does for a loop that calls only torch: `loss.backward()`, `optimizer.step()`.

    Args:
        owner: The replica. It lives as long as the hooks: such a loop may hold nothing else of it.
        model: The replica's.
        exchange: The replica's.
        precision: The replica's.
        optimizer: Whose steps are seen.
    """

    def __init__(
        self,
        owner: object,
        model: torch.nn.Module,
        exchange: Exchange,
        precision: Precision,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._owner = owner
        self._exchange = exchange
        self._precision = precision
        self.no_sync = False
        """Whether gradients are collected without an exchange."""
        self.has_forwarded = False
        """Whether the model was called through the replica since the last plain pass."""
        self._stepping = 0
        self._said: set[str] = set()
        self._passes = PlainPasses(self._begin_pass, self._end_pass)
        self._passes.watch(exchange.mode.parameters)
        exchange.when_rebuilt = self._watch_again
        self._step_hooks = []
        for member in members_of(optimizer):
            before = member.register_step_pre_hook(self._before_step)
            # Before a divided update, which must be last, and before it evaluates a closure.
            hooks: OrderedDict[int, Any] = member._optimizer_step_pre_hooks  # type: ignore[assignment]
            hooks.move_to_end(before.id, last=False)
            self._step_hooks += [
                before,
                member.register_step_post_hook(self._after_step),
                member.register_load_state_dict_post_hook(self._count_load),
            ]
        inner: Any = getattr(model, "_orig_mod", model)  # of a compiled one
        self._step_hooks.append(
            inner.register_load_state_dict_post_hook(_LoadHook(self._note_weights))
        )

    def say_once(self, text: str) -> None:
        """Give a hint, on rank 0 and once."""
        if text not in self._said and self._exchange.world.rank == 0:
            log.notice(text)
        self._said.add(text)

    def close(self) -> None:
        """Take the hooks away."""
        self.stop()
        for hook in self._step_hooks:
            hook.remove()

    # Passes

    @property
    def is_open(self) -> bool:
        """Whether a `loss.backward()` has begun and not ended."""
        return self._passes.is_open

    @property
    def watches(self) -> bool:
        """Whether plain passes are seen at all."""
        return self._passes.watches

    def watch(self) -> None:
        """See plain passes from here on."""
        self._passes.watch(self._exchange.mode.parameters)

    def _watch_again(self) -> None:
        if self._passes.watches:
            self.watch()

    def stop(self) -> None:
        """See plain passes no more: hooks cost a call for each parameter."""
        self._end_failed_step()
        self._end_open_pass()
        self._passes.stop()

    def forget(self) -> None:
        """What an interrupted pass has left was dropped."""
        self._end_open_pass()
        self._passes.forget()

    def _end_open_pass(self) -> None:
        observers = self._exchange.observers
        if self._passes.is_open and observers:
            tell_end(observers, "backward")

    def _begin_pass(self) -> None:
        """`loss.backward()` has added its first gradient; called once or more in one pass."""
        exchange = self._exchange
        window, scale_and_clip = exchange.window, exchange.scale_and_clip
        check_plain(
            window,
            scales=scale_and_clip.scaler is not None,
            watched=not self._passes.is_open,
            refusal=exchange.mode.plain_refusal,
        )
        self._precision.recover()
        self._end_failed_step()
        if self._passes.is_open:
            return
        if window.exchanged and not exchange.is_seen():  # a zero_grad()
            exchange.reset_window()
        scale_and_clip.admit(exchanged=window.exchanged)
        if window.exchanged:
            exchange.finite.finding = None  # of a window that is over
        if window.exchanged and not window.stepped:
            self.say_once(
                "every loss.backward() exchanges gradients, and this is not the first since "
                "the last step: the result is correct, but costs an exchange each time; make all "
                "but the last call under `with replica.no_sync():`"
            )
        if self._precision.casting.precision == "bf16" and not self.has_forwarded:
            self.say_once(
                "precision='bf16' applies to replica(x) and inside `with replica.autocast():`; "
                "this loss was computed outside both, in float32"
            )
        if exchange.observers:
            exchange.num_samples = None
            tell_begin(exchange.observers, "backward")

    def _end_pass(self) -> None:
        """Collective unless under `no_sync()`: `loss.backward()` is about to return."""
        try:
            check_untouched(self._exchange.mode)
            with self._exchange.world.watching.called("loss.backward()"):
                self.average()
        finally:
            if self._exchange.observers:
                tell_end(self._exchange.observers, "backward")

    def average(self) -> None:
        """Collective unless under `no_sync()`: average what is on the parameters."""
        exchange = self._exchange
        exchange.check_parameters()
        self.has_forwarded = False
        exchange.window.add_plain(exchange.world.shares.take())
        exchange.mode.take_all()
        if not self.no_sync:
            exchange.run_plain()

    # Steps

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """A step of the optimizer that the replica makes itself."""
        self._stepping += 1
        try:
            yield
        finally:
            self._stepping = 0

    def _end_failed_step(self) -> None:
        """An `optimizer.step()` that raised is over."""
        if self._stepping and self._exchange.observers:
            tell_end(self._exchange.observers, "update")
        self._stepping = 0

    def _before_step(
        self, optimizer: object, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Refuse gradients that were never exchanged; let a closure's loss be the mean of all."""
        self._stepping += 1
        if self._stepping > 1:  # by the replica, or of a class whose step calls that of its base
            return None
        if self._exchange.observers:
            tell_begin(self._exchange.observers, "update")
        try:
            check_not_in_backward()
            closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
            if closure is None:
                self._check_exchanged(optimizer)
                return None
            averaged = partial(self._evaluate, closure)
            if "closure" in named:
                return arguments, {**named, "closure": averaged}
            return (arguments[0], averaged, *arguments[2:]), named
        except BaseException:
            self._end_failed_step()
            raise

    def _check_exchanged(self, optimizer: object = None) -> None:
        exchange = self._exchange
        check_finished(exchange.window, is_open=self._passes.is_open)
        if exchange.mode.watch.foreign():
            exchange.check_gradients()
        check_stepped(exchange.window, by_hand=exchange.is_by_hand())
        if getattr(optimizer, "found_inf", None) is None:  # else a GradScaler's fused step skips
            exchange.stop_at_nonfinite()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Collective: a closure's loss as the mean over all ranks, or they would part over it."""
        depth, self._stepping = self._stepping, 0  # its passes are no sign of a failed step
        try:
            with torch.enable_grad():
                loss = closure()
        finally:
            self._stepping = depth
        self._check_exchanged()
        engine, window = self._exchange.engine, self._exchange.window
        if loss is None or engine.size == 1:
            return loss
        weight = window.share if window.plain else window.weight
        value = loss.item() if isinstance(loss, Tensor) else float(loss)
        sums = torch.tensor([value * weight if weight else 0.0, weight], dtype=torch.float64)
        engine.allreduce_(sums, Op.SUM, what="the closure's loss")
        mean = sums[0] / sums[1]
        return mean.to(loss.device, loss.dtype) if isinstance(loss, Tensor) else mean.item()

    def _after_step(self, *_arguments: Any) -> None:
        self._stepping = max(0, self._stepping - 1)
        if self._stepping:
            return
        exchange = self._exchange
        exchange.num_updates += 1
        exchange.note_seen()
        is_step = exchange.window.exchanged and not exchange.window.stepped
        if is_step:
            exchange.window.stepped = True
            exchange.num_steps += 1
        if exchange.observers:
            tell_end(exchange.observers, "update")
            if is_step:
                tell_stepped(exchange.observers, exchange.num_steps)

    def _count_load(self, _optimizer: object) -> None:
        """The user has loaded a state; all ranks must, which the next exchange sees."""
        self._exchange.num_loads += 1

    def _note_weights(self) -> None:
        """The user has loaded weights; the next exchange compares ranks that have not."""
        self._exchange.has_new_weights = True


class _LoadHook:
    """Calls back when a model has loaded a state; in copies of the model it does nothing."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call

    def __call__(self, _module: torch.nn.Module, _keys: object) -> None:
        if self._call is not None:
            self._call()

    def __deepcopy__(self, _memo: object) -> _LoadHook:
        return _LoadHook()

    def __reduce__(self) -> tuple[type[_LoadHook], tuple[()]]:
        return (_LoadHook, ())


def has_replica(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is a replica's already."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    owners = (getattr(hook, "__self__", None) for hook in hooks.values())
    return any(isinstance(owner, PlainLoop) for owner in owners)


# Observers, where a phase is no block of code


def tell_begin(observers: Sequence[Observer], name: Phase) -> None:
    """A phase begins."""
    for observer in observers:
        observer.begin(name)


def tell_end(observers: Sequence[Observer], name: Phase) -> None:
    """It ends, perhaps by an exception."""
    for observer in reversed(observers):
        observer.end(name)


def tell_stepped(observers: Sequence[Observer], number: int) -> None:
    """A step has ended."""
    for observer in observers:
        observer.stepped(number)
