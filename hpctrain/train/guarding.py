"""What a trainer looks at besides the loss: weights that drift apart, numbers that are none."""

from __future__ import annotations

from collections.abc import Iterable

from hpctrain.errors import NonFiniteError
from hpctrain.faults import Sentinel
from hpctrain.log import format_ranges
from hpctrain.replica import Replica
from hpctrain.train.config import Faults
from hpctrain.train.figures import Figures
from hpctrain.world import World

__all__ = ["Guard"]


class Guard:
    """Collective: ends a run that goes wrong, with the rank; the faults section must match.

    Args:
        world: The ranks.
        replicas: Whose weights must stay equal.
        faults: How often to compare them, and what to do about NaN.
    """

    def __init__(self, world: World, replicas: Iterable[Replica], faults: Faults) -> None:
        every = faults.sentinel_every_steps
        self._every = every
        self._sentinels = [
            Sentinel(world, r.model, every=every, timeout_s=world.watching.timeout_s)
            for r in replicas
            if every
        ]
        self._stops = faults.nonfinite == "stop"
        for replica in replicas:  # what is logged is looked at here, the loss included
            replica.stops_at_nonfinite = False
        self._size = world.size

    def step(self, step: int) -> None:
        """Collective: compare the weights of all ranks, when it is time.

        Raises:
            DriftError: on all ranks; with the parameter, the ranks and the step.
        """
        if self._every and step % self._every == 0:
            for sentinel in self._sentinels:
                sentinel.compare(step=step)

    def look(self, figures: Figures, *, step: int) -> None:
        """Refuse numbers that are not finite; all ranks know them alike.

        Raises:
            NonFiniteError: on all ranks; with the number, the ranks and the step.
        """
        for name, ranks in figures.nonfinite.items() if self._stops else ():
            raise NonFiniteError(
                f"{name} was inf or NaN at step {step} on rank {format_ranges(ranks, limit=16)} of "
                f"{self._size}; look at the learning rate, the data of those ranks and "
                'train.loss, or go on all the same by faults.nonfinite="ignore"'
            )
