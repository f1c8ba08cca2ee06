"""What a run consists of, under names, and its state: replicas, the loader, and what else has one.

Three things are not as simple as a `state_dict`. Buffers that each rank has its own of (BatchNorm's
running statistics without syncing) are each rank's own in a checkpoint, and so is what another part
(an average of the weights) keeps under their names. torch loads the state of any optimizer into any
other, and the checkpoint's options win without a word: so the kind is compared, and changed options
are named. And the random generators of a rank are plain data.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from hpctrain.checkpoint import Region
from hpctrain.data import Loader
from hpctrain.errors import ConfigError
from hpctrain.optim import label_of
from hpctrain.pieces import is_sharded
from hpctrain.replica import Replica
from hpctrain.saver.divided_parts import join_divided, take_divided, wanted_of
from hpctrain.sharding import as_pieces, load_shards
from hpctrain.tensor_names import are_plain, fit_keys, plain_keys
from hpctrain.world import World

__all__ = ["Parts", "Sharded", "Stateful", "capture_randomness", "restore_randomness"]

_OF_REPLICA = ("model", "optimizer", "counters")
_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""What schedules change during a run; the initial rate is in `initial_lr` then."""
_RECIPE = "rate_ratio"
"""For groups whose rate comes from a recipe: the recipe checks itself, and the optimizer's rate is
irrelevant."""


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved: schedules, averages, a user's own counters."""

    def state_dict(self) -> Mapping[str, Any]:
        """Everything that is needed to resume."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Resume from what `state_dict` gave."""
        ...


@runtime_checkable
class Sharded(Stateful, Protocol):
    """A part whose state is not whole on every rank: its `state_dict` has pieces of tensors."""

    def piece_of(self, place: str, shape: tuple[int, ...]) -> Region | range | None:
        """Which part of a saved tensor this rank restores: a block, elements, or all of it.

        Args:
            place: In the part's state, as in `0/exp_avg`.
            shape: Of the whole tensor.
        """
        ...


class Parts:
    """The parts of one run.

    Args:
        parts: Replicas and at most one loader. One replica's model is `model` in a checkpoint,
            several are `0.model`, `1.model` and so on, in their order.
        named: Further parts by their names, replicas too.

    Raises:
        ConfigError: a part has no state, a name is taken twice, or there are two loaders.
    """

    def __init__(self, parts: Sequence[object], named: Mapping[str, object]) -> None:
        self.replicas: dict[str, Replica] = {}
        self.loader: Loader | None = None
        self.others: dict[str, Stateful] = {}
        given = [part for part in parts if isinstance(part, Replica)]
        names = [""] if len(given) == 1 else [str(i) for i in range(len(given))]
        for part in parts:
            if isinstance(part, Replica):
                self._add(names.pop(0), part)
            elif isinstance(part, Loader):
                self._add("loader", part)
            else:
                raise ConfigError(
                    f"Saver was given {type(part).__name__}; replicas and one loader come first, "
                    "anything else by name: named={'schedule': schedule}"
                )
        for name, other in named.items():
            self._add(name, other)
        if not self.replicas and not self.others:
            raise ConfigError("Saver was given nothing to save; give it a replica")

    def _add(self, name: str, part: object) -> None:
        wanted = [_key(name, what) for what in _OF_REPLICA] if isinstance(part, Replica) else [name]
        if set(wanted) & set(self.names):
            raise ConfigError(f"two parts of the Saver are called {name!r}; give each its own name")
        if isinstance(part, Replica):
            self.replicas[name] = part
        elif isinstance(part, Loader):
            if self.loader is not None:
                raise ConfigError(
                    "Saver was given two loaders; give it the one that the loop is over"
                )
            if name != "loader":
                raise ConfigError(f"the loader is called 'loader' in checkpoints, not {name!r}")
            self.loader = part
        elif isinstance(part, Stateful):
            self.others[name] = part
        else:
            raise ConfigError(
                f"named[{name!r}] is {type(part).__name__} and has no state_dict and "
                "load_state_dict; wrap it in an object that does"
            )

    @property
    def names(self) -> list[str]:
        """All names that are taken in a checkpoint."""
        ofs = [_key(name, what) for name in self.replicas for what in _OF_REPLICA]
        return [*ofs, *self.others, *(["loader"] if self.loader is not None else [])]

    @property
    def like(self) -> dict[str, Any]:
        """Which tensors a checkpoint must have, and which pieces this rank needs of them."""
        models = {_key(name, "model"): _model_state(one) for name, one in self.replicas.items()}
        states = {
            _key(name, "optimizer"): one.wanted_state
            for name, one in self.replicas.items()
            if one.wanted_state is not None
        }
        sharded: dict[str, Any] = {
            n: part.piece_of for n, part in self.others.items() if isinstance(part, Sharded)
        }
        if self.is_divided:
            takes_all = all(one.stage_state is None for one in self.replicas.values())
            sharded |= {
                name: wanted_of(part.state_dict(), takes_all=takes_all)
                for name, part in self.others.items()
                if not isinstance(part, Sharded)
            }
        return models | states | sharded

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold different parts of a model."""
        return any(
            one.stage_state is not None or any(map(is_sharded, one.model.parameters()))
            for one in self.replicas.values()
        )

    @property
    def watchdog(self) -> Any:
        """Who watches over the replicas' collectives, if there are any."""
        return next((replica.engine.watchdog for replica in self.replicas.values()), None)

    @property
    def is_mid_step(self) -> bool:
        """Whether gradients of an unfinished step are waiting in a replica."""
        return any(replica.is_mid_step for replica in self.replicas.values())

    @property
    def num_samples(self) -> int | None:
        """Samples the whole run has consumed, where a loader counts them."""
        return None if self.loader is None else self.loader.total

    def capture(self, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
        """Collective: the state of all parts: what all ranks have in common, and this rank's own.

        Tensors are the run's own, not copies.
        """
        common: dict[str, Any] = {}
        own: dict[str, Any] = {}
        differing: set[str] = set()
        for name, replica in self.replicas.items():
            model = _model_state(replica)
            named = plain_keys(dict(replica.model.named_buffers()))
            buffers = {key: model[key] for key in named if isinstance(model.get(key), Tensor)}
            own[_key(name, "model")] = mine = _find_own(world, buffers)
            differing |= set(mine)
            model |= _take_from_first(world, mine)
            common[_key(name, "model")] = model
            optimizer = replica.state_dict()
            del optimizer["model"]  # it is above, with rank 0's statistics
            if replica.is_sharded:
                optimizer = as_pieces(optimizer)
            if replica.stage_state is not None:
                optimizer = replica.stage_state.optimizer_pieces(optimizer)
            common[_key(name, "optimizer")] = optimizer
            kind = label_of(replica.optimizer)
            counters = replica.counters() | {"optimizer": kind}
            told, mine = replica.wire_state()
            common[_key(name, "counters")] = counters | ({"wire": told} if told else {})
            own[_key(name, "counters")] = {"wire": mine}
        for name, other in self.others.items():
            state = other.state_dict()
            if isinstance(other, Module) and not are_plain(state):
                state = plain_keys(state)
            own[name] = mine = pick(state, differing)
            common[name] = replace(state, _take_from_first(world, mine))
            if self.is_divided and not isinstance(other, Sharded):
                common[name] = join_divided(world, common[name])
        if self.loader is not None:
            common["loader"] = self.loader.state_dict()
        return common, own

    def trouble_with(self, names: Sequence[str]) -> str | None:
        """Why a checkpoint with these parts is not one of this run, or None."""
        missing, strange = set(self.names) - set(names), set(names) - set(self.names)
        lacks = f"it has no {', no '.join(sorted(missing))}, which this run has" if missing else ""
        more = (
            f"it has {', '.join(sorted(strange))}, which this run does not have; give the Saver "
            "the same "
            "parts under the same names"
        )
        return "; ".join(filter(None, [lacks, more if strange else ""])) or None

    def trouble_with_optimizers(self, common: Mapping[str, Any]) -> str | None:
        """Why a checkpoint is that of another optimizer, or None."""
        for name, replica in self.replicas.items():
            kind = common[_key(name, "counters")]["optimizer"]
            trouble = _trouble_with_optimizer(kind, replica.optimizer)
            if trouble is not None:
                return trouble
        return None

    def changed_options(self, common: Mapping[str, Any]) -> list[str]:
        """What the script sets otherwise than a checkpoint, which wins."""
        return [
            change
            for name, replica in self.replicas.items()
            for change in _changed_options(common[_key(name, "optimizer")], replica.optimizer)
        ]

    def restore(self, common: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Collective: take over a state that `capture` gave, on any number of ranks."""
        for name, replica in self.replicas.items():
            model, optimizer = common[_key(name, "model")], common[_key(name, "optimizer")]
            if replica.stage_state is not None:
                model = replica.stage_state.own_model(model)
                optimizer = replica.stage_state.own_optimizer(optimizer)
            if replica.is_sharded:
                load_shards(replica.model, model)
            else:
                _load_model(replica.model, model)
            replica.load_state_dict(optimizer)
            counters = common[_key(name, "counters")]
            replica.load_counters(counters)
            mine = {} if own is None else own.get(_key(name, "counters"), {})
            replica.load_wire_state(counters.get("wire", {}), mine.get("wire", {}))
            if own is not None:
                _load_buffers(replica, own[_key(name, "model")])
        for name, other in self.others.items():
            mine = {} if own is None else own[name]
            state = replace(common[name], mine)
            if self.is_divided and not isinstance(other, Sharded):
                state = take_divided(other.state_dict(), state)
            if isinstance(other, Module):
                _load_model(other, state)
            else:
                other.load_state_dict(state)
        if self.loader is not None:
            self.loader.load_state_dict(common["loader"])


def _key(name: str, what: str) -> str:
    return f"{name}.{what}" if name else what


def _model_state(replica: Replica) -> dict[str, Any]:
    """A model's tensors by their plain names; of divided ones this rank's pieces."""
    state = plain_keys(replica.model.state_dict(keep_vars=replica.is_sharded))
    pieces: dict[str, Any] = as_pieces(state) if replica.is_sharded else state
    if replica.stage_state is not None:
        return dict(replica.stage_state.model_pieces(pieces))
    return pieces


def _load_model(model: Module, saved: Mapping[str, Any]) -> None:
    """Under the model's own names: it may have been compiled when it was saved, or be so now."""
    own = model.state_dict()
    model.load_state_dict(saved if saved.keys() == own.keys() else fit_keys(saved, own))


def _load_buffers(replica: Replica, saved: Mapping[str, Tensor]) -> None:
    buffers = plain_keys(dict(replica.model.named_buffers()))
    for key, value in plain_keys(saved).items():
        if key in buffers or replica.stage_state is None:  # else another stage's
            buffers[key].copy_(value)


def _trouble_with_optimizer(saved: str, optimizer: torch.optim.Optimizer) -> str | None:
    """Why a state cannot be this optimizer's, or None."""
    own = label_of(optimizer)
    if saved == own:
        return None
    return (
        f"it has the state of {saved}, and this run's optimizer is {own}; keep {saved}, or "
        "start a run in another directory"
    )


def _changed_options(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[str]:
    """A description of group options that differ between script and checkpoint.

    Args:
        saved: The optimizer's state in the checkpoint.
        optimizer: As the script has made it.
    """
    changes = []
    for index, (was, now) in enumerate(
        zip(saved["param_groups"], optimizer.param_groups, strict=False)
    ):
        for key in sorted((was.keys() & now.keys()) - _moving(was, now)):
            if not _same(was[key], now[key]):
                where = f" of group {index}" if len(optimizer.param_groups) > 1 else ""
                changes.append(f"{key}{where} {was[key]!r} (the script says {now[key]!r})")
    return changes


def _moving(was: Mapping[str, Any], now: Mapping[str, Any]) -> frozenset[str]:
    """Options whose value says nothing, besides the list of parameters."""
    if _RECIPE in was or _RECIPE in now:
        return _SCHEDULED | {"params", "initial_lr"}
    scheduled = "initial_lr" in was or "initial_lr" in now
    return (_SCHEDULED if scheduled else frozenset()) | {"params"}


def _same(was: object, now: object) -> bool:
    if isinstance(was, torch.Tensor) or isinstance(now, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(was), torch.as_tensor(now)))
    return was == now


def _find_own(world: World, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Collective: the buffers whose bits differ between ranks; all ranks must have the same names.

    Buffers are small compared with parameters, and this is done once per checkpoint: each rank's
    digest of each of them travels.
    """
    if world.size == 1 or not buffers:
        return {}
    digests = world.comm.allgather([_digest(tensor) for tensor in buffers.values()])
    columns = zip(*digests, strict=True)
    return {
        name: buffers[name]
        for name, column in zip(buffers, columns, strict=True)
        if len(set(column)) > 1
    }


def _take_from_first(world: World, own: Mapping[str, Any]) -> dict[str, Any]:
    """Collective: rank 0's values of what differs, for another number of ranks."""
    if not own:
        return {}
    told: dict[str, Any] = world.comm.bcast(_on_cpu(own) if world.rank == 0 else None, root=0)
    return told


def _on_cpu(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _on_cpu(value) if isinstance(value, Mapping) else value.detach().cpu()
        for key, value in tree.items()
    }


def pick(tree: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The tensors of nested mappings that are called so, in mappings of the same form."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            inside = pick(value, names)
            if inside:
                found[key] = inside
        elif isinstance(value, Tensor) and key in names:
            found[key] = value
    return found


def replace(tree: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with the tensors of another one, of the form that `pick` gives, in their places."""
    return {
        key: replace(value, others[key])
        if key in others and isinstance(value, Mapping)
        else others.get(key, value)
        for key, value in tree.items()
    }


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def capture_randomness(device: torch.device) -> dict[str, Any]:
    """The state of Python's, numpy's and torch's global generators, and of this rank's device."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, keys, position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def restore_randomness(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators as they were captured; a device's only where both runs have one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)
