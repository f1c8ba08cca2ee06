"""A replica that tells the world's observers what it is doing, step by step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hpctrain.fusion import Arrived
from hpctrain.replica.core import Replica, Step
from hpctrain.world import phase

__all__ = ["ObservedReplica"]


class ObservedReplica(Replica):
    """What `hpctrain.distribute` makes in a world with observers; see `hpctrain.world.observing`.

    Nothing else differs, and where nobody observes there is not one call more.
    """

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the model forward, as one phase."""
        with phase(self.world.observers, "forward"):
            return super().__call__(*arguments, **named)

    def _differentiate(
        self, loss: Tensor, weight: float, retain_graph: bool | None, create_graph: bool
    ) -> None:
        with phase(self.world.observers, "backward"):
            super()._differentiate(loss, weight, retain_graph, create_graph)

    def _exchange(self, *, present: bool = True) -> Arrived:
        with phase(self.world.observers, "exchange"):
            return super()._exchange(present=present)

    def step(self, *, flush: bool = False) -> Step:
        """Update the weights, as one phase, and count the step."""
        with phase(self.world.observers, "update"):
            done = super().step(flush=flush)
        if done.due:
            for observer in self.world.observers:
                observer.stepped(self.num_steps)
        return done

    def _count_step(self) -> None:
        super()._count_step()
        for observer in self.world.observers:
            observer.stepped(self.num_steps)
