"""An update that ranks divide: the user's `optimizer.step()` runs another one, over parts.

The user's optimizer stays the truth: its groups' options are taken at each step, its hooks run
around the divided update as around torch's own, and its own step then finds nothing to do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["DividedUpdate"]


class DividedUpdate(ABC):
    """Takes over `optimizer.step()`, from `take_over` until it is closed.

    Args:
        optimizer: The user's.
        names: Of its parameters, in the order of its groups.
        parameters: In the same order.
    """

    undivided = 'update="replicated"'
    """What to pass so that every rank updates everything, for messages."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._parameters = list(parameters)
        self._suspended = False
        self._depth = 0
        self._hidden: tuple[list[Tensor | None], defaultdict[Tensor, Any]] | None = None
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def _step(self) -> None:
        """Collective: one update of all parameters that have a gradient."""

    @abstractmethod
    def _forget_state(self) -> None:
        """Take the state from the user's optimizer at the next step, as after loading it."""

    def take_over(self) -> None:
        """Hook the user's optimizer."""
        self._last = self._optimizer.register_step_pre_hook(self._before)
        self._first = self._optimizer.register_step_post_hook(self._after)
        self._handles = [
            self._last,
            self._first,
            self._optimizer.register_load_state_dict_post_hook(lambda _: self._forget_state()),
        ]
        self.reset_hooks()

    def close(self) -> None:
        """Give the optimizer its own step back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Around the user's step

    def reset_hooks(self) -> None:
        """Let the user's hooks around a step run outside of ours, as they do around torch's own.

        Called before every backward pass, which also ends a step that was interrupted.
        """
        self._depth = 0
        self._show_again()
        before: OrderedDict[int, Any] = self._optimizer._optimizer_step_pre_hooks  # type: ignore[assignment]
        after: OrderedDict[int, Any] = self._optimizer._optimizer_step_post_hooks  # type: ignore[assignment]
        before.move_to_end(self._last.id)
        after.move_to_end(self._first.id, last=False)

    def _before(
        self, _optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._suspended:
            return None
        self._depth += 1
        if self._depth > 1:  # a class whose step calls that of its base: torch hooks both
            return None
        instead = None
        try:
            self._check()
            if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
                instead = self._evaluate(args, kwargs)
            self._step()
        except BaseException:
            self._depth = 0
            raise
        # What the optimizer's own step finds now is nothing to do.
        self._hidden = ([p.grad for p in self._parameters], self._optimizer.state)
        self._optimizer.state = defaultdict(dict)
        for parameter in self._parameters:
            parameter.grad = None
        return instead

    def _evaluate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Evaluate a closure before the update, as torch's own optimizers do, and only once."""
        kind = type(self._optimizer)
        if not f"{kind.__module__}.".startswith("torch.optim."):
            raise ConfigError(
                f"{kind.__name__}.step(closure) may evaluate the closure anywhere in its update, "
                "which is divided among the ranks; call backward before step, or let "
                f"every rank update everything ({self.undivided})"
            )
        closure = kwargs.get("closure") or args[1]
        with torch.enable_grad():
            loss = closure()
        return (args[0],), {"closure": lambda: loss}

    def _check(self) -> None:
        """Refuse what a divided update cannot do as torch does it."""
        if next(reversed(self._optimizer._optimizer_step_pre_hooks)) != self._last.id:
            raise ConfigError(
                "a step hook was registered between backward and step, too late to run before the "
                "update; register it before backward"
            )
        now = [id(p) for group in self._optimizer.param_groups for p in group["params"]]
        if now != [id(p) for p in self._parameters]:
            raise ConfigError(
                "the optimizer's parameters were changed between backward and step; do it after "
                "the step"
            )

    def _after(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._show_again()

    def _show_again(self) -> None:
        if self._hidden is not None:
            gradients, self._optimizer.state = self._hidden
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._hidden = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let every rank update everything, for a while; all ranks must have equal state after."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False
            self._forget_state()
