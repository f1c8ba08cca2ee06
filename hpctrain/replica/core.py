"""The replica: a model and its optimizer on every rank, trained as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain import log
from hpctrain.engines.base import Engine, Op
from hpctrain.errors import ConfigError
from hpctrain.fusion.arena import Arrived
from hpctrain.replica.arena_mode import Control
from hpctrain.replica.joining import stay_until_all_are_done
from hpctrain.replica.window import Window
from hpctrain.world import World

__all__ = ["Mode", "Replica", "Step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a call of `step()` did. True when the weights moved."""

    moved: bool
    reason: str
    """`stepped`, `accumulating`, `no gradients` or `no samples`."""

    def __bool__(self) -> bool:
        return self.moved


class Mode(Protocol):
    """How gradients travel, between the calls of a replica; see `ArenaMode`."""

    def fits(self) -> bool:
        """Whether the parameters are still what they were laid out as."""

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass; `fresh` begins from zero."""

    def edited(self) -> bool:
        """Whether somebody has written to gradients since `settle`."""

    def foreign(self) -> list[str]:
        """Parameters that somebody else's backward pass has written to."""

    def arm(self, control: Control) -> None:
        """Before the last backward pass of a window."""

    def settle(self) -> None:
        """After a backward pass."""

    def exchange(self, control: Control) -> Arrived:
        """Collective: sum all gradients over all ranks."""

    def average(self, divisor: float | Tensor) -> None:
        """Turn the sums into averages."""

    def zero(self) -> None:
        """Forget all gradients."""

    def hide_unused(self, used: frozenset[int] | None) -> None:
        """Give parameters that no rank used no gradient; None: all were used."""

    def gradients(self) -> list[Tensor | None]:
        """Copies of the gradients as they are now."""

    def add(self, gradients: list[Tensor | None]) -> None:
        """Add gradients that were set aside."""

    def each_alone(self) -> AbstractContextManager[None]:
        """A block in which every rank that steps updates everything by itself."""

    def describe(self) -> list[tuple[str, str]]:
        """What was chosen, in words."""

    def counts(self) -> dict[str, int]:
        """Messages sent and Python hooks called so far."""

    def close(self) -> None:
        """Let the parameters go."""


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
        reason: str,
        rebuild: Callable[[bool], Mode],
    ) -> None:
        self.world = world
        self.model = model
        self.optimizer = optimizer
        self.engine = engine
        self.reason = reason
        self.num_steps = 0
        self._mode = mode
        self._window = Window(accumulate)
        self._no_sync = False
        self._joining = False
        self._empty = False  # whether the last exchange brought no samples at all
        # Losses are divided by what the last sum was divided by, the same on all ranks: while batch
        # sizes stay the same, the sums are averages already, and large counts overflow nothing.
        self._scale: float | None = None
        self._identity = _identity(optimizer)
        self._rebuild = rebuild

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the model forward.

        Collective when parameters were added or converted since the last step: they become rank
        0's before they are used.
        """
        if not self._window.calls and self._is_outgrown():
            self._rebuild_mode(broadcast=True)
        if torch.is_grad_enabled() and self._mode.foreign():
            self._check_habits()  # loss.backward() instead of replica.backward(loss)
        return self.model(*arguments, **named)

    def _is_outgrown(self) -> bool:
        return _identity(self.optimizer) != self._identity or not self._mode.fits()

    def _rebuild_mode(self, *, broadcast: bool) -> None:
        """Collective: lay the gradients out anew."""
        self._mode.close()
        self._mode = self._rebuild(broadcast)
        self._identity = _identity(self.optimizer)

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
        weight = self._window.admit(num_samples)
        if weight > 0 and loss.numel() != 1:
            raise ConfigError(
                f"the loss has shape {tuple(loss.shape)}; reduce it to one number, a mean over the "
                "samples"
            )
        self._check_habits()
        aside = self._mode.gradients() if self._window.exchanged else None
        fresh = self._window.calls == 0 or self._window.exchanged
        self._mode.begin(fresh=fresh)
        calls = 1 if fresh else self._window.calls + 1
        closing = not self._no_sync and calls >= self._window.accumulate
        if closing and fresh and weight > 0 and self.engine.size == 1:
            weight = 1.0  # nothing to be weighed against: bit for bit what torch does
        self._agree_on_scale(weight)
        if closing:
            so_far = 0.0 if fresh else self._window.weight
            self._mode.arm((so_far + weight, float(calls), 1.0))
        if weight > 0:
            self._differentiate(loss, weight, retain_graph, create_graph)
        self._mode.settle()
        self._window.add(weight, weighted=num_samples is not None)
        if closing:
            self._exchange(1.0)
            if aside is not None:
                self._mode.add(aside)

    def _agree_on_scale(self, weight: float) -> None:
        """Collective, once: a first guess of what sums are divided by, from the largest batch."""
        if self._scale is not None:
            return
        largest = torch.tensor([weight], dtype=torch.float64)
        self.engine.allreduce_(largest, Op.MAX, what="the largest batch")
        self._scale = max(1.0, largest.item() * self.engine.size * self._window.accumulate)

    def _differentiate(
        self, loss: Tensor, weight: float, retain_graph: bool | None, create_graph: bool
    ) -> None:
        share = weight / (self._scale or 1.0)
        seed = None if share == 1.0 else torch.full_like(loss, share)
        try:
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
            if self._window.calls:
                raise ConfigError(
                    "parameters were added or converted in the middle of a step; do it after "
                    "replica.step()"
                )
            self._rebuild_mode(broadcast=False)  # forward has used them: too late to change them
        foreign = self._mode.foreign()
        if foreign:
            raise ConfigError(
                f"{', '.join(foreign[:3])} got gradients from a backward call that this replica "
                "did not make; call replica.backward(loss) instead of loss.backward(), or "
                "replica.zero_grad() to forget them (another model's loss that went through here)"
            )
        in_the_middle = self._window.calls > 0 and not self._window.exchanged
        if in_the_middle and self._mode.edited():
            raise ConfigError(
                f"gradients were changed between backward calls {self._window.calls} and "
                f"{self._window.calls + 1} of one step, before they were averaged over the ranks; "
                "clip, zero or edit them after the last backward of the step (replica.zero_grad() "
                "begins the step anew)"
            )

    def _exchange(self, taking_part: float) -> Arrived:
        """Collective: average the window's gradients over all ranks."""
        window = self._window
        arrived = self._mode.exchange((window.weight, float(window.calls), taking_part))
        self._empty = False
        on_cpu = arrived.control.device.type == "cpu"
        if on_cpu or window.weight == 0 or self._joining:
            weight, calls, ranks = arrived.control.tolist()
            self._empty = weight == 0
            if not self._empty:
                divisor = window.divisor(weight, calls, ranks)
                self._mode.average(divisor / (self._scale or 1.0))
                self._scale = divisor if on_cpu else self._scale
        else:
            divisor_there = window.divisor(*arrived.control.unbind())
            self._mode.average(divisor_there / (self._scale or 1.0))
        self._mode.hide_unused(frozenset() if self._empty else arrived.used())
        window.mark_exchanged()
        return arrived

    def synchronize(self) -> None:
        """Collective: average what there is now, in the middle of a window too.

        Every rank must have made at least one backward call since the last step, or none.
        """
        self._check_habits()
        if self._window.calls and not self._window.exchanged:
            self._exchange(1.0)

    def exchange_leftovers(self) -> int:
        """Collective: exchange what is left of a window, or nothing; how many ranks had something.

        For `join`: every rank of the block is either in this call or in a closing backward.
        """
        leftover = self._window.calls > 0 and not self._window.exchanged
        self._agree_on_scale(0.0)
        if not leftover:
            self._window.clear()
            self._mode.begin(fresh=True)
        arrived = self._exchange(1.0 if leftover else 0.0)
        if leftover:
            self.step()
        self._window.clear()
        return int(arrived.control[2].item())

    def step(self, *, flush: bool = False) -> Step:
        """Update the weights if the window is complete.

        The next backward begins from zero: no `zero_grad` is needed, and none does harm.

        Args:
            flush: Collective: step with what there is, as at the end of an epoch.

        Returns:
            True when the weights moved; False while accumulating, or when there was nothing.
        """
        if self._window.broken:
            raise ConfigError(
                f"a backward pass was interrupted by {self._window.broken}; call "
                "replica.zero_grad() and go on with the next batch instead of stepping"
            )
        foreign = self._mode.foreign()
        if foreign:
            self._check_habits()
        if flush:
            self.synchronize()
        if not self._window.calls:
            return Step(moved=False, reason="no gradients")
        if not self._window.exchanged:
            return Step(moved=False, reason="accumulating")
        if self._empty:
            self._window.clear()
            return Step(moved=False, reason="no samples")
        self.optimizer.step()
        self._window.clear()
        self.num_steps += 1
        return Step(moved=True, reason="stepped")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients and begin the window anew; `set_to_none` as in torch."""
        self._mode.zero()
        self._window.clear()
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
        try:
            with self._mode.each_alone():  # ranks that have left the block update nothing
                yield
                stay_until_all_are_done(self)
        finally:
            self._joining = False

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, in the form that the undistributed optimizer has."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load an optimizer's state, of one process or of many; the same on every rank."""
        self.optimizer.load_state_dict(state)

    def describe(self) -> str:
        """Say in a table what was chosen and why. The same on every rank."""
        rows = [
            ("engine", f"{self.engine.name}: {self.reason}"),
            ("ranks", str(self.engine.size)),
            *self._mode.describe(),
            ("accumulate", str(self._window.accumulate)),
            ("optimizer", f"{type(self.optimizer).__name__}, {len(self._identity)} parameters"),
        ]
        return log.table(("replica", ""), rows)

    def counts(self) -> dict[str, int]:
        """Messages sent and Python hooks called so far, and bytes in one exchange."""
        return self._mode.counts()

    def close(self) -> None:
        """Let the model go: hooks are removed, weights and gradients stay."""
        self._mode.close()


def _identity(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Which parameters an optimizer has now, in its order."""
    return tuple(id(p) for group in optimizer.param_groups for p in group["params"])
