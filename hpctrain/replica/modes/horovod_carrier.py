"""Horovod's `DistributedOptimizer` as a carrier of gradients, and all that is known of its insides.

It wraps a stand-in optimizer that never steps. Its public methods cannot say "send what is left and
wait later", nor take its hooks away, so a few of its attributes are used; they are those of Horovod
0.28, its last release. It sends contiguous tensors of float16, float32 and float64, with counts of
32 bits; `Wire` makes everything else fit: bfloat16 and complex gradients, other memory layouts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.engines import HorovodEngine, Op
from hpctrain.errors import ConfigError
from hpctrain.replica.horovod_settings import HorovodTraining, cut_into_groups
from hpctrain.replica.modes.base import unfrozen

__all__ = ["Carrier", "Wire", "check_parameters", "near_power_of_two"]

_NEVER = 2**62  # backward passes until Horovod's own hooks send something
_num_carriers = 0
_MOST = 2**31 - 1
_PLAIN = {torch.float32: torch.float32, torch.float64: torch.float64}


class Wire:
    """Horovod's `compress` and `decompress`.

    Args:
        half: Whether everything travels as float16.
    """

    def __init__(self, *, half: bool) -> None:
        self.half = half
        self.divisor = 1.0
        """What gradients are divided by before they leave; nobody multiplies on arrival."""

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
                f"parameter {name} is complex, and op='adasum' means nothing for it; use "
                "op='average'"
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
        parameters: Whose gradients travel; those without elements stay.
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
                # its own; set here, gradients are combined and all ranks step alike.
                self._optimizer.op = hvd.Adasum

    @property
    def num_handed_over(self) -> int:
        """How many tensors or groups are handed to Horovod in one step."""
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
