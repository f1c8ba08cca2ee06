"""What a rank does when its data have ended and the others' have not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.replica.naming import named_parameters
from hpctrain.replica.starting import broadcast_optimizer, broadcast_tensors

if TYPE_CHECKING:
    from hpctrain.replica.core import Replica

__all__ = ["stay_until_all_are_done"]


def stay_until_all_are_done(replica: Replica) -> None:
    """Collective: take part in the others' exchanges with nothing, until nobody has anything.

    A window that was left unfinished is exchanged and stepped first. Ranks that only stay make no
    updates: learning-rate schedules of the others move on without them, so in the end all take the
    state of the lowest rank that made the most steps.
    """
    while replica.exchange_leftovers() > 0:
        continue
    steps = replica.world.comm.allgather(replica.num_steps)
    root = steps.index(max(steps))
    names, parameters = named_parameters(replica.model, replica.optimizer)
    with replica.full_precision():
        broadcast_tensors(replica.engine, names, parameters, root)
        broadcast_optimizer(replica.world, replica.engine, replica.optimizer, root)
    replica.share_scale(root)
    replica.num_steps = max(steps)
