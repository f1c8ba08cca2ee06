"""Activation checkpointing: keep a module's input, not what it computed, and compute twice.

Which modules: those that save most, by the bytes that a forward pass keeps for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import ConfigError
from hpctrain.log import format_bytes
from hpctrain.name_patterns import is_inside, match_names

__all__ = ["Activations", "Checkpointed", "checkpoint_activations", "measure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What checkpointing saves."""

    num_modules: int
    without_bytes: int
    with_bytes: int
    on: str
    """`cpu`: bytes kept after the forward pass; `cuda`: the peak of forward and backward."""

    @property
    def saved_bytes(self) -> int:
        """How many bytes fewer it needs."""
        return self.without_bytes - self.with_bytes

    def __str__(self) -> str:
        what = "kept for backward" if self.on == "cpu" else "at the peak"
        share = self.saved_bytes / self.without_bytes if self.without_bytes else 0.0
        return (
            f"activations {what}: {format_bytes(self.without_bytes)} without checkpointing, "
            f"{format_bytes(self.with_bytes)} with {self.num_modules} modules checkpointed "
            f"({share:.0%} saved)"
        )


def measure(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """How many bytes a loss needs besides the weights; leaves everything as it was."""
    device = next(model.parameters()).device
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            return _peak(model, loss, device) if devices else _kept(model, loss)
    finally:
        for buffer, before in buffers:
            buffer.data.copy_(before)


def _peak(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> int:
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    grads = torch.autograd.grad(loss(), wanted, allow_unused=True)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del grads
    return peak - before


def _kept(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Bytes of saved tensors and of inputs that checkpointed modules hold, each storage once."""
    counted: dict[int, int] = {}
    alive: list[Any] = []  # a storage that died could lend its address to another
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in counted:
            counted[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    def count_inputs(module: nn.Module, arguments: Any, named: Any) -> None:
        if "forward" in vars(module):
            for leaf in tree_leaves((arguments, named)):
                if isinstance(leaf, Tensor):
                    count(leaf)

    handles = [
        module.register_forward_pre_hook(count_inputs, with_kwargs=True)
        for module in model.modules()
    ]
    try:
        with saved_tensors_hooks(count, lambda tensor: tensor):
            value = loss()
        del value
    finally:
        for handle in handles:
            handle.remove()
    return sum(counted.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointed:
    """Modules whose activations are computed again in the backward pass."""

    model: nn.Module
    names: tuple[str, ...]

    def measure(self, loss: Callable[[], Tensor]) -> Activations:
        """Find out what it saves, by computing a loss and its gradients without it and with it.

        Gradients, buffers and random numbers are as before afterwards.

        Args:
            loss: Runs the model forward, and makes one number of what it gives.
        """
        modules = dict(self.model.named_modules())
        chosen = [modules[name] for name in self.names]
        for module in chosen:
            del module.forward
        try:
            without = measure(self.model, loss)
        finally:
            for module in chosen:
                _switch_on(module)
        return Activations(
            num_modules=len(chosen),
            without_bytes=without,
            with_bytes=measure(self.model, loss),
            on=next(self.model.parameters()).device.type,
        )

    def remove(self) -> None:
        """Switch it off again."""
        modules = dict(self.model.named_modules())
        for name in self.names:
            if _is_on(modules[name]):
                del modules[name].forward


def checkpoint_activations(model: nn.Module, *patterns: str) -> Checkpointed:
    """Switch activation checkpointing on for the modules whose names match.

    What it gives is the same, bit for bit: random numbers are drawn again, and running statistics
    move once. It costs one more forward pass of those modules.

    Args:
        model: Changed in place; names, parameters and state dict stay.
        patterns: Of names as in `model.named_modules()`; `*` stands for any text. `blocks.*` is
            each of the blocks: of modules within each other a pattern means the outermost.

    Raises:
        ConfigError: a pattern matches nothing (the names are listed), or a module lies within
            another one that is chosen.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    matched = match_names(patterns, modules, outermost=True)
    chosen = {name: modules[name] for names in matched.values() for name in names}
    for name, module in chosen.items():
        inside = next((o for o in chosen if is_inside(name, o)), None)
        if inside is not None:
            raise ConfigError(f"{name} is inside {inside}; checkpoint one of the two")
        if "forward" in vars(module):
            raise ConfigError(
                f"{name} already has a custom forward (checkpointed before, or patched); leave it "
                "out"
            )
    for module in chosen.values():
        _switch_on(module)
    return Checkpointed(model=model, names=tuple(chosen))


def _switch_on(module: nn.Module) -> None:
    # A bound method: copying the module binds the copy's own, and a pickle finds the class's.
    module.forward = MethodType(forward, module)


def _is_on(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is forward


def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
    """Run a module's own forward under a checkpoint."""
    return checkpoint(
        partial(type(self).forward, self),
        *arguments,
        use_reentrant=False,
        context_fn=partial(_contexts, self),
        **named,
    )


def _contexts(
    module: nn.Module,
) -> tuple[Context[None], Context[None]]:
    """What surrounds the first run and the second."""
    return nullcontext(), _buffers_kept(module)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Undo what the second run does to buffers: the first has moved the running statistics."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.data.copy_(before)  # past the version counter: autograd has seen this value
