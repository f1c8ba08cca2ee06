"""Ranks that hold other parts of one model, and see the same samples: partners of a rank.

What each of them does is compared, and what is counted over the model is counted once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.engines import Op
from hpctrain.replica.control_words import ControlWords

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.tensor_parallel import Division

__all__ = ["Partners"]

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


class Partners:
    """The partners of this rank along the tensor dimension, itself too.

    Args:
        engine: Over them.
        division: Which layers they share.
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

    def __init__(self, engine: Engine, division: Division, elsewhere: frozenset[int]) -> None:
        self.engine = engine
        self.elsewhere = elsewhere
        self._division = division

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
        mine = torch.tensor(control, dtype=torch.float64)
        ends = torch.cat([mine, -mine])
        self.engine.allreduce_(ends, Op.MAX, what="what ranks of one model did")
        largest, smallest = ControlWords(*ends[: len(mine)]), ControlWords(*-ends[len(mine) :])
        words = control._replace(**{name: float(getattr(largest, name)) for name in _OWN})
        apart = [
            text
            for name, text in _WORDS.items()
            if float(getattr(largest, name)) != float(getattr(smallest, name))
        ]
        if not apart:
            return words, None
        # No sum with these is what equal numbers would give.
        return words._replace(gathers=1.0, gathers_squared=3.0), (
            f"ranks that hold parts of one model did different things: {apart[0]} differed; do the "
            "same on all ranks of one data coordinate (grid.coordinate.data)"
        )

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what is divided."""
        kinds = list(self._division.plan.values())
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        return [("divided layers", f"{counts}, over {self._division.num_ranks} ranks")]
