"""A loss or gradient that is inf or NaN on one rank: found there, before sums spread it to all.

After an exchange every rank has the same NaN, and its origin is lost. What a rank
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
    from hpctrain.replica.control_words import ControlWords
    from hpctrain.world import World

__all__ = ["FiniteCheck"]

_LOOK_ALL_EVERY = 100
"""Checking all gradients costs a pass over them; the smallest ones cost almost nothing."""
_MOST_SMALL = 8

_WHAT = "a loss or gradient is inf or NaN"
_ADVICE = (
    "check this rank's batch of that step, the learning rate, and divisions and roots near 0, and "
    "resume from a checkpoint before that step; distribute(nonfinite='ignore') continues"
)


class FiniteCheck:
    """What this rank has found that is not finite.

    Args:
        world: All ranks.
        num_ranks: How many of them train together, and stop together.
        watches: Whether to check at all.
    """

    def __init__(self, world: World, *, num_ranks: int, watches: bool) -> None:
        self._world = world
        self._num_ranks = num_ranks
        self.watches = watches
        self._late: list[_Transfer] = []
        self._num_looks = 0
        self.finding: str | None = None

    def look_at_loss(self, loss: Tensor, *, step: int) -> None:
        """Check a loss before it is differentiated; on a GPU those that have arrived."""
        if not self.watches:
            return
        if loss.is_cuda:
            self._look_late(["the loss"], loss.detach().reshape(1), step)
        else:
            self._judge("the loss", loss.item(), step)

    def _look_late(self, texts: list[str], values: Tensor, step: int) -> None:
        """On a GPU: send these to the host, and judge what has arrived meanwhile."""
        self._late.append(_Transfer(step, texts, values))
        while self._late and self._late[0].step < step and self._late[0].has_arrived():
            there = self._late.pop(0)
            for text, value in there.read():
                self._judge(text, value, there.step)

    def _judge(self, text: str, value: complex, step: int) -> None:
        finite = math.isfinite(value.real) and math.isfinite(value.imag)
        if not finite and self.finding is None:
            self.finding = f"step {step}: {text} is {value}"

    def look_at_gradients(
        self, names: Sequence[str], parameters: Sequence[Tensor], *, step: int
    ) -> None:
        """Check gradients of a loss that was not seen, before they are summed.

        A NaN loss makes nearly every gradient NaN, so the smallest are checked each time, and all
        of them now and then; that waits for a GPU.
        """
        if not self.watches:
            return
        look_at_all = self._num_looks % _LOOK_ALL_EVERY == 0
        self._num_looks += 1
        pairs = [(n, p.grad) for n, p in zip(names, parameters, strict=True) if p.grad is not None]
        if not look_at_all:
            pairs = sorted(pairs, key=lambda pair: pair[1].numel())[:_MOST_SMALL]
            if pairs and pairs[0][1].is_cuda:
                norms = [norm.float() for norm in torch._foreach_norm([g for _, g in pairs])]
                texts = [f"the norm of the gradient of {name}" for name, _ in pairs]
                self._look_late(texts, torch.stack(norms), step)
                return
        for name, gradient in pairs:
            num_bad = _count_nonfinite(gradient)
            if num_bad and self.finding is None:
                self.finding = (
                    f"step {step}: the gradient of {name} has {num_bad} of {gradient.numel()} "
                    "elements that are inf or NaN"
                )

    def forget(self, *, step: int) -> None:
        """Gradients were dropped without a step, and with them what was found.

        A GradScaler of the user's leaves out steps that have overflowed.
        """
        self.finding = None
        self._late = [one for one in self._late if one.step != step]

    def stop(self, sums: ControlWords, finding: str | None) -> NoReturn:
        """Collective: some rank has found something.

        Args:
            sums: The control words in which it said so.
            finding: What this rank had found by then.

        Raises:
            NonFiniteError: on all ranks, with the rank, its step and what it found.
        """
        if self._world.size != self._num_ranks:  # not all of them are here to agree
            raise NonFiniteError(f"{_who(sums)}: {finding or _WHAT}; {_ADVICE}")
        agree(
            self._world.comm,
            None if finding is None else f"{finding}; {_ADVICE}",
            error=NonFiniteError,
        )
        raise NonFiniteError(f"{_who(sums)}: {_WHAT}; {_ADVICE}")


class _Transfer:
    """Numbers that a GPU is sending to the host."""

    def __init__(self, step: int, texts: list[str], values: Tensor) -> None:
        self.step = step
        self._texts = texts
        self._host = torch.empty(len(texts), dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def has_arrived(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[tuple[str, complex]]:
        return list(zip(self._texts, self._host.tolist(), strict=True))


def _who(sums: ControlWords) -> str:
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
