"""An average of the weights that the ranks of a node hold once, in the memory they share.

Every parameter's average has one owner on a node, who writes it. All ranks read through views of
their own: what somebody writes to an average goes to pages that this rank alone sees, until the
next update takes the owner's edits in. An update begins and ends with a barrier, so nobody reads
what is being written, and reading needs no meeting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpctrain.engines import Engine
from hpctrain.errors import ConfigError
from hpctrain.fusion import is_dense, like_parameter
from hpctrain.log import format_bytes
from hpctrain.optim.ema import EMA, places_for
from hpctrain.tensor_names import plain_keys
from hpctrain.world import PrivateView, SharedBlock, agree

__all__ = ["NodeEMA", "divide", "make"]

_ALIGN_BYTES = 64
T = TypeVar("T")


def make(engine: Engine, model: nn.Module, decay: float, *, warm_up: bool) -> EMA:
    """Collective: an average once a node, or each rank's own where nothing can be shared."""
    why = _why_not(engine, model)
    if why is None:
        return NodeEMA(engine, model, decay, warm_up=warm_up)
    own = EMA(model, decay, warm_up=warm_up)
    own.where = f"each rank's own: {why}"
    return own


def _why_not(engine: Engine, model: nn.Module) -> str | None:
    """Collective at an engine's first call: why the ranks share no averages; the same on all."""
    if engine.size == 1:
        return "there is one rank"
    if not engine.capabilities.shares_memory:
        return f"the {engine.name} engine shares no memory"
    away = [p.device.type for p in model.parameters() if p.device.type != "cpu"]
    if away or engine.device.type != "cpu":
        return f"weights are on {away[0] if away else engine.device.type}"
    if max(engine.node_group().local_sizes) == 1:
        return "no node has several ranks"
    return None


def divide(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Give each rank whole tensors, the largest first to whoever has least so far. Pure."""
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = load.index(min(load))
        shares[rank].append(name)
        load[rank] += sizes[name]
    return shares


class NodeEMA(EMA):
    """What `EMA.once_a_node` makes. Collective to make, to update and to load."""

    def __init__(self, engine: Engine, model: nn.Module, decay: float, *, warm_up: bool) -> None:
        self._engine = engine
        self._group = engine.node_group()
        parameters = plain_keys({name: p.detach() for name, p in model.named_parameters()})
        self._check_alike(parameters, (decay, warm_up))
        kinds = self.wanted(model)
        wanted = {name: kinds[name][1] for name in parameters}
        starts, end = [], 0
        for name, parameter in parameters.items():
            starts.append(end)
            num_bytes = parameter.numel() * wanted[name].itemsize
            end += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        block = self._meet(
            lambda: self._group.allocate(end, "averaged weights", private=[(0, max(1, end))])
        )
        self._view = block.views[0]
        shared = _cut(block, parameters, wanted, starts)
        sizes = {name: p.numel() for name, p in parameters.items()}
        self._shares = divide(sizes, self._group.local_size)[self._group.local_rank]
        buffers = plain_keys(dict(model.named_buffers()))
        own = places_for({n: b for n, b in buffers.items() if n in kinds})
        super().__init__(
            model, decay, warm_up=warm_up, into={**shared, **own}, owns=[*self._shares, *own]
        )
        self._averages = {**_cut(self._view, parameters, wanted, starts), **own}
        self.where = f"{format_bytes(block.num_bytes)} a node, {block.backing.why}"
        block.close()  # what is mapped stays
        self._meet(self._group.barrier.wait)

    def _check_alike(self, parameters: Mapping[str, Tensor], options: object) -> None:
        """Collective: one rank's average can stand for all only if all have the same weights."""
        mine = (options, _digest(parameters))
        every = self._meet(lambda: self._group.comm.allgather(mine))
        columns = zip(*every, strict=True)
        for what, given in zip(("decay or warm_up", "weights"), columns, strict=True):
            differing = [rank for rank, value in enumerate(given) if value != given[0]]
            if differing:
                raise ConfigError(
                    f"EMA.once_a_node: {what} of rank {differing[0]} differ from rank 0's; give "
                    "the same on every rank, and make the average after distribute, which makes "
                    "weights equal"
                )

    def _take(self, sources: Mapping[str, Tensor], weight: float) -> None:
        self._meet(self._group.barrier.wait)  # until here somebody may be reading
        edited = self._view.is_written()
        if edited:
            for name in self._shares:
                self._homes[name].copy_(self._averages[name])
        take = super()._take
        self._group.compute_alike(lambda: take(sources, weight))
        self._meet(self._group.barrier.wait)
        if edited:
            self._view.refresh()

    def _load(self, saved: Mapping[str, Tensor]) -> None:
        self._meet(self._group.barrier.wait)
        super()._load(saved)
        self._meet(self._group.barrier.wait)
        self._view.refresh()

    def _check_saved(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Collective: a state that does not fit on one rank is refused on all."""
        trouble, saved = None, {}
        try:
            saved = super()._check_saved(state)
        except ConfigError as error:
            trouble = str(error)
        self._meet(lambda: agree(self._group.comm, trouble, error=ConfigError))
        return saved

    def _meet(self, call: Callable[[], T]) -> T:
        self._engine.check_open("EMA")
        return self._engine.meet(call, "averaging of weights", "", None)


def _cut(
    memory: SharedBlock | PrivateView,
    parameters: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    starts: Sequence[int],
) -> dict[str, Tensor]:
    """A tensor for each parameter, in the order of its memory, with storage of its own."""
    found = {}
    for (name, parameter), start in zip(parameters.items(), starts, strict=True):
        flat = memory.tensor(dtypes[name], start=start, num_elements=parameter.numel())
        dense = is_dense(parameter)
        found[name] = like_parameter(flat, parameter) if dense else flat.view(parameter.shape)
    return found


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    summed = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        summed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.contiguous().reshape(-1)
        summed.update(flat.view(torch.uint8).numpy().data)
    return summed.digest()
