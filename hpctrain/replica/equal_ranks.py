"""Ranks with equal state: from the start, and again after a `join` block.

At the start all ranks take rank 0's weights, buffers and optimizer state, and check it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.log import name_ranks
from hpctrain.pieces import local_tensor
from hpctrain.replica.naming import named_parameters
from hpctrain.world import agree, roll_call

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.engines import Engine
    from hpctrain.replica.exchange import Exchange
    from hpctrain.replica.replica import Replica

__all__ = [
    "Company",
    "Joining",
    "broadcast_optimizer",
    "broadcast_tensors",
    "check_equal",
    "check_structure",
    "digest",
    "make_equal",
    "make_equal_state",
]


class Company(Protocol):
    """The ranks that hold the same: a world, or those of one stage and one part of its layers."""

    @property
    def comm(self) -> Comm:
        """Over them."""

    @property
    def rank(self) -> int:
        """This one's place among them."""


def make_equal(
    world: Company,
    engine: Engine,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    broadcast: bool,
) -> None:
    """Collective: give all ranks rank 0's parameters, or only check that they have them.

    Args:
        world: The ranks.
        engine: What carries the weights.
        model: Its parameters, trained or not.
        optimizer: Its parameters that are not the model's.
        broadcast: Overwrite, or leave them and raise where they differ.

    Raises:
        ConfigError: the ranks have different models.
        CollectiveError: parameters differ, by name and rank.
    """
    found = {id(p): (name, p) for name, p in model.named_parameters()}
    for name, parameter in zip(*named_parameters(model, optimizer), strict=True):
        found.setdefault(id(parameter), (name, parameter))
    names, tensors = [n for n, _ in found.values()], [p for _, p in found.values()]
    check_structure(world, names, tensors)
    _check_order(world, model, optimizer)
    if broadcast:
        broadcast_tensors(engine, names, tensors)
    check_equal(
        world, names, tensors, "before training" if broadcast else "since the last exchange"
    )


def make_equal_state(
    world: Company, engine: Engine, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Collective: give all ranks rank 0's buffers and optimizer state."""
    buffers = dict(model.named_buffers())
    check_structure(world, buffers.keys(), buffers.values())
    broadcast_tensors(engine, buffers.keys(), buffers.values())
    check_equal(world, buffers.keys(), buffers.values(), "buffers before training")
    broadcast_optimizer(world, engine, optimizer)


def check_structure(world: Company, names: Iterable[str], tensors: Iterable[Tensor]) -> None:
    """Collective: refuse models that differ between ranks, before anything of them is sent."""
    roll_call(world.comm, "comparing the model of all ranks")
    mine = [
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}{_frozen(t)}"
        for name, t in zip(names, tensors, strict=True)
    ]
    first: list[str] = world.comm.bcast(mine, root=0)
    trouble = None
    if mine != first:
        pairs = zip([*mine, "nothing"], [*first, "nothing"], strict=False)
        here, there = next((a, b) for a, b in pairs if a != b)
        trouble = f"the model has {here} where rank 0 has {there}; build the same model everywhere"
    agree(world.comm, trouble, error=ConfigError)


def _check_order(world: Company, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Collective: refuse an optimizer that has the parameters in another order on some rank."""
    names = iter(named_parameters(model, optimizer)[0])
    mine = [
        f"{next(names)} in group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for _ in group["params"]
    ]
    first: list[str] = world.comm.bcast(mine, root=0)
    trouble = None
    if mine != first:
        pairs = zip([*mine, "nothing"], [*first, "nothing"], strict=False)
        here, there = next((a, b) for a, b in pairs if a != b)
        trouble = (
            f"the optimizer has {here} where rank 0 has {there}; give it the parameters in the "
            "same order on every rank (a set has another order in every process: use a list)"
        )
    agree(world.comm, trouble, error=ConfigError)


def _frozen(tensor: Tensor) -> str:
    return ", frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""


def broadcast_tensors(
    engine: Engine, names: Iterable[str], tensors: Iterable[Tensor], root: int = 0
) -> None:
    """Collective: overwrite tensors with the root's; their structure must match."""
    with torch.no_grad():
        for name, tensor in zip(names, tensors, strict=True):
            engine.broadcast_(local_tensor(tensor.detach()), root, what=name)


def broadcast_optimizer(
    world: Company, engine: Engine, optimizer: torch.optim.Optimizer, root: int = 0
) -> None:
    """Collective: overwrite group options and state with the root's."""
    mine = optimizer.state_dict()
    tensors: list[Tensor] = []
    plain = world.comm.bcast(_strip(mine, tensors) if world.rank == root else None, root=root)
    if world.rank == root:
        for place, tensor in enumerate(tensors):
            engine.broadcast_(tensor, root, what=f"optimizer state {place}")
        return
    received: list[Tensor] = []
    restored = _restore(plain, received)
    for place, tensor in enumerate(received):
        engine.broadcast_(tensor, root, what=f"optimizer state {place}")
    if received or restored["param_groups"] != mine["param_groups"]:
        optimizer.load_state_dict(restored)


class _Placeholder:
    """A tensor's shape, dtype and device in a state dict that is sent without its tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.on_device = tensor.device.type


def _strip(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Placeholder(value)
    if isinstance(value, Mapping):
        return {key: _strip(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_strip(item, tensors) for item in value)
    return value


def _restore(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Placeholder):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.on_device))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _restore(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restore(item, tensors) for item in value)
    return value


def digest(tensors: Iterable[Tensor]) -> bytes:
    """Digest the bytes of tensors."""
    summed = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        flat = local_tensor(tensor.detach()).cpu().contiguous().reshape(-1)
        summed.update(flat.view(torch.uint8).numpy().tobytes())
    return summed.digest()


def check_equal(world: Company, names: Iterable[str], tensors: Iterable[Tensor], what: str) -> None:
    """Collective: raise on all ranks, naming rank and tensor, unless all have the same bits.

    Raises:
        CollectiveError: they differ.
    """
    pairs = list(zip(names, tensors, strict=True))
    digests = world.comm.allgather(digest(tensor for _, tensor in pairs))
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not others:
        return
    each = world.comm.allgather([digest([tensor]) for _, tensor in pairs])
    place = next(i for i in range(len(pairs)) if len({ranks[i] for ranks in each}) > 1)
    raise CollectiveError(
        f"{what}: {pairs[place][0]} on {name_ranks(others)} differs from rank 0's; one "
        "rank changed it (a rank-dependent edit, an unseeded initialisation), or memory "
        "is faulty"
    )


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
