"""Measure a footprint without memory: one micro-batch on torch's fake device. Needs torch.

Fake tensors have shapes and formats and no data, so that a model of any size runs through forward
and backward on a login node. What forward keeps for backward is counted where autograd keeps it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from hpctrain.errors import ConfigError
from hpctrain.name_patterns import is_inside
from hpctrain.pipeline import (
    chain_of,
    describe_raised,
    needs_values,
    quiet_fake_tensors,
    shown_tensors,
)
from hpctrain.predict.footprint import FORMATS, Footprint
from hpctrain.predict.unit_watch import UnitWatch
from hpctrain.sharding import choose_units, module_facts
from hpctrain.tensor_parallel import divided_sizes, plan_layers

__all__ = ["StepParts", "measure_footprint", "state_copies", "units_of"]

_LARGE = 0.5
"""A module with more than this part of all parameters is opened: it is too large for one unit."""
_PROBE = 64


class StepParts(Protocol):
    """What a step consists of; `hpctrain.predict.Subject` is one."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What trains it."""

    @property
    def loss(self) -> Callable[[], Tensor]:
        """Forward of one micro-batch."""

    @property
    def batch(self) -> int:
        """Samples of the micro-batch."""


def measure_footprint(
    make: Callable[[], StepParts],
    *,
    precision: str = "fp32",
    tensor: Mapping[str, str] | None = None,
    name: str = "",
) -> Footprint:
    """Run one micro-batch on the fake device.

    Args:
        make: Builds the model, the optimizer and the micro-batch; it is called on the fake device,
            where nothing has memory.
        precision: As `hpctrain.distribute` takes it.
        tensor: Layers that tensor parallelism divides, as `hpctrain.split` takes them.
        name: What the model is called; empty: its class.

    Raises:
        ConfigError: the model does not run there, with what failed; a pattern matches nothing.
    """
    if precision not in FORMATS:
        raise ConfigError(f"precision={precision!r} is unknown; use one of {', '.join(FORMATS)}")
    # What a data set or a file brought has data, and becomes fake where it is first used.
    with FakeTensorMode(allow_non_fake_inputs=True):
        with _replacing_parameters(), _refusing("the model cannot be built", _BUILT):
            parts = make()
        model = parts.model
        _check_device(model)
        # What split would refuse on any number of ranks is refused here.
        kinds = plan_layers(model, tensor, 1) if tensor else {}
        styles = {name: _watched_as(model.get_submodule(name), kinds[name]) for name in kinds}
        chain, no_stages = _chain(model)
        with _refusing(f"{type(model).__name__} does not run", _RUN, model):
            watch = UnitWatch(model, units_of(model), styles)
            watch.run(parts.loss, precision)
    copies = max(
        (state_copies(parts.optimizer, group) for group in parts.optimizer.param_groups), default=0
    )
    return Footprint(
        model=name or type(model).__name__,
        batch=parts.batch,
        units=watch.units(chain),
        no_stages=no_stages,
        state_copies=copies,
        precision=precision,
        transient_bytes=watch.transient_bytes,
        ties=watch.ties,
        tensor_sizes=tuple(divided_sizes(model, kinds)),
    )


_BUILT = "build it without looking at values, and on the CPU"
_RUN = "forward must not look at values: no item(), no nonzero(), no branch on a tensor"


@contextmanager
def _refusing(what: str, cure: str, model: nn.Module | None = None) -> Iterator[None]:
    """Name what failed on the fake device; of a model, with what it was given."""
    given: list[str] = []

    def note(_model: nn.Module, inputs: tuple[Any, ...]) -> None:
        given[:] = [shown_tensors(inputs)]

    hook = None if model is None else model.register_forward_pre_hook(note)
    try:
        with quiet_fake_tensors():
            yield
    except ConfigError:
        raise
    except Exception as error:
        told = describe_raised(error)
        if needs_values(error):
            raise ConfigError(
                f"{what} on the fake device, where tensors have no data: {told}; {cure}"
            ) from error
        if given:
            raise ConfigError(
                f"{type(model).__name__} or its loss failed on the example batch, inputs of "
                f"{given[0]}: {told}"
            ) from error
        raise ConfigError(f"{what} on the fake device: {told}; {cure}") from error
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def _replacing_parameters() -> Iterator[None]:
    """Let `model.to(...)` and `model.half()` work: torch cannot swap parameters that are fake.

    New parameters come into their places, each once where modules share it.
    """
    original = nn.Module._apply
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for name, old in self._parameters.items():
            if old is None:
                continue
            with torch.no_grad():
                new = fn(old)
            if new is not old:
                fresh = nn.Parameter(new, requires_grad=old.requires_grad)
                self._parameters[name] = made.setdefault(id(old), (old, fresh))[1]
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _check_device(model: nn.Module) -> None:
    """Autograd ends the process where tensors are on a device that this torch does not have."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    for kind in sorted(kinds - {"cpu", "meta"}):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            raise ConfigError(
                f"{type(model).__name__} is on {kind}, which is not here; build it on the CPU to "
                "measure it: bytes are the same"
            )


def units_of(model: nn.Module) -> dict[str, bool]:
    """The modules that are not cut, in the order of the tree, and whether they are the root's.

    The units of `hpctrain.split(shard=...)`. Of the rest, which the root gathers, lists and
    sequences of modules are opened, and so is a module with more than half of all parameters that
    has modules of its own: a pipeline may be cut there.
    """
    alone = set(choose_units(*module_facts(model)))
    total = sum(p.numel() for p in model.parameters())

    def is_opened(where: str, module: nn.Module) -> bool:
        if not any(True for _ in module.children()):
            return False
        if isinstance(module, nn.Sequential | nn.ModuleList):
            return True
        if any(is_inside(name, where) for name in alone):
            return True
        return sum(p.numel() for p in module.parameters()) > _LARGE * total

    def found(module: nn.Module, before: str) -> Iterator[tuple[str, bool]]:
        for name, child in module.named_children():
            where = f"{before}{name}"
            if where not in alone and is_opened(where, child):
                yield from found(child, f"{where}.")
            else:
                yield where, where not in alone

    return dict(found(model, "")) or {"": True}


def _chain(model: nn.Module) -> tuple[tuple[str, ...], str]:
    """The layers that a pipeline may be cut at, or why there are none."""
    try:
        return tuple(layer.name for layer in chain_of(model)), ""
    except ConfigError as error:
        return (), str(error)


def _watched_as(module: nn.Module, kind: str) -> str:
    """Where what a layer makes is divided: a vocabulary's rows are added up as a row layer's."""
    if kind != "vocabulary":
        return kind
    return "row" if isinstance(module, nn.Embedding) else "column"


def state_copies(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """What the optimizer holds for a byte of weights: measured on one small matrix, for real."""
    dtype = next((p.dtype for p in group["params"]), torch.float32)
    weight = nn.Parameter(torch.zeros(_PROBE, _PROBE, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    probe = copy.copy(optimizer)
    probe.state = type(optimizer.state)(dict)
    probe.param_groups = [{**group, "params": [weight]}]
    probe.step()
    held = [
        value.numel() * value.element_size()
        for value in tree_leaves(dict(probe.state[weight]))
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    return sum(held) / (weight.numel() * weight.element_size())
