"""An average of the weights over the last steps, which often tests better than the last ones.

Each rank has its own, or a node holds one copy.

Where the ranks of a node share memory, every parameter's average has one owner on a node, who
writes it. All ranks read through private views: what a rank writes to an average goes to
pages that this rank alone sees, until the next update takes the owner's edits in. An update begins
and ends with a barrier, so no rank reads what is being written, and reading never waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hpctrain.balance import largest_first
from hpctrain.engines import Engine
from hpctrain.errors import ConfigError
from hpctrain.fusion import is_dense, like_parameter
from hpctrain.log import format_bytes
from hpctrain.tensor_names import plain_keys
from hpctrain.world import PrivateView, SharedBlock, agree

__all__ = ["EMA", "NodeEMA", "divide", "places_for"]


class EMA:
    """The exponential moving average of a model's weights. Pure: it never communicates.

    After each step, average = decay * average + (1 - decay) * weight. All ranks have the same
    weights, so all have the same average. Floating-point buffers (running statistics) are averaged
    too; other buffers are the model's. Averages of half-precision weights are kept in float32.
    `once_a_node` makes one that the ranks of a node hold together. Of a model that `split` has
    divided each rank averages what it holds: its shards, its stage.

    Args:
        model: Whose weights are averaged; parameters are looked up by name, so `model.to()` and
            replaced parameters are followed.
        decay: What the average keeps in a step, at least 0 and below 1.
        warm_up: Begin with a smaller decay, (1 + k) / (10 + k) after k updates, so that the random
            weights of the start are soon forgotten.
        into: Tensors to keep the averages in, by name, of the shapes that `wanted(model)` gives:
            memory that the ranks of a node share, for one copy a node. They are overwritten with
            the weights of now.
        owns: The names that this rank writes, for shared memory: every name has one owner on a
            node, and readers wait for all of them. None: all.

    Raises:
        ConfigError: decay, tensors or names do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        warm_up: bool = False,
        into: Mapping[str, Tensor] | None = None,
        owns: Collection[str] | None = None,
    ) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"decay={decay} must be at least 0 and below 1")
        self.decay, self.warm_up = decay, warm_up
        self.num_updates = 0
        self._model = model
        self._swapped = False
        sources = _averaged(model)
        self._averages = places_for(sources) if into is None else _checked(sources, into)
        self._homes = self._averages  # where averages are written
        unknown = set(owns or ()) - sources.keys()
        if unknown:
            raise ConfigError(
                f"owns names {sorted(unknown)[0]}, which the model does not average; choose from "
                f"{', '.join(sources)}"
            )
        self._owned = [name for name in sources if owns is None or name in owns]
        for name in self._owned:
            self._homes[name].copy_(sources[name].detach())
        self.where = "each rank's own" if into is None else "as given"
        """A description of where the averages are stored."""

    @classmethod
    def once_a_node(
        cls, engine: Engine, model: nn.Module, decay: float = 0.999, *, warm_up: bool = False
    ) -> EMA:
        """Collective: an average that a node holds once, where its ranks share memory.

        Everything else about it is as with `EMA(model)`: reading it, also on one rank alone, waits
        for nobody; `update` and `load_state_dict` are collective, and each rank does its share of
        them. Buffers are averaged by each rank for itself, since they may differ between ranks.
        Ranks share memory on CPUs with the `mpi` engine; elsewhere (GPUs, other engines) the
        average is each rank's own, and `where` says so.

        Args:
            engine: A replica's.
            model: With equal weights on all ranks, as after `distribute`.
            decay: As above, the same on every rank.
            warm_up: As above, the same on every rank.

        Raises:
            ConfigError: on all ranks: weights, decay or warm_up differ between them.
        """
        return _make_per_node(engine, model, decay, warm_up=warm_up)

    @staticmethod
    def wanted(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each average, by name. Pure."""
        return {name: (t.shape, _wide(t.dtype)) for name, t in _averaged(model).items()}

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """The averages by name."""
        return self._averages

    def decay_after(self, num_updates: int) -> float:
        """The decay of the update after this many. Pure."""
        if not self.warm_up:
            return self.decay
        return min(self.decay, (1 + num_updates) / (10 + num_updates))

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average; call it after each step that moved them.

        Raises:
            ConfigError: the averages are in the model just now, or the model has other parameters.
        """
        if self._swapped:
            raise ConfigError("the averages are in the model; update() after the `with` block")
        sources = self._sources()
        self._take(sources, 1 - self.decay_after(self.num_updates))
        self.num_updates += 1

    def _take(self, sources: Mapping[str, Tensor], weight: float) -> None:
        lists: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name in self._owned:
            average = self._homes[name]
            source = sources[name].detach().to(device=average.device, dtype=average.dtype)
            here = lists.setdefault((average.device, average.dtype), ([], []))
            here[0].append(average)
            here[1].append(source)
        for averages, values in lists.values():
            torch._foreach_lerp_(averages, values, weight)

    @contextmanager
    def swapped_in(self) -> Iterator[nn.Module]:
        """The model with the averages as its weights, for evaluation or saving; then as it was."""
        if self._swapped:
            raise ConfigError("the averages are in the model already; leave the first block first")
        sources = self._sources()
        kept = {name: source.detach().clone() for name, source in sources.items()}
        self._swapped = True
        try:
            _write(sources, self._averages)
            yield self._model
        finally:
            _free_gathered(self._model)
            _write(sources, kept)
            self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        """The averages and how many updates they have had."""
        averages = {name: tensor.clone() for name, tensor in self._averages.items()}
        return {"num_updates": self.num_updates, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave; a rank writes the averages that it owns.

        Raises:
            ConfigError: they are those of another model.
        """
        self._load(self._check_saved(state))
        self.num_updates = int(state["num_updates"])

    def _check_saved(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        return _checked(self._averages, plain_keys(state["averages"]), same_dtype=False)

    def _load(self, saved: Mapping[str, Tensor]) -> None:
        for name in self._owned:
            self._homes[name].copy_(saved[name])

    def _sources(self) -> dict[str, Tensor]:
        sources = _averaged(self._model)
        if sources.keys() != self._averages.keys():
            odd = sorted(sources.keys() ^ self._averages.keys())[0]
            raise ConfigError(
                f"{odd} was added or removed since the average started; make a new EMA after "
                "changing a model"
            )
        return sources


def _free_gathered(model: nn.Module) -> None:
    """Of a model that torch has sharded: what was gathered would miss what is written to shards."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            cast("Any", module).reshard()


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    """What is averaged: parameters (of shards these), and floating or complex buffers."""
    _free_gathered(model)
    buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point() or b.is_complex()}
    return plain_keys({**dict(model.named_parameters()), **buffers})


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def places_for(sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New tensors for the averages of these."""
    return {
        name: torch.empty_like(tensor, dtype=_wide(tensor.dtype), requires_grad=False)
        for name, tensor in sources.items()
    }


def _checked(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], *, same_dtype: bool = True
) -> dict[str, Tensor]:
    """The given tensors, if they are the required ones."""
    odd = sorted(wanted.keys() ^ given.keys())
    if odd:
        where = "is missing" if odd[0] in wanted else "is not in the model"
        raise ConfigError(f"EMA: {odd[0]} {where}; give one tensor for each name of EMA.wanted")
    for name, tensor in wanted.items():
        dtype = _wide(tensor.dtype)
        if given[name].shape != tensor.shape or (same_dtype and given[name].dtype != dtype):
            raise ConfigError(
                f"EMA: {name} is {tuple(given[name].shape)} {given[name].dtype}, and the model "
                f"needs {tuple(tensor.shape)} {dtype}"
            )
    return {name: given[name] for name in wanted}


@torch.no_grad()
def _write(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.detach().copy_(values[name])


_ALIGN_BYTES = 64
T = TypeVar("T")


def _make_per_node(engine: Engine, model: nn.Module, decay: float, *, warm_up: bool) -> EMA:
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
    if any(hasattr(p, "to_local") for p in model.parameters()):
        return "weights are in shards"
    if not engine.capabilities.shares_memory:
        return f"the {engine.name} engine shares no memory"
    away = [p.device.type for p in model.parameters() if p.device.type != "cpu"]
    if away or engine.device.type != "cpu":
        return f"weights are on {away[0] if away else engine.device.type}"
    if max(engine.node_group().local_sizes) == 1:
        return "no node has several ranks"
    return None


def divide(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Give each rank whole tensors, largest first, each to the rank with the least so far. Pure."""
    names = sorted(sizes)
    shares = largest_first([sizes[name] for name in names], num_ranks)
    return [[names[index] for index in share] for share in shares]


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
        self._meet(self._group.barrier.wait)  # until here a rank may be reading
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
