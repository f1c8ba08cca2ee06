"""Gradients through Horovod's own `DistributedOptimizer` and tensor fusion, with a replica's rules.

Horovod's optimizer only carries gradients here: it wraps a stand-in that never steps, and the
user's own optimizer stays the truth. What is mended on our side:

- raw Horovod gives unused parameters zeros, so that they decay: which parameters some rank used
  is sent with the weights of the average, in one small message per step;
- groups hang in raw Horovod when ranks use different branches: they are sent as groups regardless;
- sparse, bfloat16, complex and non-contiguous gradients; ranks that have run out of data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.engines import HorovodEngine, Op
from hpctrain.errors import ConfigError
from hpctrain.fusion import CONTROL_WORDS, Arrived, hook_gradient
from hpctrain.precision import multiply, sum_of_squares
from hpctrain.replica.control_words import ControlWords
from hpctrain.replica.horovod_settings import HorovodTraining, cut_into_groups
from hpctrain.replica.modes.base import BackwardWatch, Mode, look_at, unfrozen

if TYPE_CHECKING:
    from hpctrain.engines import Engine

__all__ = ["Carrier", "HorovodMode", "Wire", "check_parameters", "near_power_of_two"]

_NOTHING = ControlWords(*[0.0] * CONTROL_WORDS)


class HorovodMode(Mode):
    """How a replica's gradients are exchanged when Horovod fuses them.

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
                "op='adasum' has no weights, so num_samples has no effect; leave it out, or use "
                "op='average'"
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
        """Turn the results into averages."""
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
        """Multiply, the excluded parameters by a separate factor."""
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
        """Tensors passed to Horovod (which fuses them), Python hooks called, bytes per step."""
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
        """Whether gradients are sent as soon as they are ready."""
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
                "(reentrant checkpointing does so), and the first part may already have been "
                "sent; use overlap=False, or checkpoint(..., use_reentrant=False)"
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
            f"op='adasum' over {engine.size} ranks: Horovod supports it only for the whole world "
            "and a power-of-two number of ranks (on GPUs: nodes); use op='average', or another "
            "number of ranks"
        )
    if settings.num_groups and engine.process_set.process_set_id != 0:
        raise ConfigError(
            "num_groups on a part of the world: Horovod supports groups only over all of its "
            "ranks; leave it out, or use fusion='arena'"
        )


_NEVER = 2**62  # backward passes until Horovod's own hooks send something
_num_carriers = 0
_MOST = 2**31 - 1
_PLAIN = {torch.float32: torch.float32, torch.float64: torch.float64}


class Wire:
    """Horovod's `compress` and `decompress`.

    Args:
        half: Whether everything is sent as float16.
    """

    def __init__(self, *, half: bool) -> None:
        self.half = half
        self.divisor = 1.0
        """What gradients are divided by before they are sent; not undone on arrival."""

    def carried_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a gradient on its way. Halves are summed as float32: 65504 is soon full."""
        if self.half:
            return torch.float16
        return _PLAIN.get(dtype.to_real(), torch.float32)

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """What to send, and the gradient itself where the two are not one."""
        message = gradient.resolve_conj().resolve_neg()
        if message.is_complex():
            message = torch.view_as_real(message)
        if self.divisor != 1.0:
            message = message / self.divisor
        message = message.to(self.carried_as(gradient.dtype)).contiguous()
        at_home = message.dtype == gradient.dtype and message.data_ptr() == gradient.data_ptr()
        return message, None if at_home else gradient

    def decompress(self, message: Tensor, gradient: Tensor | None) -> Tensor:
        """Put what arrived where the gradient is, in its own dtype and layout."""
        if gradient is None:
            return message
        if not gradient.is_complex():
            return gradient.copy_(message)
        real = message.to(gradient.dtype.to_real())
        return gradient.copy_(torch.view_as_complex(real))


def check_parameters(names: Sequence[str], parameters: Sequence[Tensor], *, adasum: bool) -> None:
    """Refuse, by name, parameters whose gradients Horovod cannot carry.

    Raises:
        ConfigError: the same on all ranks.
    """
    for name, parameter in zip(names, parameters, strict=True):
        if adasum and parameter.is_complex():
            raise ConfigError(
                f"parameter {name} is complex, which op='adasum' does not support; use op='average'"
            )
        count = parameter.numel() * (2 if parameter.is_complex() else 1)
        if count > _MOST:
            raise ConfigError(
                f"parameter {name} has {count} elements, and Horovod counts up to {_MOST}; use "
                "fusion='arena', which cuts long messages"
            )


def near_power_of_two(value: float) -> float:
    """The largest power of two that is not above a positive value: dividing by it rounds nothing.

    Args:
        value: Above 0.
    """
    return math.ldexp(0.5, math.frexp(value)[1])


class Carrier:
    """Collective: sums gradients over all ranks, in place.

    Args:
        engine: Over Horovod.
        names: Of the parameters; the same on every rank.
        parameters: Whose gradients are exchanged; those without elements are not.
        settings: Groups, op and predivision.
        wire: How gradients look on their way.
    """

    def __init__(
        self,
        engine: HorovodEngine,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        settings: HorovodTraining,
        wire: Wire,
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own imports warn of what setuptools will drop
            import horovod.torch as hvd
        self._hvd = hvd
        predivided = settings.gradient_predivide_factor != 1.0
        if predivided and hvd.rocm_built():
            raise ConfigError(
                "gradient_predivide_factor is not supported by Horovod on ROCm; leave it out"
            )
        self.divided_by = engine.size if predivided else 1
        """What sums have been divided by on arrival: Horovod averages where it predivides."""
        sent = [(name, p) for name, p in zip(names, parameters, strict=True) if p.numel()]
        self._parameters = [p for _, p in sent]
        self._optimizer: Any = None
        self._groups: list[tuple[torch.nn.Parameter, ...]] = []
        if engine.size > 1 and sent:
            prefix = _prefix(engine)
            groups = None
            if settings.num_groups:
                kinds = [(p, f"{wire.carried_as(p.dtype)} {p.device}") for p in self._parameters]
                groups = cut_into_groups(kinds, settings.num_groups)
                self._groups = [tuple(group) for group in groups]
            with unfrozen(self._parameters):
                self._optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(self._parameters, lr=0.0),
                    named_parameters=[(f"{prefix}.{name}", p) for name, p in sent],
                    compression=wire,
                    backward_passes_per_step=_NEVER,
                    op=hvd.Average if predivided else hvd.Sum,
                    gradient_predivide_factor=settings.gradient_predivide_factor,
                    groups=groups,
                    process_set=engine.process_set,
                )
            if settings.op == "adasum":
                # Asked for by name, Horovod would step inside backward, each rank with a state of
                # its own; set here, gradients are combined and all ranks make the same step.
                self._optimizer.op = hvd.Adasum

    @property
    def num_handed_over(self) -> int:
        """How many tensors or groups are passed to Horovod in one step."""
        return len(self._groups or self._parameters) if self._optimizer is not None else 0

    def watch_backward(self, on: bool) -> None:
        """Whether gradients leave as soon as a backward pass has added to them."""
        if self._optimizer is not None:
            self._optimizer._handles.clear()  # of passes that sent nothing
            self._optimizer.set_backward_passes_per_step(1 if on else _NEVER)
            for group in self._groups:
                self._optimizer._group_counts[group] = 0

    def send_the_rest(self) -> int:
        """Collective: send what backward has not sent; every parameter has a gradient by now.

        Returns:
            How many tensors or groups are on their way, earlier ones included.
        """
        if self._optimizer is None:
            return 0
        handles = self._optimizer._handles
        for group in self._groups:
            if group not in handles:
                for parameter in group:
                    handles.pop(parameter, None)
                handles[group] = self._optimizer._grouped_allreduce_grad_async(group)
        for parameter in [] if self._groups else self._parameters:
            if handles.get(parameter, (None, None))[0] is None:
                handles[parameter] = self._optimizer._allreduce_grad_async(parameter)
        return self.num_handed_over

    def wait(self) -> None:
        """Wait until all gradients are here; errors are Horovod's own."""
        if self._optimizer is not None:
            self._optimizer.synchronize()

    def close(self) -> None:
        """Let the parameters go: Horovod cannot take its hooks away, but they end with these."""
        if self._optimizer is not None:
            self.watch_backward(False)
            self._optimizer._grad_accs.clear()


def _prefix(engine: HorovodEngine) -> str:
    """Collective: a name that no other carrier over these ranks has."""
    global _num_carriers  # Horovod's names are the process's own
    number = torch.tensor([_num_carriers])
    _num_carriers = int(engine.allreduce_(number, Op.MAX, what="carriers").item()) + 1
    return f"hpctrain.carrier{_num_carriers}"
