"""Gradients through Horovod's own `DistributedOptimizer` and tensor fusion, with a replica's rules.

Horovod's optimizer only carries gradients here: it wraps a stand-in that never steps, and the
user's own optimizer stays the truth. What is mended on our side:

- raw Horovod gives unused parameters zeros, so that they decay: which parameters some rank used
  travels with the weights of the average, in one small message per step;
- groups hang in raw Horovod when ranks use different branches: they travel as groups regardless;
- sparse, bfloat16, complex and non-contiguous gradients; ranks that have run out of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.engines import HorovodEngine, Op
from hpctrain.errors import ConfigError
from hpctrain.fusion import CONTROL_WORDS, Arrived, hook_gradient
from hpctrain.precision import multiply, sum_of_squares
from hpctrain.replica.control_words import ControlWords
from hpctrain.replica.horovod_settings import HorovodTraining
from hpctrain.replica.modes.base import BackwardWatch, Mode, look_at, unfrozen
from hpctrain.replica.modes.horovod_carrier import (
    Carrier,
    Wire,
    check_parameters,
    near_power_of_two,
)

if TYPE_CHECKING:
    from hpctrain.engines import Engine

__all__ = ["HorovodMode"]

_NOTHING = ControlWords(*[0.0] * CONTROL_WORDS)


class HorovodMode(Mode):
    """How a replica's gradients travel when Horovod fuses them.

    Args:
        engine: Over Horovod.
        names: Of the parameters; the same on every rank.
        parameters: What the user's optimizer updates.
        settings: Checked among themselves; here against engine and parameters.
        overlap: Whether gradients leave while backward still runs.

    Raises:
        ConfigError: the same on all ranks; Horovod cannot do that here.
    """

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        *,
        settings: HorovodTraining,
        overlap: bool,
    ) -> None:
        if not isinstance(engine, HorovodEngine):
            raise ConfigError(
                f"fusion='horovod' on the {engine.name} engine; use engine='horovod', or "
                "fusion='arena', which works on every engine"
            )
        super().__init__(names, parameters)
        self._adasum = settings.op == "adasum"
        self.weighs_samples = not self._adasum
        _check_engine(engine, settings)
        check_parameters(names, parameters, adasum=self._adasum)
        self.engine = engine
        self.settings = settings
        self.overlap = overlap
        self._wire = Wire(half=settings.compression == "fp16")
        self._carrier = Carrier(engine, self.names, self.parameters, settings, self._wire)
        self._notes = _Notes(self.names, self.parameters)
        leaves = overlap and engine.size > 1
        self.watch = BackwardWatch(
            self._notes,
            partial(look_at, self.parameters),
            depart=self._depart if leaves else None,
        )
        self._scale: float | None = None  # for float16: about the weight of a step, over all ranks
        self._weight = 1.0  # of the last exchange, over all ranks
        self._num_messages = 0

    # Around a backward pass

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass; what is fresh or frozen has no gradient, as in torch."""
        for parameter in self.parameters:
            if fresh or not parameter.requires_grad:
                parameter.grad = None
        if fresh:
            self._forget()

    def _depart(self, control: ControlWords) -> None:
        """Let gradients leave while the backward pass that follows runs."""
        self._prepare(control)
        self._carrier.watch_backward(True)
        self._notes.leaving = True

    def take_all(self) -> None:
        """Gradients are where torch has put them: an exchange takes them from there."""
        self.watch.forget()
        self._notes.used = {i for i, p in enumerate(self.parameters) if p.grad is not None}

    def _forget(self) -> None:
        self.watch.forget()
        self._notes.used.clear()
        self._carrier.watch_backward(False)

    # Exchange

    def exchange(self, control: ControlWords) -> Arrived:
        """Collective: sum all gradients over all ranks.

        Raises:
            ConfigError: on all ranks; Adasum cannot count samples.
        """
        totals = self._travel(control)
        num_used = len(self._notes.used)
        self._forget()
        words = ControlWords(*totals[:CONTROL_WORDS].tolist())
        if words.counted and self._adasum:
            self.begin(fresh=True)
            raise ConfigError(
                "op='adasum' has no weights, so num_samples means nothing to it; leave out "
                "num_samples, or use op='average'"
            )
        flags = (tuple(range(len(self.parameters))), totals[CONTROL_WORDS:])
        every = num_used == len(self.parameters)
        return Arrived(control=totals[:CONTROL_WORDS], flags=(flags,), all_used_here=every)

    def _travel(self, control: ControlWords) -> Tensor:
        """Collective: sum gradients and words over all ranks; returns the words."""
        marks = [float(index in self._notes.used) for index in range(len(self.parameters))]
        totals = torch.tensor([*control, *marks], dtype=torch.float64)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        if self.engine.size > 1:
            if not self._notes.leaving:
                self._prepare(control)
            self._notes.leaving = False
            self._num_messages += self._carrier.send_the_rest() + 1
            # All gradients of this rank are on their way, so a rank that is missing is told here.
            self.engine.allreduce_(totals, Op.SUM, what="weights and use of gradients")
            self.engine.meet(self._carrier.wait, "gradients by Horovod", "", None)
        self._weight = totals[0].item()
        return totals

    def _prepare(self, control: ControlWords) -> None:
        """Collective the first time: decide what gradients are divided by before they leave."""
        if self._adasum:
            self._wire.divisor = control[0] or 1.0  # each rank's own mean
            return
        if not self._wire.half:
            return
        if self._scale is None:
            first = torch.tensor([control[0]], dtype=torch.float64)
            self._weight = self.engine.allreduce_(first, Op.SUM, what="first weights").item()
            self._num_messages += 1
        if self._weight > 0:  # of the step before: near enough, and no rank has to wait for it
            self._scale = near_power_of_two(self._weight)
        self._wire.divisor = self._scale or 1.0

    def average(self, divisor: float | Tensor) -> None:
        """Turn what came into averages."""
        rest = self.rest_of(divisor)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if rest != 1.0 and gradients:
            torch._foreach_div_(gradients, rest)

    def rest_of(self, divisor: float | Tensor) -> float:
        """What is still to be divided by, after what Horovod and the wire have divided by."""
        rest = float(divisor)
        if self.engine.size > 1:
            rest /= self._weight if self._adasum else self._wire.divisor * self._carrier.divided_by
        return rest

    def norm_squared(self, excluded: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Sums of squares without the excluded parameters, and of these."""
        device = self.parameters[0].device
        kept, left = self._split(excluded)
        return sum_of_squares(kept, device), sum_of_squares(left, device)

    def scale(self, factor: Tensor, excluded: frozenset[int], excluded_factor: Tensor) -> None:
        """Multiply, the excluded parameters by a factor of their own."""
        kept, left = self._split(excluded)
        multiply(kept, factor)
        multiply(left, excluded_factor)

    def clamp(self, limit: float, excluded: frozenset[int]) -> None:
        """Limit each element's size, but for the excluded parameters."""
        for gradient in self._split(excluded)[0]:
            gradient.clamp_(-limit, limit)

    def zero(self) -> bool:
        """Forget all gradients. Collective after an interrupted backward pass that sent some."""
        exchanged = self._notes.leaving
        if exchanged:
            self._travel(_NOTHING._replace(interrupted=1.0))
        self.begin(fresh=True)
        return exchanged

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients that were set aside."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    # Reports

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what was chosen."""
        when = "while backward runs" if self.overlap else "after backward"
        groups = f" in {self._carrier.num_handed_over} groups" if self.settings.num_groups else ""
        return [
            ("gradients", f"Horovod: {len(self.parameters)} tensors{groups}, fused by Horovod"),
            ("messages", f"as Horovod fuses, and 1 for weights; sent {when}"),
            ("combined by", f"{self.settings.op}, compression {self.settings.compression}"),
        ]

    def counts(self) -> dict[str, int]:
        """Tensors handed to Horovod (which fuses them), Python hooks called, bytes a step."""
        sizes = [
            p.numel() * (2 if p.is_complex() else 1) * self._wire.carried_as(p.dtype).itemsize
            for p in self.parameters
        ]
        per_note = 2 if self.engine.size > 1 else 1  # ours and Horovod's
        return {
            "messages": self._num_messages,
            "hooks": self._notes.num_calls * per_note,
            "bytes": sum(sizes),
        }

    def close(self) -> None:
        """Let the parameters go."""
        self._notes.close()
        self._carrier.close()


class _Notes:
    """Which gradients a backward pass has added to: hooks that run before Horovod's own."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        self._names = names
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._ready: dict[int, None] = {}  # in order, by index
        self.used: set[int] = set()
        """By index, since the last exchange."""
        self.leaving = False
        """Whether gradients leave as soon as they are there."""
        self.num_calls = 0
        with unfrozen(parameters):
            self._handles = [hook_gradient(p, self._note) for p in parameters]

    def hook(self) -> None:
        """All are hooked from the beginning, frozen ones too."""

    def uncollected(self) -> list[str]:
        """Parameters that a pass has used since the last `collect`, by name."""
        return [self._names[index] for index in self._ready]

    def collect(self) -> None:
        """After a backward pass of ours."""
        self.used.update(self._ready)
        self._ready.clear()

    def _note(self, parameter: Tensor) -> None:
        self.num_calls += 1
        index = self._index[id(parameter)]
        if self.leaving and index in self._ready:
            raise ConfigError(
                f"the gradient of {self._names[index]} was added to twice in one backward pass "
                "(reentrant checkpointing does so), and the first part may have left already; use "
                "overlap=False, or checkpoint(..., use_reentrant=False)"
            )
        self._ready[index] = None
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            parameter.grad = gradient.detach().to_dense()
        elif gradient is not None and gradient.requires_grad:  # of create_graph=True
            parameter.grad = gradient.detach().clone()

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _check_engine(engine: HorovodEngine, settings: HorovodTraining) -> None:
    if settings.op == "adasum" and engine.size > 1 and Op.ADASUM not in engine.ops:
        raise ConfigError(
            f"op='adasum' over {engine.size} ranks: Horovod has it for the whole world, and for a "
            "power of two ranks (on GPUs: nodes); use op='average', or other ranks"
        )
    if settings.num_groups and engine.process_set.process_set_id != 0:
        raise ConfigError(
            "num_groups on a part of the world: Horovod makes groups over all of its ranks alone; "
            "leave it out, or use fusion='arena'"
        )
