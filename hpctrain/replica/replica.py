"""The replica: a model and its optimizer on every rank, trained as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hpctrain import log
from hpctrain.engines import Engine
from hpctrain.errors import ConfigError
from hpctrain.optim import label_of
from hpctrain.precision import Precision
from hpctrain.replica.checks import (
    check_closure,
    check_empty_loss,
    check_finished,
    check_learning,
    check_loss,
    check_not_in_backward,
    check_open,
    check_state,
    count_samples,
    explain_missing,
    needs_closure,
    own_statistics,
)
from hpctrain.replica.equal_ranks import Joining
from hpctrain.replica.exchange import Exchange
from hpctrain.replica.modes import Mode, ShardedMode, SlicedMode, StagedPass
from hpctrain.replica.naming import holds_parts, load_model
from hpctrain.replica.plain_loops import PlainLoop, own_pass, tell_stepped
from hpctrain.replica.window import Step, Turn
from hpctrain.replica.wire_state import trouble_with_wire_state
from hpctrain.sharding import fit_optimizer_state, piece_of_state
from hpctrain.tensor_names import plain_keys
from hpctrain.world import Observer, World, keep_freed_memory, phase

if TYPE_CHECKING:
    from hpctrain.pieces import Region
    from hpctrain.pipeline import StageState

__all__ = ["Replica", "Step"]


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
        self.averages_statistics = False
        """Whether BatchNorm statistics are averaged before use."""
        self._precision = precision
        self._scale_and_clip = precision.scale_and_clip
        self._exchange = Exchange(
            world,
            model,
            optimizer,
            engine,
            mode,
            accumulate=accumulate,
            scale_and_clip=precision.scale_and_clip,
            rebuild=rebuild,
            stops_at_nonfinite=stops_at_nonfinite,
        )
        self._window = self._exchange.window
        self._plain = PlainLoop(self, model, self._exchange, precision, optimizer)
        self._turn = Turn()
        self._release = release
        self._is_let_go = False
        self._needs_closure = needs_closure(optimizer)

    @property
    def num_steps(self) -> int:
        """Steps so far, including those that all ranks skipped after an overflow."""
        return self._exchange.num_steps

    @property
    def accumulate(self) -> int:
        """Backward calls that make one step."""
        return self._window.accumulate

    @property
    def measures_norm(self) -> bool:
        """Whether exchanges compute the norm of the gradients for `Step.norm`; set it for logs.

        Clipping by norm and loss scaling compute it in any case. The same on every rank: where
        ranks share memory it is a collective.
        """
        return self._scale_and_clip.measures_norm

    @measures_norm.setter
    def measures_norm(self, measured: bool) -> None:
        self._scale_and_clip.measures_norm = measured

    @property
    def num_samples(self) -> int | None:
        """Of the last backward call, for observers; None: the loop did not say."""
        return self._exchange.num_samples

    @property
    def module(self) -> torch.nn.Module:
        """The model, under the name that it has in DistributedDataParallel."""
        return self.model

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the model forward, in the precision that was chosen.

        Collective when parameters were added or converted since the last step: they become rank
        0's before they are used. After `close()` it evaluates only, under `torch.no_grad()`.
        """
        if self._is_let_go and torch.is_grad_enabled():
            self._check_open()
        if self._exchange.observers:
            with phase(self._exchange.observers, "forward"):
                return self._forward(arguments, named)
        return self._forward(arguments, named)

    def _forward(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._precision.recover()
        exchange = self._exchange
        if torch.is_grad_enabled():
            exchange.mode.admit_model()
        if not self._window.calls and exchange.is_outgrown():
            exchange.rebuild(broadcast=True)
        if torch.is_grad_enabled() and exchange.mode.watch.foreign() and not self._plain.is_open:
            exchange.check_gradients()  # another replica's loss, or an unobserved plain one
        self._plain.has_forwarded = True
        if exchange.mode.stages is not None:
            return exchange.mode.stages.evaluate(arguments, named)
        return self._precision.casting.forward(self.model, arguments, named)

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
                nothing: `loss` is then ignored. With a sharded model it must have come from
                a forward pass of an empty batch: every rank takes part in gathering.
            retain_graph: As in torch.
            create_graph: As in torch; exchanged gradients have no graph.

        Raises:
            ConfigError: the call does not fit earlier calls; the message says what to do.
        """
        self._check_open()
        if self._exchange.mode.stages is not None:
            raise ConfigError(self._exchange.mode.stages.backward_refusal)
        self._observed_backward(loss, num_samples, retain_graph, create_graph)

    def _observed_backward(
        self,
        loss: Tensor | StagedPass,
        num_samples: int | None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        observers = self._exchange.observers
        if observers:
            self._plain.stop()  # what was interrupted ends before this begins
            self._exchange.num_samples = num_samples
            with phase(observers, "backward"):
                self._backward(loss, num_samples, retain_graph, create_graph)
        else:
            self._backward(loss, num_samples, retain_graph, create_graph)

    def _backward(
        self,
        loss: Tensor | StagedPass,
        num_samples: int | None,
        retain_graph: bool | None,
        create_graph: bool,
    ) -> None:
        exchange, window = self._exchange, self._window
        self._precision.recover()
        self._plain.stop()  # its hooks cost a call for each parameter, and are not needed here
        if num_samples is None and self.world.shares.is_uneven:
            self._plain.say_once(
                "this batch is not divided evenly among the ranks, and without num_samples every "
                "rank has the same weight; pass num_samples=len(y) to replica.backward"
            )
        self.world.shares.forget()
        if window.exchanged and exchange.mode.has_none():  # after a zero_grad()
            exchange.reset_window()
        self._turn.admit()
        weight = window.admit(num_samples)
        self._scale_and_clip.admit(exchanged=window.exchanged)
        if not isinstance(loss, StagedPass):
            self._check_loss(loss, weight)
        exchange.check_gradients()
        if window.exchanged:
            exchange.set_aside()
        fresh = window.calls == 0 or window.exchanged
        exchange.mode.begin(fresh=fresh)
        calls = 1 if fresh else window.calls + 1
        closing = not self._plain.no_sync and calls >= window.accumulate
        if closing and fresh and weight > 0 and self.engine.size == 1:
            weight = 1.0  # nothing to be weighed against: bit for bit what torch does
        exchange.agree_on_scale(weight, counted=num_samples is not None)
        if fresh:
            exchange.forget_losses()
        if weight > 0 and isinstance(loss, Tensor):
            exchange.look_at_loss(loss)
        if closing:
            so_far = 0.0 if fresh else window.weight
            exchange.arm(so_far + weight, calls, counted=num_samples is not None)
        if weight > 0 or exchange.mode.needs_every_pass:
            self._differentiate(loss, weight, retain_graph, create_graph)
        exchange.mode.watch.end()
        window.add(weight, weighted=num_samples is not None)
        if closing:
            exchange.run()

    def _check_loss(self, loss: Tensor, weight: float) -> None:
        if weight > 0:
            check_loss(loss)
        elif self._exchange.mode.needs_every_pass:
            check_empty_loss(loss)

    def _differentiate(
        self,
        loss: Tensor | StagedPass,
        weight: float,
        retain_graph: bool | None,
        create_graph: bool,
    ) -> None:
        share = weight / (self._exchange.scale or 1.0)
        try:
            with own_pass(), self._exchange.mode.around_pass(weight):
                if isinstance(loss, StagedPass):
                    self._run_stages(loss, share)
                else:
                    seed = self._scale_and_clip.seed(loss, share)
                    torch.autograd.backward(
                        loss, seed, retain_graph=retain_graph, create_graph=create_graph
                    )
        except BaseException as error:
            self._window.broken = type(error).__name__
            self._window.calls += 1
            raise

    def _run_stages(self, staged: StagedPass, share: float) -> None:
        """Collective over the stages: forward and backward, after which there is a loss."""
        scaler = self._scale_and_clip.scaler
        staged.run(share if scaler is None else scaler.scale.double() * share)
        if share > 0:
            self._exchange.look_at_loss(staged.loss)

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
            ConfigError: the call does not fit the arguments of `distribute` or earlier calls.
            NonFiniteError: as `step` does.
        """
        self._check_open()
        check_learning(loss_fn, batch, named)
        *inputs, target = batch
        mode = self._exchange.mode
        if num_samples is None and mode.weighs_samples:
            num_samples = count_samples(target)
        stages = mode.stages
        if stages is not None:
            if self._exchange.mode.partners is not None:
                self._exchange.mode.admit_model()
            rates = self._learning_rates()
            staged = stages.prepare(
                loss_fn, inputs, target, named, num_samples=num_samples, rates=rates
            )
            self._observed_backward(staged, num_samples)
            return replace(self.step(), loss=staged.loss)
        if self._needs_closure:
            return self._learn_by_closure(loss_fn, inputs, target, num_samples, named)
        if isinstance(mode, ShardedMode) and (self._window.calls == 0 or self._window.exchanged):
            mode.begin(fresh=True)  # the last step's gradients make room for gathered weights
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
        """Collective: let the optimizer evaluate the batch as often as it needs to."""
        check_closure(
            label_of(self.optimizer),
            accumulate=self._window.accumulate,
            no_sync=self._plain.no_sync,
            treats=self._scale_and_clip.owns_step,
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

    def synchronize(self) -> None:
        """Collective: average what there is now, in the middle of a window too.

        Every rank must have made at least one backward call since the last step, or none. Gradients
        that were put on the parameters by hand are averaged as well.
        """
        self._check_open()
        exchange, window = self._exchange, self._window
        exchange.check_gradients()
        if window.calls and not window.exchanged:
            if window.plain:
                exchange.run_plain()
            else:
                exchange.run()
        elif exchange.is_by_hand():
            window.clear()
            self._plain.average()

    def step(self, *, flush: bool = False) -> Step:
        """Update the weights if the window is complete.

        The next backward begins from zero: no `zero_grad` is needed, and none does harm. On the
        last batch of an epoch that a Saver or a Trainer returns, a window that is only partly
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
        self._check_open()
        observers = self._exchange.observers
        if not observers:
            return self._step(flush)
        with phase(observers, "update"):
            done = self._step(flush)
        if done.due:
            tell_stepped(observers, self.num_steps)
        return done

    def _step(self, flush: bool) -> Step:
        exchange, window = self._exchange, self._window
        check_finished(window, is_open=self._plain.is_open)
        if exchange.mode.watch.foreign():
            exchange.check_gradients()
        ends_epoch = self._turn.count_step() and not exchange.is_joining
        if flush or ends_epoch:
            self._turn.closed = ends_epoch and window.calls > 0 and not window.exchanged
            self.synchronize()
        if not window.calls:
            return Step(due=False, note="no gradients")
        if not window.exchanged:
            return Step(due=False, note="accumulating")
        if exchange.is_empty:
            window.clear()
            return Step(due=False, note="no samples")
        exchange.stop_at_nonfinite()
        rates = self._learning_rates()
        with self._plain.own_step():
            done = self._precision.step(self.optimizer.step)
        exchange.num_updates += 1
        window.clear()
        if self._plain.watches:  # the next loss.backward() adds to whatever is there
            exchange.mode.zero()
            for parameter in exchange.mode.parameters:
                parameter.grad = None
        exchange.note_seen()
        exchange.num_steps += 1
        if not exchange.is_joining:  # not all ranks step there, so not all could raise
            self._scale_and_clip.check_collapse(done, number=exchange.num_steps)
        return Step(due=True, note="stepped", learning_rates=rates, done=done)

    def begin_batch(self, *, last: bool) -> None:
        """A batch was returned: called by Saver and Trainer; the same on every rank.

        Args:
            last: Whether the epoch ends with it: its last `step()` then flushes. That is the call
                with the number that the batch before had; in a run's first batch it is not known.
        """
        self._turn.begin(last=last)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients and begin a new window; `set_to_none` as in torch.

        Collective after an interrupted backward pass that had sent some of its gradients.
        """
        exchange = self._exchange
        if exchange.mode.watch.foreign() and not self._plain.watches:
            self._plain.watch()  # the loop has begun to use plain torch
        exchange.num_exchanges += exchange.mode.zero()
        self._plain.forget()
        exchange.reset_window()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Collect gradients without an exchange; the next backward outside exchanges the sum."""
        if self._window.accumulate > 1:
            raise ConfigError(
                f"no_sync() and accumulate={self._window.accumulate} both control when to "
                "exchange; use one of them"
            )
        before, self._plain.no_sync = self._plain.no_sync, True
        try:
            yield
        finally:
            self._plain.no_sync = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Collective: let ranks whose data end early wait for the others without holding them up.

        Ranks that leave the block first keep taking part with nothing, and the averages count the
        others alone. All ranks leave together, with the weights and the optimizer state of those
        that made the most steps.
        """
        exchange = self._exchange
        exchange.is_joining = True
        joining = Joining(self, exchange)
        try:
            with exchange.mode.each_alone():  # ranks that have left the block update nothing
                yield
                joining.stay_until_all_are_done()
        finally:
            exchange.is_joining = False
            joining.close()

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to resume: the optimizer's state in torch's form, and the model's.

        Of a model in stages this rank's stage; a Saver puts the stages together.

        The weights are under the key `model`. `fp16` adds the key `scaler`, `bf16-pure` the key
        `masters`; torch's own optimizers load the state all the same and leave these out.
        """
        model = plain_keys(self.model.state_dict())
        return {"model": model, **self.optimizer.state_dict(), **self._precision.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave, on any number of ranks; the same on every rank.

        An optimizer's state of one process does as well: the weights then stay. Into a sharded
        model go shards, whole tensors, or this rank's pieces of them.

        Raises:
            ConfigError: it is something else, such as a model's state.
        """
        check_state(state)
        if self.is_sharded:
            state = fit_optimizer_state(self.optimizer, state)
        self._precision.load_state_dict({k: v for k, v in state.items() if k != "model"})
        if "model" in state:
            masters = state.get("masters", {}) if self._precision.masters is not None else {}
            load_model(self.model, state["model"], but=masters)

    @property
    def is_mid_step(self) -> bool:
        """Whether gradients of an unfinished step are waiting: no place for a checkpoint."""
        return self._window.calls > 0 and not self._window.stepped

    @property
    def stage_state(self) -> StageState | None:
        """Where a stage's state is in a checkpoint of the whole model; None: all is here."""
        stages = self._exchange.mode.stages
        return None if stages is None else stages.state

    @property
    def wanted_state(self) -> Callable[[str, tuple[int, ...]], Region | range | None] | None:
        """Which part of a tensor of the optimizer's saved state this rank wants; None: all."""
        mode = self._exchange.mode
        if isinstance(mode, SlicedMode):
            return mode.update.wanted
        own = partial(piece_of_state, self.optimizer)
        if mode.stages is not None:
            return partial(mode.stages.state.wanted, own)
        return own if self.is_sharded else None

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds all weights: `split` has cut them into shards or parts."""
        return holds_parts(self.model)

    @property
    def is_joining(self) -> bool:
        """Whether it is inside `join`, where ranks may make different numbers of steps."""
        return self._exchange.is_joining

    @property
    def is_in_use(self) -> bool:
        """Whether it was neither closed nor trained by some of the world's ranks only."""
        return not self._is_let_go and self.engine.size == self.world.size

    @property
    def num_calls(self) -> tuple[int, int]:
        """Exchanges and updates of the weights so far; the same on every rank."""
        return self._exchange.num_exchanges, self._exchange.num_updates

    @property
    def stops_at_nonfinite(self) -> bool:
        """Whether a loss that is inf or NaN on some rank stops all ranks at the step."""
        return self._exchange.finite.watches

    @stops_at_nonfinite.setter
    def stops_at_nonfinite(self, stops: bool) -> None:
        self._exchange.finite.watches = stops and self._scale_and_clip.scaler is None

    def counters(self) -> dict[str, Any]:
        """A replica's counters besides the optimizer's state, as plain data.

        A run that resumes with it is bit for bit the one that was never stopped.
        """
        steps_per_batch = self._turn.num_steps or self._turn.usual_steps
        return {
            "num_steps": self.num_steps,
            "scale": self._exchange.scale,
            "steps_per_batch": steps_per_batch,
        }

    def load_counters(self, counters: dict[str, Any]) -> None:
        """Continue from the result of `counters`; the same on every rank."""
        self._exchange.num_steps = counters["num_steps"]
        self._exchange.scale = counters["scale"]
        self._turn = Turn(usual_steps=counters.get("steps_per_batch"))

    def wire_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The wire's state: what all ranks have in common, and this rank's own; empty: none."""
        use = self._exchange.mode.wire
        return ({}, {}) if use is None else (use.common_state(), use.own_state())

    def load_wire_state(self, common: dict[str, Any], own: dict[str, Any]) -> None:
        """Go on from what `wire_state` gave, or begin anew on other nodes and say so.

        Args:
            common: The same on every rank.
            own: This rank's; empty on another number of ranks.
        """
        use = self._exchange.mode.wire
        now = {} if use is None else use.common_state()
        trouble = trouble_with_wire_state(common, now) if common else None
        if trouble is not None and self.world.rank == 0:
            log.warn(f"the state of the wire {common['name']} is not used: {trouble}")
        if use is not None:
            state = common.get("state", own) if common and trouble is None else {}
            use.wire.load_state_dict(state)

    @property
    def num_skipped(self) -> int:
        """Steps that an overflow made all ranks skip. Waits for a GPU."""
        scaler = self._scale_and_clip.scaler
        return 0 if scaler is None else scaler.num_skipped

    def autocast(self) -> AbstractContextManager[Any]:
        """What `replica(x)` runs under, for parts of a model that are called on their own."""
        self._plain.has_forwarded = True
        return self._precision.casting.autocast()

    def full_precision(self) -> AbstractContextManager[None]:
        """Weights are their float32 masters inside, with `bf16-pure`: to save or load them."""
        return self._precision.full()

    def observe(self, observer: Observer) -> None:
        """Add an observer of this replica; `world.observers` observe all replicas."""
        self._exchange.observers = [*self._exchange.observers, observer]

    def describe(self) -> str:
        """Say in a table what was chosen and why. The same on every rank."""
        trained = f"{label_of(self.optimizer)}, {self._exchange.num_parameters} parameters"
        rows = [
            ("engine", f"{self.engine.name}: {self.reason}"),
            ("ranks", str(self.engine.size)),
            *self.describe_mode(),
            ("accumulate", str(self._window.accumulate)),
            *self._precision.describe(),
            ("optimizer", trained),
            *([("freed memory", keep_freed_memory())] if self.world.device.type == "cpu" else []),
            *([] if self.averages_statistics else own_statistics(self.model, self.engine.size)),
        ]
        return log.table(("replica", ""), rows)

    def counts(self) -> dict[str, int]:
        """Messages sent and Python hooks called so far, and bytes in one exchange."""
        return self._exchange.mode.counts()

    def describe_mode(self) -> list[tuple[str, str]]:
        """Describe how gradients are exchanged, and why; as rows."""
        mode = self._exchange.mode
        wire = [("wire", mode.wire_chosen)] if mode.wire_chosen else []
        others = (one for one in (mode.stages, mode.partners) if one is not None)
        rows = [row for one in others for row in one.describe()]
        return [("mode", mode.chosen), *rows, *mode.describe(), *wire]

    def close(self) -> None:
        """Collective, unless an engine was given: let the model go, and end what was connected.

        Hooks are removed, weights and gradients stay. An engine that was given stays open.
        """
        self.let_go()
        self._precision.close()
        self._release()

    def _check_open(self) -> None:
        check_open(is_closed=self._is_let_go, has_ended=self.world.has_ended)

    def let_go(self) -> None:
        """Take the hooks away; weights that the node shared become each rank's own."""
        if self._is_let_go:
            return
        self._is_let_go = True
        self._plain.close()
        self._exchange.mode.close()

    if not TYPE_CHECKING:  # for type checkers, what is not there stays unknown

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(explain_missing(self.__dict__, name))
