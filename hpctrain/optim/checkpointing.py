"""Activation checkpointing: keep a module's input, not what it computed, and compute twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import ConfigError
from hpctrain.optim.activations import Activations, measure

__all__ = ["Checkpointed", "checkpoint_activations"]


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
        patterns: Names as in `model.named_modules()`; `*` stands for any part between two dots.
            `blocks.*` is each of the blocks.

    Raises:
        ConfigError: a pattern matches nothing (the names are listed), or a module lies within
            another one that is chosen.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns or ("",):
        matcher = _compile(pattern)
        found = {name: module for name, module in modules.items() if matcher.fullmatch(name)}
        if not found:
            raise ConfigError(
                f"pattern {pattern!r} matches no module; there are {', '.join(_short(modules))}"
            )
        chosen.update(found)
    for name, module in chosen.items():
        inside = next((o for o in chosen if o != name and name.startswith(f"{o}.")), None)
        if inside is not None:
            raise ConfigError(f"{name} lies within {inside}; checkpoint one of the two")
        if "forward" in vars(module):
            raise ConfigError(
                f"{name} has a forward of its own already (checkpointed before, or patched); "
                "leave it out"
            )
    for module in chosen.values():
        _switch_on(module)
    return Checkpointed(model=model, names=tuple(chosen))


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))


def _short(names: dict[str, nn.Module], limit: int = 40) -> list[str]:
    shown = list(names)[:limit]
    return [*shown, f"... ({len(names) - limit} more)"] if len(names) > limit else shown


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
