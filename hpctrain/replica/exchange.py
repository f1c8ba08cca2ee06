"""The exchange of a replica: gradients of a window become averages over all ranks.

What every rank sends with its gradients is in `control_words`; how they are exchanged is up to the
mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hpctrain import log
from hpctrain.engines import Engine, Op
from hpctrain.errors import CollectiveError, ConfigError, HpcTrainError
from hpctrain.fusion import Arrived
from hpctrain.precision import ScaleAndClip
from hpctrain.replica.checks import check_gradients, check_unchanged
from hpctrain.replica.control_words import (
    ControlWords,
    LateSums,
    check_counted,
    check_sums,
    digest_options,
    own_words,
)
from hpctrain.replica.equal_ranks import check_equal
from hpctrain.replica.finite import FiniteCheck
from hpctrain.replica.modes import Mode
from hpctrain.replica.naming import named_parameters
from hpctrain.replica.window import Window
from hpctrain.world import World, phase

__all__ = ["Exchange"]

_EXCHANGES_LATER = 4
"""When sums are read from a GPU. The CPU is rarely further ahead of it."""


class Exchange:
    """Averages gradients over all ranks, window by window, and refuses what ranks do differently.

    Args:
        world: All ranks.
        model: Whose parameters have names.
        optimizer: What is trained.
        engine: Over the ranks that train together.
        mode: How gradients are exchanged.
        accumulate: Backward calls that make one window.
        scale_and_clip: Loss scaling and clipping.
        rebuild: Collective: makes a new mode; True: weights become rank 0's first.
        stops_at_nonfinite: Whether a loss that is inf or NaN stops all ranks.
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
        scale_and_clip: ScaleAndClip,
        rebuild: Callable[[bool], Mode],
        stops_at_nonfinite: bool,
    ) -> None:
        self.world = world
        self.engine = engine
        self.mode = mode
        self.window = Window(accumulate)
        self.scale_and_clip = scale_and_clip
        self.observers = world.observers
        """Observers of this rank; the world's own list, so that more can be added later."""
        self.num_samples: int | None = None
        """Of the last backward call, where there are observers; None: the loop did not say."""
        self.num_steps = 0
        """Steps so far, including those that all ranks skipped after an overflow."""
        self.num_exchanges = self.num_updates = self.num_loads = 0
        self.is_joining = False
        """Whether ranks may be in different steps: inside `join`."""
        self.is_empty = False
        """Whether the last exchange had no samples at all."""
        self.has_new_weights = False
        """Whether this rank's model has loaded a state since the last exchange."""
        # Losses are divided by what the last sum was divided by, the same on all ranks: while batch
        # sizes stay the same, the sums are averages already, and large counts overflow nothing.
        self.scale: float | None = None
        self.finite = FiniteCheck(
            world,
            num_ranks=engine.size,
            watches=stops_at_nonfinite and scale_and_clip.scaler is None,
        )
        self.when_rebuilt: Callable[[], None] = lambda: None
        self._model = model
        self._optimizer = optimizer
        self._rebuild = rebuild
        self._identity = _identity(optimizer)
        self._names = named_parameters(model, optimizer)[0]
        self._aside: list[Tensor | None] | None = None
        """Averages of earlier backward calls, while later ones of the same step are collected."""
        self._seen: tuple[torch.nn.Parameter, weakref.ref[Tensor]] | None = None
        """A parameter and its gradient after the last exchange or step."""
        self._nonfinite: tuple[ControlWords, str | None] | None = None
        """The sums in which a rank reported a non-finite value, and what this rank found."""
        self._late: list[LateSums] = []
        world.shares.forget()  # batches that were read before there was anything to train
        self._batches_before = world.shares.num_batches

    # The parameters

    @property
    def num_parameters(self) -> int:
        """Of the optimizer."""
        return len(self._identity)

    def is_outgrown(self) -> bool:
        """Whether the optimizer has other parameters than the mode was made for."""
        return _identity(self._optimizer) != self._identity or not self.mode.fits()

    def rebuild(self, *, broadcast: bool) -> None:
        """Collective: make a new mode for the parameters that there are now."""
        self.mode.close()
        use = self.mode.wire
        if use is not None and use.wire.has_state and self.world.rank == 0:
            log.warn(f"the wire {use.wire.name} begins anew: the parameters have changed")
        num_loads = self.num_loads
        self.mode = self._rebuild(broadcast)
        self.num_loads = num_loads  # others take rank 0's state there
        self._identity = _identity(self._optimizer)
        self._names = named_parameters(self._model, self._optimizer)[0]
        self.when_rebuilt()

    def check_parameters(self) -> None:
        """Collective if parameters were added or converted since forward: take them as they are."""
        if self.is_outgrown():
            check_unchanged(self.window)
            self.rebuild(broadcast=False)  # forward has used them: too late to change them

    def check_gradients(self) -> None:
        """Refuse what would make ranks silently different, by name."""
        self.check_parameters()
        check_gradients(self.mode, self.window)

    # Before the exchange

    def set_aside(self) -> None:
        """Keep averages while a further backward pass before the step begins from zero."""
        self._aside = self.mode.gradients()

    def reset_window(self) -> None:
        """Begin a new window, and forget what was found in the old one."""
        self.window.clear()
        self.scale_and_clip.forget()
        self._aside = self._nonfinite = None
        self.finite.forget(step=self.num_steps)

    def drop(self) -> None:
        """Drop gradients that cannot be used, so that a caught error leaves none behind."""
        self.mode.begin(fresh=True)
        self.reset_window()

    def agree_on_scale(self, weight: float, *, counted: bool | None) -> None:
        """Collective, once: a first guess of what sums are divided by, and do all count samples?"""
        if self.scale is not None:
            return
        largest = torch.tensor([weight, counted is True, counted is False], dtype=torch.float64)
        self.engine.allreduce_(largest, Op.MAX, what="the largest batch")
        most, some_count, some_do_not = largest.tolist()
        check_counted(some_count + some_do_not, some_count, here=counted is True)
        self.scale = max(1.0, most * self.engine.size * self.window.accumulate)

    def forget_losses(self) -> None:
        """A new window begins: what was found in the losses of the old one is over."""
        self.finite.finding = None
        if self.mode.partners is not None:
            self.mode.partners.forget_losses()

    def look_at_loss(self, loss: Tensor) -> None:
        """Note a loss: is it finite, and that of the ranks with other parts of this model?

        Collective over the tensor dimension where the loss is a DTensor.
        """
        self.finite.look_at_loss(loss, step=self.num_steps)
        if self.mode.partners is not None:
            self.mode.partners.note_loss(loss)

    @property
    def examines(self) -> bool:
        """Whether gradients are checked before the exchange. Not in `join`: not all step there."""
        return self.scale_and_clip.examines and not self.is_joining

    def arm(self, weight: float, calls: int, *, counted: bool) -> None:
        """Before the last backward pass of a window, which gradients may leave in.

        Args:
            weight: Of the whole window.
            calls: Of the whole window.
            counted: Whether they had sample counts.
        """
        if not self.examines:
            words = self._words(weight, calls, counted=float(calls) if counted else 0.0)
            self.mode.watch.arm(words)

    def _words(
        self,
        weight: float,
        calls: int,
        *,
        counted: float,
        plain: bool = False,
        present: bool = True,
    ) -> ControlWords:
        return own_words(
            rank=self.world.rank,
            weight=weight,
            calls=float(calls),
            present=present,
            counted=counted,
            plain=plain,
            sequence=self.num_exchanges + self.num_updates + self._num_batches(),
            options=digest_options(
                self._optimizer.param_groups, self.mode.parameters, number=self.num_exchanges
            ),
            finding=self.finite.finding,
            loads=self.num_loads,
            new_weights=self.has_new_weights,
            gathers=self.mode.gather_digest(),
        )

    def _num_batches(self) -> int:
        """Batches that loaders have returned since the last exchange."""
        return self.world.shares.num_batches - self._batches_before

    # The exchange

    def run(self, *, present: bool = True) -> Arrived:
        """Collective: average the window's gradients over all ranks, unscaled and clipped.

        Args:
            present: Whether this rank has a window; False: it takes part with nothing (`join`).
        """
        if self.observers:
            with phase(self.observers, "exchange"):
                return self._run(present)
        return self._run(present)

    def _run(self, present: bool) -> Arrived:
        window, mode = self.window, self.mode
        if self.examines:
            self.scale_and_clip.examine(self._names, mode.local_gradients())
        words = self._words(
            window.weight,
            window.calls,
            counted=float(window.counted),
            plain=window.plain,
            present=present,
        )
        self.num_exchanges += 1
        self._batches_before = self.world.shares.num_batches
        trouble = None
        if mode.partners is not None:
            words, trouble = mode.partners.compare(words)
        arrived = mode.exchange(words)
        if trouble is not None:
            self.drop()
            raise CollectiveError(trouble)
        self.has_new_weights = False
        self.is_empty = False
        plain = window.plain
        alone = self.engine.size == 1  # then this rank has the totals without reading from a GPU
        on_cpu = alone or arrived.control.device.type == "cpu"
        if on_cpu or window.weight == 0 or self.is_joining:
            totals = words if alone else ControlWords(*arrived.control.tolist())
            self._check_totals(words, totals)
            self.is_empty = totals.weight == 0
            plain = totals.plain > 0  # a rank that ran out of data does as the others do
        else:
            self._read_late(words, arrived.control)
        if not self.is_empty:
            # On a GPU the device divides on all ranks, also where the totals were read: same bits.
            given = totals[:3] if on_cpu else arrived.control[:3].unbind()
            divisor = window.divisor(*given)
            seeded = 1.0 if plain else self.scale or 1.0
            self.scale_and_clip.average(mode, divisor / seeded, self._optimizer.param_groups)
            if on_cpu and not plain:
                self.scale = float(divisor)
        mode.hide_unused(frozenset() if self.is_empty else arrived.used())
        if self._aside is not None:
            mode.add(self._aside)
            self._aside = None
        window.mark_exchanged()
        self.note_seen()
        return arrived

    def run_plain(self) -> None:
        """Collective: average gradients as they lie on the parameters, each rank by its share.

        Averages of earlier calls are in them. They are equal on all ranks and shares add up to the
        number of ranks, so that averaging leaves them as they are.
        """
        window, parameters = self.window, self.mode.parameters
        self.agree_on_scale(1.0, counted=None)
        self.finite.look_at_gradients(self._names, parameters, step=self.num_steps)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if window.share == 0.0 and gradients:  # a mean over no samples is NaN
            torch._foreach_zero_(gradients)
        elif window.share != 1.0 and gradients:
            torch._foreach_mul_(gradients, window.share)
        self.run()

    def _check_totals(self, mine: ControlWords, totals: ControlWords) -> None:
        """Refuse what ranks did differently, and keep what all must know at the step."""
        try:
            check_sums(mine, totals, size=self.engine.size, step=self.num_steps)
            self._check_weights(totals)
        except HpcTrainError:
            self.drop()
            raise
        self._nonfinite = (totals, self.finite.finding) if totals.nonfinite else None

    def _read_late(self, mine: ControlWords, control: Tensor) -> None:
        """On a GPU: check the sums of an exchange that is long done."""
        finding = self.finite.finding
        self._late.append(LateSums(control, mine, step=self.num_steps, finding=finding))
        if len(self._late) > _EXCHANGES_LATER:
            late = self._late.pop(0)
            sums = late.read()
            check_sums(late.mine, sums, size=self.engine.size, step=late.step)
            self._check_weights(sums)
            self._nonfinite = (sums, late.finding) if sums.nonfinite else None

    def _check_weights(self, totals: ControlWords) -> None:
        """Collective where some models have loaded a state: they must have the same weights.

        A rank may load weights to evaluate with, as long as it loads its own again.
        """
        num_loaded = totals.new_weights
        if not 0 < num_loaded < totals.present or self.is_joining:
            return
        what = f"after model.load_state_dict() on {num_loaded:.0f} of {totals.present:.0f} ranks"
        if self.world.size != self.engine.size or self.mode.holds_shards:  # nothing to compare
            raise ConfigError(f"{what}: weights differ; load the same state on every rank")
        check_equal(self.world, self._names, self.mode.parameters, what)

    def stop_at_nonfinite(self) -> None:
        """Collective if a rank has found something: stop before it gets into the weights.

        Not before the step: a GradScaler of the user's leaves out a step that has overflowed.
        """
        if self._nonfinite is None:
            return
        try:
            self.finite.stop(*self._nonfinite)
        finally:
            self.drop()

    # What the last exchange or step has left

    def note_seen(self) -> None:
        """Gradients are what an exchange or a step has left."""
        pairs = ((p, p.grad) for p in self.mode.parameters)
        found = next(((p, g) for p, g in pairs if g is not None), None)
        self._seen = None if found is None else (found[0], weakref.ref(found[1]))

    def is_seen(self) -> bool:
        """Whether gradients are still those that the last exchange or step has left."""
        if self._seen is None:
            return False
        parameter, gradient = self._seen
        return parameter.grad is not None and parameter.grad is gradient()

    def is_by_hand(self) -> bool:
        """Whether gradients are on the parameters that no exchange has seen."""
        if self.engine.size == 1 or (self.window.exchanged and not self.window.stepped):
            return False
        return not (self.mode.has_none() or self.is_seen())


def _identity(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Which parameters an optimizer has now, in its order."""
    return tuple(id(p) for group in optimizer.param_groups for p in group["params"])
