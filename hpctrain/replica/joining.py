"""What a rank does when its data have ended and the others' have not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.replica.naming import named_parameters
from hpctrain.replica.starting import broadcast_optimizer, broadcast_tensors

if TYPE_CHECKING:
    import torch

    from hpctrain.replica.exchange import Exchange
    from hpctrain.replica.replica import Replica

__all__ = ["Joining"]


class Joining:
    """One `join` block: counts the steps made in it, by either call, and ends it on all ranks."""

    def __init__(self, replica: Replica, exchange: Exchange) -> None:
        self._replica = replica
        self._exchange = exchange
        self._before = replica.num_steps
        self._by_optimizer = 0
        self._hook = replica.optimizer.register_step_post_hook(self._count)

    def _count(self, _optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        self._by_optimizer += 1

    def stay_until_all_are_done(self) -> None:
        """Collective: take part in the other ranks' exchanges with nothing, until all are done.

        A window that was left unfinished is exchanged and stepped first. Ranks that only stay make
        no updates: learning-rate schedules of the others move on without them, so in the end all
        take the state of the lowest rank that made the most steps.
        """
        replica = self._replica
        while self._exchange_leftovers() > 0:
            continue
        # `optimizer.step()` by the user counts as `replica.step()` does, which may call it or not.
        made = max(self._by_optimizer, replica.num_steps - self._before)
        steps = replica.world.comm.allgather(made)
        root = steps.index(max(steps))
        names, parameters = named_parameters(replica.model, replica.optimizer)
        with replica.full_precision():
            broadcast_tensors(replica.engine, names, parameters, root)
            broadcast_optimizer(replica.world, replica.engine, replica.optimizer, root)
        self._share_scale(root)
        exchange = self._exchange
        exchange.num_steps = self._before + max(steps)
        # A rank that has made all updates has counted them.
        exchange.num_updates = max(replica.world.comm.allgather(exchange.num_updates))
        exchange.num_loads = max(replica.world.comm.allgather(exchange.num_loads))

    def _exchange_leftovers(self) -> int:
        """Collective: exchange what is left of a window, or nothing; how many ranks had something.

        Every rank of the block is either in this call or in a closing backward.
        """
        exchange = self._exchange
        window, scale_and_clip = exchange.window, exchange.scale_and_clip
        leftover = window.calls > 0 and not window.exchanged
        exchange.agree_on_scale(0.0, counted=None)
        if not leftover:
            window.clear()
            exchange.mode.begin(fresh=True)
        arrived = exchange.run(present=leftover)
        num_taking_part = int(arrived.control[2].item())
        if leftover:
            self._replica.step()
        elif num_taking_part:
            scale_and_clip.follow()  # the others' scale moves with this step, and so must ours
        window.clear()
        scale_and_clip.forget()
        return num_taking_part

    def _share_scale(self, root: int) -> None:
        """Collective: take the loss scale of a rank that has made all steps."""
        scaler, world = self._exchange.scale_and_clip.scaler, self._replica.world
        if scaler is not None:
            mine = scaler.state_dict() if world.rank == root else None
            scaler.load_state_dict(world.comm.bcast(mine, root=root))

    def close(self) -> None:
        """Stop counting."""
        self._hook.remove()
