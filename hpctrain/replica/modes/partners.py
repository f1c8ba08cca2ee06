"""Ranks that hold other parts of one model, and see the same samples: partners of a rank.

What each of them does is compared, and what is counted over the model is counted once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from hpctrain.engines import Op
from hpctrain.pieces import is_sharded
from hpctrain.replica.control_words import ControlWords

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.tensor_parallel import Division

__all__ = ["Partners", "came_late"]

_OWN = ("nonfinite", "nonfinite_rank")
"""Words that may differ: what one has found, all of them tell."""
_WORDS = {
    "weight": "num_samples",
    "calls": "the number of backward calls",
    "present": "who takes part",
    "counted": "whether num_samples was given",
    "plain": "loss.backward() or replica.backward(loss)",
    "sequence": "the number of batches, backward calls and steps",
    "options": "learning rates, other options of the optimizer, or which parameters are frozen",
    "loads": "how often a state was loaded into the optimizer",
    "new_weights": "whether the model has loaded a state",
    "gathers": "which units were run",
}
_OTHER_MODULES = (
    "which modules of it were run, or in which order, differed: an `if` in forward or an attribute "
    "of the model was not the same"
)
_ULPS = 16
"""By which equal losses may differ: kernels that add in any order round differently."""


def came_late(name: str) -> str:
    """Refuse a parameter by its name, in words."""
    return (
        f"the parameter {name} was added or replaced since the layers of the model were divided, "
        "and ranks that share them would not train it alike; call split(grid, model, tensor=...) "
        "when the model is complete, and make the optimizer over model.parameters() afterwards"
    )


class Losses(NamedTuple):
    """The losses of a window, as numbers to compare."""

    total: float
    slack: float
    """By how much partners with the same losses may differ."""
    nonfinite: float
    """1 where one is inf or NaN: then there is nothing to compare, and others tell of it."""


def sum_losses(losses: Sequence[Tensor]) -> Losses:
    """The sum of scalars, and what of it is rounding. Waits for a GPU that they are on."""
    if not losses:
        return Losses(0.0, 0.0, 0.0)
    values = torch.stack([loss.double() for loss in losses]).tolist()
    if not all(map(math.isfinite, values)):
        return Losses(0.0, 0.0, 1.0)
    ulps = [_ULPS * torch.finfo(loss.dtype).eps for loss in losses]
    slack = sum(ulp * abs(value) for ulp, value in zip(ulps, values, strict=True))
    return Losses(sum(values), slack, 0.0)


def find_apart(largest: Losses, smallest: Losses) -> str | None:
    """How the losses of partners differ, in words; None: they do not. Pure."""
    if largest.nonfinite or largest.total - smallest.total <= largest.slack:
        return None
    return (
        f"the loss differed (from {smallest.total:.9g} to {largest.total:.9g}): they have "
        "different targets or loss functions"
    )


class Partners:
    """The partners of this rank along the tensor dimension, itself too.

    Args:
        engine: Over them.
        everyone: Over all ranks of the grid.
        model: Whose layers they share.
        division: Which layers these are.
        elsewhere: Parameters that another one counts, by index: all of them hold these whole.
    """

    plain_refusal = (
        "loss.backward() with divided layers: gradients must be weighed by samples, the same on "
        "all ranks that share a layer; call replica.backward(loss, num_samples=...) or "
        "replica.learn(loss_fn, x, y)"
    )
    join_refusal = (
        "replica.join() with divided layers: ranks that share a layer must run it together; give "
        "every rank the same number of batches (a Loader does), with num_samples=0 for an empty "
        "one"
    )

    def __init__(
        self,
        engine: Engine,
        everyone: Engine,
        model: torch.nn.Module,
        division: Division,
        elsewhere: frozenset[int],
    ) -> None:
        self.engine = engine
        self.everyone = everyone
        self.elsewhere = elsewhere
        self._model = model
        self._parameters = tuple(model.parameters())
        self._division = division
        self._losses: list[Tensor] = []

    def find_change(self) -> str | None:
        """Which parameter of the model is not what it was, in words; None: all are."""
        own = {id(parameter) for parameter in self._parameters}
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in own:
                return came_late(name)
        return None

    def note_loss(self, loss: Tensor) -> None:
        """A loss of this window, before it is scaled. Collective where it is itself divided."""
        whole = cast("Any", loss).full_tensor() if is_sharded(loss) else loss
        self._losses.append(whole.detach().reshape(()))

    def forget_losses(self) -> None:
        """A new window begins."""
        self._losses.clear()

    def sum_over(self, sums: Tensor) -> Tensor:
        """Collective: sums over the whole model, from each one's own; the same bits on all."""
        total = sums.double()  # an empty share has another dtype than the others
        if self.engine.size > 1:
            self.engine.allreduce_(total, Op.SUM, what="the norm of divided gradients")
        return total

    def compare(self, control: ControlWords) -> tuple[ControlWords, str | None]:
        """Collective: see that all of them did the same, before anything is summed.

        Returns:
            The words to send, and what they did differently: in that case the words tell all other
            ranks that something is wrong.
        """
        if self.engine.size == 1:
            return control, None
        losses = sum_losses(self._losses)
        self.forget_losses()
        order = self._division.order.take()
        mine = torch.tensor([*control, order, *losses], dtype=torch.float64)
        ends = torch.stack([mine, -mine])
        self.engine.allreduce_(ends, Op.MAX, what="what ranks of one model did")
        most, least = ends[0].tolist(), (-ends[1]).tolist()
        num = len(control)
        largest, smallest = ControlWords(*most[:num]), ControlWords(*least[:num])
        words = control._replace(**{name: getattr(largest, name) for name in _OWN})
        apart = [
            f"{text} differed"
            for name, text in _WORDS.items()
            if getattr(largest, name) != getattr(smallest, name)
        ]
        if most[num] != least[num]:  # ranks of other data coordinates may run other modules
            apart.append(_OTHER_MODULES)
        lost = find_apart(Losses(*most[num + 1 :]), Losses(*least[num + 1 :]))
        if lost is not None:
            apart.append(lost)
        if not apart:
            return words, None
        # No sum with these is what equal numbers would give.
        return words._replace(gathers=1.0, gathers_squared=3.0), (
            f"ranks that hold parts of one model did different things: {apart[0]}; do the same "
            "on all ranks of one data coordinate (grid.coordinate.data)"
        )

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what is divided."""
        kinds = list(self._division.plan.values())
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        return [("divided layers", f"{counts}, over {self._division.num_ranks} ranks")]
