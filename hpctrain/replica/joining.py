"""What a rank does when its data have ended and the others' have not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.replica.naming import named_parameters
from hpctrain.replica.starting import broadcast_optimizer, broadcast_tensors

if TYPE_CHECKING:
    import torch

    from hpctrain.replica.core import Replica

__all__ = ["Joining"]


class Joining:
    """One `join` block: counts the steps made in it, by whom ever, and ends it on all ranks."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._before = replica.num_steps
        self._by_optimizer = 0
        self._hook = replica.optimizer.register_step_post_hook(self._count)

    def _count(self, _optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        self._by_optimizer += 1

    def stay_until_all_are_done(self) -> None:
        """Collective: take part in the others' exchanges with nothing, until nobody has anything.

        A window that was left unfinished is exchanged and stepped first. Ranks that only stay make
        no updates: learning-rate schedules of the others move on without them, so in the end all
        take the state of the lowest rank that made the most steps.
        """
        replica = self._replica
        while replica.exchange_leftovers() > 0:
            continue
        # `optimizer.step()` by the user counts as `replica.step()` does, which may call it or not.
        made = max(self._by_optimizer, replica.num_steps - self._before)
        steps = replica.world.comm.allgather(made)
        root = steps.index(max(steps))
        names, parameters = named_parameters(replica.model, replica.optimizer)
        with replica.full_precision():
            broadcast_tensors(replica.engine, names, parameters, root)
            broadcast_optimizer(replica.world, replica.engine, replica.optimizer, root)
        replica.share_scale(root)
        replica.num_steps = self._before + max(steps)
        replica.count_as_all(replica.world.comm)

    def close(self) -> None:
        """Stop counting."""
        self._hook.remove()
