"""A loss or gradient that is inf or NaN on one rank: found there, before sums spread it to all.

After an exchange every rank has the same NaN and nobody can tell where it came from. What a rank
has found goes into its control words, so that all ranks stop in the same exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from hpctrain.errors import NonFiniteError
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.replica.words import Words
    from hpctrain.world import World

__all__ = ["FiniteCheck"]

_LOOK_ALL_EVERY = 100
"""Looking at all gradients costs a pass over them; the smallest ones cost next to nothing."""
_MOST_SMALL = 8

_CURE = (
    "look at this rank's batch of that step, at the learning rate and at divisions and roots near "
    "0, and resume from a checkpoint before that step; distribute(nonfinite='ignore') goes on"
)


class FiniteCheck:
    """What this rank has found that is not finite.

    Args:
        world: The ranks, which stop together.
        watches: Whether to look at all.
    """

    def __init__(self, world: World, *, watches: bool) -> None:
        self._world = world
        self._watches = watches
        self._late: list[tuple[int, Tensor, torch.cuda.Event]] = []
        self._num_looks = 0
        self.finding: str | None = None

    def look_at_loss(self, loss: Tensor, *, step: int) -> None:
        """Look at a loss before it is differentiated; on a GPU at those that have arrived."""
        if not self._watches:
            return
        if loss.is_cuda:
            self._look_late(loss, step)
        elif self.finding is None:
            self._judge(loss.item(), step)

    def _look_late(self, loss: Tensor, step: int) -> None:
        host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        host.copy_(loss.detach().reshape(()), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._late.append((step, host, event))
        while self._late and self._late[0][2].query():  # type: ignore[no-untyped-call]
            number, value, _ = self._late.pop(0)
            if number < step:  # its step was made; a GradScaler of the user's leaves some out
                self._judge(value.item(), number)

    def _judge(self, value: complex, step: int) -> None:
        finite = math.isfinite(value.real) and math.isfinite(value.imag)
        if not finite and self.finding is None:
            self.finding = f"step {step}: the loss is {value}"

    def look_at_gradients(
        self, names: Sequence[str], parameters: Sequence[Tensor], *, step: int
    ) -> None:
        """Look at gradients whose loss nobody showed us, before they are summed.

        A NaN loss makes nearly every gradient NaN, so the smallest are looked at each time, and all
        of them now and then. On a GPU this waits for the device, now and then only.
        """
        if not self._watches:
            return
        look_at_all = self._num_looks % _LOOK_ALL_EVERY == 0
        self._num_looks += 1
        pairs = [(n, p.grad) for n, p in zip(names, parameters, strict=True) if p.grad is not None]
        if not look_at_all:
            if pairs and pairs[0][1].is_cuda:
                return
            pairs = sorted(pairs, key=lambda pair: pair[1].numel())[:_MOST_SMALL]
        for name, gradient in pairs:
            num_bad = _count_nonfinite(gradient)
            if num_bad and self.finding is None:
                self.finding = (
                    f"step {step}: the gradient of {name} has {num_bad} of {gradient.numel()} "
                    "elements that are inf or NaN"
                )

    def forget(self) -> None:
        """Gradients were dropped, and with them what was found."""
        self.finding = None

    def stop(self, sums: Words) -> NoReturn:
        """Collective: some rank has found something.

        Raises:
            NonFiniteError: on all ranks, with the rank, its step and what it found.
        """
        finding, self.finding = self.finding, None
        agree(
            self._world.comm,
            None if finding is None else f"{finding}; {_CURE}",
            error=NonFiniteError,
        )
        raise NonFiniteError(f"{_who(sums)}: a loss or gradient is inf or NaN; {_CURE}")

    def stop_alone(self, sums: Words) -> NoReturn:
        """Some rank has found something a while ago; ranks hear of it at different times.

        Raises:
            NonFiniteError: with the rank.
        """
        mine = f" ({self.finding})" if self.finding else ""
        raise NonFiniteError(f"{_who(sums)}: a loss is inf or NaN{mine}; {_CURE}")


def _who(sums: Words) -> str:
    if sums.nonfinite == 1:
        return f"rank {sums.nonfinite_rank:.0f}"
    return f"{sums.nonfinite:.0f} ranks"


def _count_nonfinite(gradient: Tensor) -> int:
    values = gradient.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values()
    # A finite sum has finite terms, and is one quick pass.
    narrow = values.dtype in (torch.float16, torch.bfloat16)
    total = values.sum(dtype=torch.float32 if narrow else None)
    if bool(torch.isfinite(total)):
        return 0
    return values.numel() - int(torch.isfinite(values).sum().item())
