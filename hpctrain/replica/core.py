"""The replica: a model and its optimizer on every rank, trained as one."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hpctrain import log
from hpctrain.engines import Engine, Op
from hpctrain.errors import ConfigError, HpcTrainError
from hpctrain.fusion import Arrived
from hpctrain.optim import label_of, members_of
from hpctrain.precision import Precision
from hpctrain.replica.arguments import check_loss
from hpctrain.replica.finite import FiniteCheck
from hpctrain.replica.habits import (
    check_finished,
    check_gradients,
    check_not_in_backward,
    check_plain,
    check_stepped,
    check_unchanged,
    check_untouched,
)
from hpctrain.replica.hints import check_state, explain_missing, own_statistics
from hpctrain.replica.joining import Joining
from hpctrain.replica.learning import (
    check_closure,
    check_learning,
    count_samples,
    needs_closure,
)
from hpctrain.replica.modes import Mode
from hpctrain.replica.naming import identity, load_model, named_parameters
from hpctrain.replica.outcome import Step
from hpctrain.replica.passes import PlainPasses, own_pass
from hpctrain.replica.window import Turn, Window
from hpctrain.replica.words import LateSums, Words, check_counted, check_sums, digest_rates, say
from hpctrain.tensor_names import plain_keys
from hpctrain.world import Observer, Phase, World, keep_freed_memory, phase

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["Replica", "Step"]

_EXCHANGES_LATER = 4
"""When sums are read from a GPU. The processor is seldom further ahead of it than that."""


class Replica:
    """One rank's copy of a model that all ranks train together. Made by `hpctrain.distribute`.

    The weights after a step are those that one process would have after the same global batch. The
    user's optimizer stays the truth: change its groups, schedule it, save it.
    """

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        mode: Mode,
        *,
        accumulate: int,
        precision: Precision,
        reason: str,
        rebuild: Callable[[bool], Mode],
        release: Callable[[], None] = lambda: None,
        stops_at_nonfinite: bool = True,
    ) -> None:
        self.world = world
        self.model = model
        self.optimizer = optimizer
        self.engine = engine
        self.reason = reason
        self._observers = world.observers
        """Who is told what this rank does; the world's own list, so that others may come later."""
        self.num_steps = 0
        """Steps so far, those included that an overflow made all ranks skip."""
        self.averages_statistics = False
        """Whether somebody averages BatchNorm's statistics before they are used."""
        self._precision = precision
        self._treatment = precision.treatment
        self._mode = mode
        self._window = Window(accumulate)
        self._turn = Turn()
        self._no_sync = False
        self._joining = False
        self._empty = False  # whether the last exchange brought no samples at all
        # Losses are divided by what the last sum was divided by, the same on all ranks: while batch
        # sizes stay the same, the sums are averages already, and large counts overflow nothing.
        self._scale: float | None = None
        self._identity = identity(optimizer)
        self._names = named_parameters(model, optimizer)[0]
        self._rebuild = rebuild
        self._release = release
        self._aside: list[Tensor | None] | None = None
        """Averages of earlier backward calls, while later ones of the same step are collected."""
        self._seen: tuple[torch.nn.Parameter, weakref.ref[Tensor]] | None = None
        """A parameter and its gradient, as the last exchange or step has left it."""
        self._nonfinite: tuple[Words, str | None] | None = None
        """The sums in which a rank said that something is not finite, and what this rank found."""
        self._num_exchanges = self._num_updates = self._num_loads = 0
        world.shares.forget()  # batches that were looked at before there was anything to train
        self._batches_before = world.shares.num_batches
        self._late: list[LateSums] = []
        self._said: set[str] = set()
        self._is_let_go = False
        self._forwarded = False
        self._stepping = 0
        self._needs_closure = needs_closure(optimizer)
        self._finite = FiniteCheck(
            world,
            num_ranks=engine.size,
            watches=stops_at_nonfinite and precision.treatment.scaler is None,
        )
        self._passes = PlainPasses(self._begin_plain, self._end_pass)
        self._passes.watch(self._mode.parameters)
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

    @property
    def module(self) -> torch.nn.Module:
        """The model, under the name that it has in DistributedDataParallel."""
        return self.model

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the model forward, in the precision that was chosen.

        Collective when parameters were added or converted since the last step: they become rank
        0's before they are used.
        """
        if self._observers:
            with phase(self._observers, "forward"):
                return self._forward(arguments, named)
        return self._forward(arguments, named)

    def _forward(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._precision.settle()
        if not self._window.calls and self._is_outgrown():
            self._rebuild_mode(broadcast=True)
        if torch.is_grad_enabled() and self._mode.watch.foreign() and not self._passes.is_open:
            self._check_habits()  # another replica's loss, or a plain one that nobody watched
        self._forwarded = True
        return self._precision.casting.forward(self.model, arguments, named)

    def _is_outgrown(self) -> bool:
        return identity(self.optimizer) != self._identity or not self._mode.fits()

    def _rebuild_mode(self, *, broadcast: bool) -> None:
        """Collective: lay the gradients out anew."""
        self._mode.close()
        num_loads = self._num_loads
        self._mode = self._rebuild(broadcast)
        self._num_loads = num_loads  # others take rank 0's state there
        self._identity = identity(self.optimizer)
        self._names = named_parameters(self.model, self.optimizer)[0]
        if self._passes.watches:
            self._passes.watch(self._mode.parameters)

    def backward(
        self,
        loss: Tensor,
        *,
        num_samples: int | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Collective when it completes a window: differentiate, and average over all ranks.

        After the last backward of a window `p.grad` is the average over all ranks, so that it can
        be read and clipped as on one process.

        Args:
            loss: A scalar: the mean over this rank's samples.
            num_samples: How many samples that mean is over. Given on every rank, unequal batches
                count by their sizes; left out, every rank counts the same. 0 takes part with
                nothing: `loss` is then not looked at.
            retain_graph: As in torch.
            create_graph: As in torch; gradients that have travelled have no graph.

        Raises:
            ConfigError: the call does not fit what came before; the message says what to do.
        """
        if self._observers:
            self._tell_counted(num_samples)
            with phase(self._observers, "backward"):
                self._backward(loss, num_samples, retain_graph, create_graph)
        else:
            self._backward(loss, num_samples, retain_graph, create_graph)

    def _backward(
        self, loss: Tensor, num_samples: int | None, retain_graph: bool | None, create_graph: bool
    ) -> None:
        self._precision.settle()
        self._end_failed_step()
        self._end_open_pass()
        self._passes.stop()  # they cost a call for each parameter, and are not needed here
        if num_samples is None and self.world.shares.is_uneven:
            self._say_once(
                "this batch is not divided evenly among the ranks, and without num_samples every "
                "rank counts the same; pass num_samples=len(y) to replica.backward"
            )
        self.world.shares.forget()
        if self._window.exchanged and self._mode.has_none():  # somebody's zero_grad(): begin anew
            self._begin_anew()
        self._turn.admit()
        weight = self._window.admit(num_samples)
        self._treatment.admit(exchanged=self._window.exchanged)
        if weight > 0:
            check_loss(loss)
        self._check_habits()
        if self._window.exchanged:
            self._aside = self._mode.gradients()
        fresh = self._window.calls == 0 or self._window.exchanged
        self._mode.begin(fresh=fresh)
        calls = 1 if fresh else self._window.calls + 1
        closing = not self._no_sync and calls >= self._window.accumulate
        if closing and fresh and weight > 0 and self.engine.size == 1:
            weight = 1.0  # nothing to be weighed against: bit for bit what torch does
        self._agree_on_scale(weight, counted=num_samples is not None)
        if fresh:
            self._finite.finding = None  # of a window that is over
        if weight > 0:
            self._finite.look_at_loss(loss, step=self.num_steps)
        if closing and not self._examines():
            so_far = 0.0 if fresh else self._window.weight
            counted = 0.0 if num_samples is None else float(calls)
            self._mode.watch.arm(self._words(so_far + weight, calls, counted=counted))
        if weight > 0:
            self._differentiate(loss, weight, retain_graph, create_graph)
        self._mode.watch.end()
        self._window.add(weight, weighted=num_samples is not None)
        if closing:
            self._exchange()

    def learn(
        self,
        loss_fn: Callable[..., Tensor],
        /,
        *batch: Any,
        num_samples: int | None = None,
        **named: Any,
    ) -> Step:
        """Collective when it completes a window: learn from one batch, and step when it is time.

        The same as `loss = loss_fn(replica(*inputs), target)`, `replica.backward(loss,
        num_samples=...)` and `replica.step()`, bit for bit. An optimizer that evaluates the loss
        several times a step (LBFGS) is given a closure that does so.

        Args:
            loss_fn: Called with what the model returns and the target; returns a scalar, the mean
                over this rank's samples.
            batch: The model's inputs, and the target as the last of them.
            num_samples: How many samples that mean is over; see `backward`. Left out, it is the
                length of the target's first dimension; where the target has none, every rank counts
                the same.
            named: Inputs that the model takes by name.

        Returns:
            What `step()` returns, with this rank's loss as `loss`.

        Raises:
            ConfigError: the call does not fit the arguments of `distribute` or what came before.
            NonFiniteError: as `step` does.
        """
        check_learning(loss_fn, batch, named)
        *inputs, target = batch
        if num_samples is None and self._mode.weighs_samples:
            num_samples = count_samples(target)
        if self._needs_closure:
            return self._learn_by_closure(loss_fn, inputs, target, num_samples, named)
        loss = loss_fn(self(*inputs, **named), target)
        self.backward(loss, num_samples=num_samples)
        return replace(self.step(), loss=loss.detach())

    def _learn_by_closure(
        self,
        loss_fn: Callable[..., Tensor],
        inputs: list[Any],
        target: Any,
        num_samples: int | None,
        named: dict[str, Any],
    ) -> Step:
        """Collective: let the optimizer evaluate the batch as often as it wants to."""
        check_closure(
            label_of(self.optimizer),
            accumulate=self._window.accumulate,
            no_sync=self._no_sync,
            treats=self._treatment.owns_step,
        )
        first: Tensor | None = None

        def evaluate() -> Tensor:
            nonlocal first
            self.zero_grad()
            loss = loss_fn(self(*inputs, **named), target)
            self.backward(loss, num_samples=num_samples)
            loss = loss.detach()
            first = loss if first is None else first
            return loss

        rates = self._learning_rates()
        self.optimizer.step(evaluate)  # type: ignore[arg-type]
        return Step(due=True, note="stepped", learning_rates=rates, loss=first)

    def _learning_rates(self) -> tuple[float | Tensor, ...]:
        return tuple(group["lr"] for group in self.optimizer.param_groups if "lr" in group)

    def _begin_anew(self) -> None:
        self._window.clear()
        self._treatment.forget()
        self._aside = self._nonfinite = None
        self._finite.forget(step=self.num_steps)

    # Backward passes of a loop that knows only torch

    def _begin_plain(self) -> None:
        """`loss.backward()` has added its first gradient; called once or more in one pass."""
        check_plain(
            self._window,
            scales=self._treatment.scaler is not None,
            watched=not self._passes.is_open,
        )
        self._precision.settle()
        self._end_failed_step()
        if not self._passes.is_open:
            if self._window.exchanged and not self._is_seen():  # somebody's zero_grad()
                self._begin_anew()
            self._treatment.admit(exchanged=self._window.exchanged)
            if self._window.exchanged:
                self._finite.finding = None  # of a window that is over
            if self._window.exchanged and not self._window.stepped:
                self._say_once(
                    "every loss.backward() exchanges gradients, and this is not the first since "
                    "the last step: the result is right, and costs an exchange each time; make "
                    "all but the last call under `with replica.no_sync():`"
                )
            if self._precision.casting.precision == "bf16" and not self._forwarded:
                self._say_once(
                    "precision='bf16' applies to replica(x) and inside `with replica.autocast():`; "
                    "this loss was computed by neither, so in float32"
                )
            if self._observers:
                self._tell_counted(None)
                self._tell_begin("backward")

    def _end_pass(self) -> None:
        """Collective unless under `no_sync()`: `loss.backward()` is about to return."""
        try:
            check_untouched(self._mode)
            self._end_plain()
        finally:
            if self._observers:
                self._tell_end("backward")

    def _end_open_pass(self) -> None:
        """What an exception has left of a `loss.backward()` is forgotten."""
        if self._passes.is_open and self._observers:
            self._tell_end("backward")

    def _end_failed_step(self) -> None:
        """An `optimizer.step()` that raised is over."""
        if self._stepping and self._observers:
            self._tell_end("update")
        self._stepping = 0

    def _tell_begin(self, name: Phase) -> None:
        for observer in self._observers:
            observer.begin(name)

    def _tell_end(self, name: Phase) -> None:
        for observer in reversed(self._observers):
            observer.end(name)

    def _tell_counted(self, num_samples: int | None) -> None:
        for observer in self._observers:
            observer.counted(num_samples)

    def _tell_stepped(self) -> None:
        for observer in self._observers:
            observer.stepped(self.num_steps)

    def observe(self, observer: Observer) -> None:
        """Tell somebody what this replica does, and only this one."""
        self._observers = [*self._observers, observer]

    def _end_plain(self) -> None:
        """Collective unless under `no_sync()`: average what `loss.backward()` has made."""
        if self._is_outgrown():
            check_unchanged(self._window)
            self._rebuild_mode(broadcast=False)
        self._forwarded = False
        self._window.add_plain(self.world.shares.take())
        self._mode.take_all()
        if not self._no_sync:
            self._exchange_plain()

    def _exchange_plain(self) -> None:
        """Collective: average gradients as they lie on the parameters, each rank by its share.

        Averages of earlier calls are in them. They are equal on all ranks and shares add up to the
        number of ranks, so that averaging leaves them as they are.
        """
        window = self._window
        self._agree_on_scale(1.0, counted=None)
        self._finite.look_at_gradients(self._names, self._mode.parameters, step=self.num_steps)
        gradients = [p.grad for p in self._mode.parameters if p.grad is not None]
        if window.share == 0.0 and gradients:  # a mean over no samples is NaN
            torch._foreach_zero_(gradients)
        elif window.share != 1.0 and gradients:
            torch._foreach_mul_(gradients, window.share)
        self._exchange()

    def _say_once(self, text: str) -> None:
        if text not in self._said and self.world.rank == 0:
            log.notice(text)
        self._said.add(text)

    def _agree_on_scale(self, weight: float, *, counted: bool | None) -> None:
        """Collective, once: a first guess of what sums are divided by, and do all count samples?"""
        if self._scale is not None:
            return
        largest = torch.tensor([weight, counted is True, counted is False], dtype=torch.float64)
        self.engine.allreduce_(largest, Op.MAX, what="the largest batch")
        most, some_count, some_do_not = largest.tolist()
        check_counted(some_count + some_do_not, some_count, here=counted is True)
        self._scale = max(1.0, most * self.engine.size * self._window.accumulate)

    def _differentiate(
        self, loss: Tensor, weight: float, retain_graph: bool | None, create_graph: bool
    ) -> None:
        share = weight / (self._scale or 1.0)
        seed = self._treatment.seed(loss, share)
        try:
            with own_pass():
                torch.autograd.backward(
                    loss, seed, retain_graph=retain_graph, create_graph=create_graph
                )
        except BaseException as error:
            self._window.broken = type(error).__name__
            self._window.calls += 1
            raise

    def _check_habits(self) -> None:
        """Refuse what would make ranks silently different, by name."""
        if self._is_outgrown():
            check_unchanged(self._window)
            self._rebuild_mode(broadcast=False)  # forward has used them: too late to change them
        check_gradients(self._mode, self._window)

    def _examines(self) -> bool:
        """Whether gradients are looked at before they travel. Not in `join`: not all step there."""
        return self._treatment.examines and not self._joining

    def _words(
        self,
        weight: float,
        calls: int,
        *,
        counted: float,
        plain: bool = False,
        present: bool = True,
    ) -> Words:
        return say(
            rank=self.world.rank,
            weight=weight,
            calls=float(calls),
            present=present,
            counted=counted,
            plain=plain,
            sequence=self._num_exchanges + self._num_updates + self._num_batches(),
            rates=digest_rates(self.optimizer.param_groups),
            finding=self._finite.finding,
            loads=self._num_loads,
        )

    def _num_batches(self) -> int:
        """Batches that loaders have handed out since the last exchange."""
        return self.world.shares.num_batches - self._batches_before

    def _exchange(self, *, present: bool = True) -> Arrived:
        """Collective: average the window's gradients over all ranks, unscaled and clipped."""
        if self._observers:
            with phase(self._observers, "exchange"):
                return self._average(present)
        return self._average(present)

    def _average(self, present: bool) -> Arrived:
        window = self._window
        if self._examines():
            self._treatment.examine(self._names, self._mode.parameters)
        groups = self.optimizer.param_groups
        words = self._words(
            window.weight,
            window.calls,
            counted=float(window.counted),
            plain=window.plain,
            present=present,
        )
        self._num_exchanges += 1
        self._batches_before = self.world.shares.num_batches
        arrived = self._mode.exchange(words)
        self._empty = False
        plain = window.plain
        alone = self.engine.size == 1  # then this rank knows the totals without asking a GPU
        on_cpu = alone or arrived.control.device.type == "cpu"
        if on_cpu or window.weight == 0 or self._joining:
            totals = words if alone else Words(*arrived.control.tolist())
            self._check_totals(words, totals)
            self._empty = totals.weight == 0
            plain = totals.plain > 0  # a rank that ran out of data does as the others do
        else:
            self._read_late(words, arrived.control)
        if not self._empty:
            # On a GPU the device divides on all ranks, also where the totals were read: same bits.
            given = totals[:3] if on_cpu else arrived.control[:3].unbind()
            divisor = window.divisor(*given)
            seeded = 1.0 if plain else self._scale or 1.0
            self._treatment.average(self._mode, divisor / seeded, groups)
            if on_cpu and not plain:
                self._scale = float(divisor)
        self._mode.hide_unused(frozenset() if self._empty else arrived.used())
        if self._aside is not None:
            self._mode.add(self._aside)
            self._aside = None
        window.mark_exchanged()
        self._note_seen()
        return arrived

    def _check_totals(self, mine: Words, totals: Words) -> None:
        """Refuse what ranks did differently, and keep what all must know at the step."""
        try:
            check_sums(mine, totals, size=self.engine.size, step=self.num_steps)
        except HpcTrainError:
            self._drop()
            raise
        self._nonfinite = (totals, self._finite.finding) if totals.nonfinite else None

    def _drop(self) -> None:
        """Forget gradients that are worth nothing, so that a caught error leaves none behind."""
        self._mode.begin(fresh=True)
        self._begin_anew()

    def _stop_at_nonfinite(self) -> None:
        """Collective if a rank has found something: stop before it gets into the weights.

        Not before the step: a GradScaler of the user's leaves out a step that has overflowed.
        """
        if self._nonfinite is None:
            return
        try:
            self._finite.stop(*self._nonfinite)
        finally:
            self._drop()

    def _read_late(self, mine: Words, control: Tensor) -> None:
        """On a GPU: check the sums of an exchange that is long done."""
        finding = self._finite.finding
        self._late.append(LateSums(control, mine, step=self.num_steps, finding=finding))
        if len(self._late) > _EXCHANGES_LATER:
            late = self._late.pop(0)
            sums = late.read()
            check_sums(late.mine, sums, size=self.engine.size, step=late.step)
            self._nonfinite = (sums, late.finding) if sums.nonfinite else None

    def synchronize(self) -> None:
        """Collective: average what there is now, in the middle of a window too.

        Every rank must have made at least one backward call since the last step, or none. Gradients
        that were put on the parameters by hand are averaged as well.
        """
        self._check_habits()
        window = self._window
        if window.calls and not window.exchanged:
            if window.plain:
                self._exchange_plain()
            else:
                self._exchange()
        elif self._is_by_hand():
            window.clear()
            self._end_plain()

    def _is_by_hand(self) -> bool:
        """Whether gradients are on the parameters that no exchange has seen."""
        if self.engine.size == 1 or (self._window.exchanged and not self._window.stepped):
            return False
        return not (self._mode.has_none() or self._is_seen())

    def _is_seen(self) -> bool:
        """Whether gradients are still those that the last exchange or step has left."""
        if self._seen is None:
            return False
        parameter, gradient = self._seen
        return parameter.grad is not None and parameter.grad is gradient()

    def _note_seen(self) -> None:
        pairs = ((p, p.grad) for p in self._mode.parameters)
        found = next(((p, g) for p, g in pairs if g is not None), None)
        self._seen = None if found is None else (found[0], weakref.ref(found[1]))

    def exchange_leftovers(self) -> int:
        """Collective: exchange what is left of a window, or nothing; how many ranks had something.

        For `join`: every rank of the block is either in this call or in a closing backward.
        """
        leftover = self._window.calls > 0 and not self._window.exchanged
        self._agree_on_scale(0.0, counted=None)
        if not leftover:
            self._window.clear()
            self._mode.begin(fresh=True)
        arrived = self._exchange(present=leftover)
        num_taking_part = int(arrived.control[2].item())
        if leftover:
            self.step()
        elif num_taking_part:
            self._treatment.follow()  # the others' scale moves with this step, and so must ours
        self._window.clear()
        self._treatment.forget()
        return num_taking_part

    def count_as_all(self, comm: Comm) -> None:
        """Collective: for `join`: count the updates of a rank that has made all of them."""
        self._num_updates = max(comm.allgather(self._num_updates))
        self._num_loads = max(comm.allgather(self._num_loads))

    def share_scale(self, root: int) -> None:
        """Collective: for `join`: take the loss scale of a rank that has made all steps."""
        scaler = self._treatment.scaler
        if scaler is not None:
            mine = scaler.state_dict() if self.world.rank == root else None
            scaler.load_state_dict(self.world.comm.bcast(mine, root=root))

    def step(self, *, flush: bool = False) -> Step:
        """Update the weights if the window is complete.

        The next backward begins from zero: no `zero_grad` is needed, and none does harm. On the
        last batch of an epoch that a Saver or a Trainer hands out, a window that is only partly
        filled is stepped as with `flush`.

        Args:
            flush: Collective: step with what there is, as at the end of an epoch.

        Returns:
            What was done: true when the weights moved; false while accumulating, when there was
            nothing, or when an overflow on some rank made all ranks skip.

        Raises:
            NonFiniteError: on all ranks; too many steps in a row were skipped.
        """
        check_not_in_backward()
        if not self._observers:
            return self._update(flush)
        with phase(self._observers, "update"):
            done = self._update(flush)
        if done.due:
            self._tell_stepped()
        return done

    def _update(self, flush: bool) -> Step:
        check_finished(self._window, is_open=self._passes.is_open)
        if self._mode.watch.foreign():
            self._check_habits()
        ends_epoch = self._turn.count_step() and not self._joining
        if flush or ends_epoch:
            self._turn.closed = ends_epoch and self._window.calls > 0 and not self._window.exchanged
            self.synchronize()
        if not self._window.calls:
            return Step(due=False, note="no gradients")
        if not self._window.exchanged:
            return Step(due=False, note="accumulating")
        if self._empty:
            self._window.clear()
            return Step(due=False, note="no samples")
        self._stop_at_nonfinite()
        rates = self._learning_rates()
        self._stepping += 1
        try:
            done = self._precision.step(self.optimizer.step)
        finally:
            self._stepping = 0
        self._num_updates += 1
        self._window.clear()
        if self._passes.watches:  # the next loss.backward() adds to whatever is there
            self._mode.zero()
            for parameter in self._mode.parameters:
                parameter.grad = None
        self._note_seen()
        self.num_steps += 1
        if not self._joining:  # not all ranks step there, so not all could raise
            self._treatment.check_collapse(done, number=self.num_steps)
        return Step(due=True, note="stepped", learning_rates=rates, done=done)

    # Steps of a loop that calls the optimizer itself

    def _before_step(
        self, optimizer: object, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Refuse gradients that were never exchanged; let a closure's loss be the mean of all."""
        self._stepping += 1
        if self._stepping > 1:  # by `step()`, or of a class whose step calls that of its base
            return None
        if self._observers:
            self._tell_begin("update")
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
        check_finished(self._window, is_open=self._passes.is_open)
        if self._mode.watch.foreign():
            self._check_habits()
        check_stepped(self._window, by_hand=self._is_by_hand())
        if getattr(optimizer, "found_inf", None) is None:  # else a GradScaler's fused step skips
            self._stop_at_nonfinite()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Collective: a closure's loss as the mean over all ranks, or they would part over it."""
        depth, self._stepping = self._stepping, 0  # its passes are no sign of a failed step
        try:
            with torch.enable_grad():
                loss = closure()
        finally:
            self._stepping = depth
        self._check_exchanged()
        if loss is None or self.engine.size == 1:
            return loss
        weight = self._window.share if self._window.plain else self._window.weight
        value = loss.item() if isinstance(loss, Tensor) else float(loss)
        sums = torch.tensor([value * weight if weight else 0.0, weight], dtype=torch.float64)
        self.engine.allreduce_(sums, Op.SUM, what="the closure's loss")
        mean = sums[0] / sums[1]
        return mean.to(loss.device, loss.dtype) if isinstance(loss, Tensor) else mean.item()

    def _after_step(self, *_arguments: Any) -> None:
        self._stepping = max(0, self._stepping - 1)
        if not self._stepping:
            self._num_updates += 1
            self._note_seen()
            is_step = self._window.exchanged and not self._window.stepped
            if is_step:
                self._window.stepped = True
                self.num_steps += 1
            if self._observers:
                self._tell_end("update")
                if is_step:
                    self._tell_stepped()

    def _count_load(self, _optimizer: object) -> None:
        """The user has loaded a state; all ranks must, which the next exchange sees."""
        self._num_loads += 1

    def begin_batch(self, *, last: bool) -> None:
        """A batch was handed out: what Saver and Trainer tell; the same on every rank.

        Args:
            last: Whether the epoch ends with it: its last `step()` then flushes. That is the call
                with the number that the batch before had; in a run's first batch it is not known.
        """
        self._turn.begin(last=last)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients and begin the window anew; `set_to_none` as in torch.

        Collective after an interrupted backward pass that had sent some of its gradients.
        """
        if self._mode.watch.foreign() and not self._passes.watches:
            self._passes.watch(self._mode.parameters)  # the loop has begun to use plain torch
        self._num_exchanges += self._mode.zero()
        self._end_open_pass()
        self._passes.forget()
        self._begin_anew()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Collect gradients without an exchange; the next backward outside exchanges the sum."""
        if self._window.accumulate > 1:
            raise ConfigError(
                f"no_sync() and accumulate={self._window.accumulate} both say when to exchange; "
                "use one of them"
            )
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Collective: let ranks whose data end early wait for the others without holding them up.

        Ranks that leave the block first go on taking part with nothing, and the averages count the
        others alone. All ranks leave together, with the weights and the optimizer state of those
        that made the most steps.
        """
        self._joining = True
        joining = Joining(self)
        try:
            with self._mode.each_alone():  # ranks that have left the block update nothing
                yield
                joining.stay_until_all_are_done()
        finally:
            self._joining = False
            joining.close()

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on: the optimizer's state as torch has it, and the model's.

        The weights are under the key `model`. `fp16` adds the key `scaler`, `bf16-pure` the key
        `masters`; torch's own optimizers load the state all the same and leave these out.
        """
        model = plain_keys(self.model.state_dict())
        return {"model": model, **self.optimizer.state_dict(), **self._precision.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave, on any number of ranks; the same on every rank.

        An optimizer's state of one process does as well: the weights then stay.

        Raises:
            ConfigError: it is something else, such as a model's state.
        """
        check_state(state)
        self._precision.load_state_dict({k: v for k, v in state.items() if k != "model"})
        if "model" in state:
            masters = state.get("masters", {}) if self._precision.masters is not None else {}
            load_model(self.model, state["model"], but=masters)

    @property
    def is_mid_step(self) -> bool:
        """Whether gradients of an unfinished step are waiting: no place for a checkpoint."""
        return self._window.calls > 0 and not self._window.stepped

    @property
    def is_joining(self) -> bool:
        """Whether it is inside `join`, where ranks may make different numbers of steps."""
        return self._joining

    @property
    def is_in_use(self) -> bool:
        """Whether it was neither closed nor trained by some of the world's ranks only."""
        return not self._is_let_go and self.engine.size == self.world.size

    @property
    def num_calls(self) -> tuple[int, int]:
        """Exchanges and updates of the weights so far; the same on every rank."""
        return self._num_exchanges, self._num_updates

    @property
    def stops_at_nonfinite(self) -> bool:
        """Whether a loss that is inf or NaN on some rank stops all ranks at the step."""
        return self._finite.watches

    @stops_at_nonfinite.setter
    def stops_at_nonfinite(self, stops: bool) -> None:
        self._finite.watches = stops and self._treatment.scaler is None

    def counters(self) -> dict[str, Any]:
        """What a replica has counted and learned beside the optimizer's state, as plain data.

        A run that goes on with it is bit for bit the one that was never stopped.
        """
        steps_per_batch = self._turn.num_steps or self._turn.usual_steps
        return {
            "num_steps": self.num_steps,
            "scale": self._scale,
            "steps_per_batch": steps_per_batch,
        }

    def load_counters(self, counters: dict[str, Any]) -> None:
        """Go on from what `counters` gave; the same on every rank."""
        self.num_steps, self._scale = counters["num_steps"], counters["scale"]
        self._turn = Turn(usual_steps=counters.get("steps_per_batch"))

    @property
    def num_skipped(self) -> int:
        """Steps that an overflow made all ranks skip. Waits for a GPU."""
        scaler = self._treatment.scaler
        return 0 if scaler is None else scaler.num_skipped

    def autocast(self) -> AbstractContextManager[Any]:
        """What `replica(x)` runs under, for parts of a model that are called on their own."""
        self._forwarded = True
        return self._precision.casting.autocast()

    def full_precision(self) -> AbstractContextManager[None]:
        """Weights are their float32 masters inside, with `bf16-pure`: to save or load them."""
        return self._precision.full()

    def describe(self) -> str:
        """Say in a table what was chosen and why. The same on every rank."""
        rows = [
            ("engine", f"{self.engine.name}: {self.reason}"),
            ("ranks", str(self.engine.size)),
            *self._mode.describe(),
            ("accumulate", str(self._window.accumulate)),
            *self._precision.describe(),
            ("optimizer", f"{label_of(self.optimizer)}, {len(self._identity)} parameters"),
            *([("freed memory", keep_freed_memory())] if self.world.device.type == "cpu" else []),
            *([] if self.averages_statistics else own_statistics(self.model, self.engine.size)),
        ]
        return log.table(("replica", ""), rows)

    def counts(self) -> dict[str, int]:
        """Messages sent and Python hooks called so far, and bytes in one exchange."""
        return self._mode.counts()

    def close(self) -> None:
        """Collective, unless an engine was given: let the model go, and end what was connected.

        Hooks are removed, weights and gradients stay. An engine that was given stays open.
        """
        self.let_go()
        self._precision.close()
        self._release()

    def let_go(self) -> None:
        """Take the hooks away; weights that the node shared become each rank's own."""
        if self._is_let_go:
            return
        self._is_let_go = True
        self._end_open_pass()
        self._passes.stop()
        for hook in self._step_hooks:
            hook.remove()
        self._mode.close()

    if not TYPE_CHECKING:  # for type checkers, what is not there stays unknown

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(explain_missing(self.__dict__, name))
