"""Exceptions of a user's code in one stage: all ranks raise, and none waits for another.

A stage that has failed sends what the others wait for, zeros of the right shapes, until the pass is
over; then all ranks are told which stage it was, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from hpctrain.errors import StageError, TimedOutError
from hpctrain.pipeline.raised import line_of, shown_tensors
from hpctrain.pipeline.shapes import TensorFacts

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["Called", "Failures", "arrived", "zeros_like_facts"]

T = TypeVar("T")
_DOINGS = ("forward", "loss", "backward")
_MOST_LAYERS = 3


class _Failure(NamedTuple):
    """What went wrong on one rank; the least of them is the cause of the others."""

    micro_batch: int
    doing: int
    stage: int
    text: str


class Failures:
    """What a user's code has raised in this rank's stage during a pass.

    Args:
        rank: In the world.
        stage: This rank's.
        layers: Of the stage.
    """

    def __init__(self, rank: int, stage: int, layers: Sequence[str]) -> None:
        shown = ", ".join(layers[:_MOST_LAYERS]) + (", ..." if len(layers) > _MOST_LAYERS else "")
        self._where = f"rank {rank}, stage {stage} ({shown})"
        self._stage = stage
        self._error: Exception | None = None
        self._failure: _Failure | None = None
        self._counts = dict.fromkeys(_DOINGS, 0)

    def begin(self) -> None:
        """A pass begins."""
        self._error = self._failure = None
        self._counts = dict.fromkeys(_DOINGS, 0)

    def attempt(
        self,
        doing: str,
        call: Callable[[], T],
        instead: Callable[[], T],
        given: Sequence[Any] = (),
    ) -> T:
        """Do something with the user's code; nothing of it any more after it has failed.

        Args:
            doing: `forward`, `loss` or `backward` of the next micro-batch.
            call: Runs it.
            instead: What the other stages are given where it fails.
            given: Its inputs, for the message.
        """
        number = self._counts[doing]
        self._counts[doing] += 1
        if self._error is None:
            try:
                return call()
            except TimedOutError:  # others do not wait for this rank: it has waited for them
                raise
            except Exception as error:
                self._note(error, doing, number, given)
        return instead()

    def _note(self, error: Exception, doing: str, number: int, given: Sequence[Any]) -> None:
        if doing == "backward" and isinstance(error.__cause__, Exception):
            error = error.__cause__  # torch wraps it, with a list of all tensors
        self._error = error
        told = " ".join(str(error).split()) or "no message"
        inputs = f"given {shown_tensors(given)}" if given else ""
        where = ", ".join(one for one in (inputs, line_of(error)) if one)
        text = (
            f"{self._where}: {type(error).__name__}: {told} (in the {doing} of micro-batch "
            f"{number}, {where})"
        )
        self._failure = _Failure(number, _DOINGS.index(doing), self._stage, text)

    def settle(self, comm: Comm) -> None:
        """Collective: raise on all ranks where one has failed.

        Raises:
            StageError: with its rank, stage and exception, the same text on all ranks.
        """
        from mpi4py import MPI

        failed = np.array([self._failure is not None], dtype=np.int64)
        comm.Allreduce(MPI.IN_PLACE, failed, op=MPI.MAX)
        if not failed[0]:
            return
        told: list[_Failure | None] = comm.allgather(self._failure)
        found = sorted(one for one in told if one is not None)
        more = f"; {len(found) - 1} more failed with or after it" if len(found) > 1 else ""
        error = self._error
        self.begin()
        raise StageError(f"{found[0].text}{more}") from error


def arrived(tensor: Tensor) -> Tensor:
    """A tensor that no collective is still writing to: it is sent to another stage."""
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    return tensor.clone() if tensor.requires_grad else tensor.wait()


def zeros_like_facts(facts: Sequence[TensorFacts], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of these shapes, differentiable where those are."""
    return tuple(
        torch.zeros(
            one.shape,
            dtype=one.dtype,
            device=device,
            requires_grad=one.requires_grad and torch.is_grad_enabled(),
        )
        for one in facts
    )


class Called(nn.Module):
    """A stage as torch's schedule calls it: in the precision that was chosen, and without raising.

    The model is no module within it: with a new schedule torch drops the gradients of sharded
    modules that it finds, also those of earlier micro-batches.

    Args:
        run: Runs the stage with a tuple of inputs.
        failures: Where exceptions are noted.
        outputs: What the stage gives.
        device: Where.
    """

    def __init__(
        self,
        run: Callable[[tuple[Any, ...]], Any],
        failures: Failures,
        outputs: Sequence[TensorFacts],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._run = run
        self._failures = failures
        self._outputs = tuple(outputs)
        self._device = device

    def forward(self, *arguments: Any) -> Any:
        """Run the stage."""
        return self._failures.attempt(
            "forward", partial(self._settled, arguments), self._nothing, arguments
        )

    def _settled(self, arguments: tuple[Any, ...]) -> Any:
        output = self._run(arguments)
        return tree_map_only(Tensor, arrived, output)

    def _nothing(self) -> Any:
        made = zeros_like_facts(self._outputs, self._device)
        return made[0] if len(made) == 1 else made
