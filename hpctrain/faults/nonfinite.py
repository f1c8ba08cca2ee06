"""A loss or gradient that is inf or NaN on one rank, noticed there, before sums spread it to all.

After the exchange every rank has the same NaN and nobody can tell where it came from. The loss is
looked at in every step; gradients, which costs a pass over them, in every k-th one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.errors import ConfigError, NonFiniteError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hpctrain.faults.boundary import Agreed, Boundary

__all__ = ["FiniteWatch", "raise_nonfinite"]


class FiniteWatch:
    """Notes this rank's first loss or gradient that is not finite.

    On a GPU nothing waits: results are copied beside the computation and read when they are there,
    a step or so later. Under loss scaling (`fp16`) gradients overflow as a matter of course and
    such steps are skipped: there leave gradients alone.

    Args:
        model: Whose gradients are looked at.
        gradients_every: In every how many steps; 0 looks at losses alone.
    """

    def __init__(self, model: nn.Module, *, gradients_every: int = 0) -> None:
        if isinstance(gradients_every, bool) or gradients_every < 0:
            raise ConfigError(f"gradients_every={gradients_every!r} must be 0 or more steps")
        self._every = gradients_every
        self._step = 0
        self._armed = gradients_every > 0
        self._finding: str | None = None
        self._flags: list[tuple[str, Tensor]] = []
        self._under_way: list[_Reading] = []
        self._handles: list[RemovableHandle] = []
        if gradients_every:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    register: Any = parameter.register_hook  # torch leaves it untyped
                    self._handles.append(register(self._hook(name)))

    @property
    def finding(self) -> str | None:
        """What was not finite on this rank, and in which step; None while nothing was."""
        return self._finding

    def loss(self, loss: Tensor) -> None:
        """Look at this step's loss."""
        value = loss.detach()
        if value.device.type == "cpu":
            if not bool(torch.isfinite(value).all()):
                self._found(f"the loss is {_first_bad(value)}")
        else:
            self._flags.append(("the loss is inf or NaN", torch.isfinite(value).all()))

    def step_ended(self, step: int) -> None:
        """After each step, with the number of the next one."""
        if self._flags:
            self._under_way.append(_Reading(self._step, self._flags))
            self._flags = []
        while self._under_way and self._under_way[0].is_there():
            for number, text in self._under_way.pop(0).bad():
                self._found(text, step=number)
        self._step = step
        self._armed = self._every > 0 and step % self._every == 0

    def close(self) -> None:
        """Take the hooks away. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if not self._armed or self._finding is not None:
                return
            value = gradient.detach()
            if value.layout is not torch.strided:
                value = value.coalesce().values()
            if value.device.type != "cpu":
                text = f"the gradient of {name} has elements that are inf or NaN"
                self._flags.append((text, torch.isfinite(value).all()))
            # A finite sum has finite parts, and is one quick pass.
            elif not math.isfinite(value.sum(dtype=_wide(value)).abs().item()):
                num_bad = value.numel() - int(torch.isfinite(value).sum().item())
                if num_bad:
                    self._found(
                        f"the gradient of {name} has {num_bad} of {value.numel()} elements that "
                        "are inf or NaN"
                    )

        return look

    def _found(self, text: str, *, step: int | None = None) -> None:
        if self._finding is None:
            self._finding = f"step {self._step if step is None else step}: {text}"


class _Reading:
    """Flags of one step on their way from a GPU."""

    def __init__(self, step: int, flags: list[tuple[str, Tensor]]) -> None:
        self._step = step
        self._texts = [text for text, _ in flags]
        on_device = torch.stack([flag for _, flag in flags])
        self._event: torch.cuda.Event | None = None
        if on_device.device.type == "cuda":
            self._values = torch.empty(len(flags), dtype=torch.bool, pin_memory=True)
            self._values.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._values = on_device.cpu()

    def is_there(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def bad(self) -> list[tuple[int, str]]:
        """In the order of backward: the first is the nearest to the cause."""
        fine = self._values.tolist()
        return [(self._step, text) for text, ok in zip(self._texts, fine, strict=True) if not ok]


def _wide(value: Tensor) -> torch.dtype:
    narrow = value.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if narrow else value.dtype


def _first_bad(value: Tensor) -> str:
    return str(value.reshape(-1)[~torch.isfinite(value.reshape(-1))][0].item())


def raise_nonfinite(boundary: Boundary, agreed: Agreed, finding: str | None) -> None:
    """Collective: end the run on all ranks where one of them found something.

    Args:
        boundary: Where `agreed` comes from.
        agreed: What all ranks know.
        finding: This rank's.

    Raises:
        NonFiniteError: on all ranks; with the rank, its host, the step and what was not finite.
    """
    if agreed.nonfinite is None:
        return
    text = boundary.hear(agreed.nonfinite, finding or "")
    raise NonFiniteError(
        f"rank {agreed.nonfinite.rank} on {boundary.host_of(agreed.nonfinite)}: {text}; look at "
        "this rank's batch of that step, at the learning rate and at divisions and roots near 0, "
        "and go on from a checkpoint before that step"
    )
