"""Where a divided model begins and ends: plain tensors outside, DTensors inside.

Ranks that share layers must compute the same: their batches are compared, and what draws random
numbers draws them for whole tensors, from generators in the same state.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.errors import CollectiveError, ConfigError

__all__ = ["Boundary", "replicate"]

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a number of 64 bits with a sign
_RANDOM = frozenset(
    [
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_dropout",
        "feature_dropout_",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
        "native_dropout",
        "rrelu",
        "rrelu_",
        "gumbel_softmax",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "normal",
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "cauchy_",
        "geometric_",
        "log_normal_",
        "poisson",
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
    ]
)
"""Functions that draw random numbers, or may."""


class _Dropping(NamedTuple):
    """How a function that drops at random is called: with 0, or not in training, it draws none."""

    chance: str
    place: int
    default: float = 0.5
    training: int | None = 2
    trains: bool = True


_DROPPING = {
    "dropout": _Dropping("p", 1),
    "dropout1d": _Dropping("p", 1),
    "dropout2d": _Dropping("p", 1),
    "dropout3d": _Dropping("p", 1),
    "alpha_dropout": _Dropping("p", 1, trains=False),
    "feature_alpha_dropout": _Dropping("p", 1, trains=False),
    "scaled_dot_product_attention": _Dropping("dropout_p", 4, default=0.0, training=None),
    "multi_head_attention_forward": _Dropping("dropout_p", 10, training=13),
}


def replicate(tensor: Tensor, mesh: Any) -> Tensor:
    """A tensor that every rank of a mesh has whole, as a DTensor."""
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def digest(values: Iterable[object]) -> Tensor:
    """One number for the bits of tensors in their order, and for plain values. Pure.

    Whole numbers modulo 2^64: neither the device nor the order of adding matters, and two elements
    that were exchanged change it.
    """
    texts, total = [], torch.zeros((), dtype=torch.int64)
    for value in values:
        if not isinstance(value, Tensor):
            known = isinstance(value, int | float | str | bool | type(None))
            texts.append(repr(value) if known else type(value).__name__)
            continue
        texts.append(f"{value.dtype} {tuple(value.shape)}")
        bits = _bits(value.detach())
        factors = torch.arange(bits.numel(), device=bits.device).mul_(2).add_(1).mul_(_STEP)
        summed = (bits.long() * factors).sum()
        total = total.to(summed.device) * _STEP + summed
    return total + zlib.crc32("\n".join(texts).encode())


def _bits(tensor: Tensor) -> Tensor:
    """The elements of a tensor as whole numbers of at most 32 bits."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.contiguous().reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
    return flat.view(kinds[flat.element_size()])


def draws(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a call of torch draws random numbers. Pure."""
    if name not in _RANDOM:
        return False
    how = _DROPPING.get(name)
    if how is None:
        return True
    chance = named.get(how.chance, args[how.place] if len(args) > how.place else how.default)
    trains: Any = how.trains
    if how.training is not None and len(args) > how.training:
        trains = args[how.training]
    trains = named.get("training", named.get("train", trains))
    return bool(chance) and bool(trains)


class _Inside(TorchFunctionMode):
    """What runs inside a divided model.

    Constants that meet a DTensor become whole ones: backward meets them again. What draws random
    numbers does so for whole tensors, on every rank the same.
    """

    def __init__(self, mesh: Any, boundary: Boundary) -> None:
        super().__init__()
        self.mesh = mesh
        self._boundary = boundary

    def __torch_function__(self, func: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        named = named or {}
        name = getattr(func, "__name__", "")
        if name in _RANDOM and draws(name, args, named):
            self._boundary.draws = True
            return self._draw(func, args, named)
        if _mixes((*args, *named.values())):
            args, named = tree_map(self._wrap, (args, named))
        return func(*args, **named)

    def _wrap(self, value: Any) -> Any:
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        return replicate(value, self.mesh) if plain else value

    def _draw(self, func: Any, args: Any, named: Any) -> Any:
        """Call what draws with whole tensors, as one process would."""
        leaves = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, DTensor)]
        if not leaves:
            return func(*args, **named)
        name = resolve_name(func) or func.__name__
        if any(placement.is_shard() for leaf in leaves for placement in leaf.placements):
            raise ConfigError(
                f"tensor: {name} draws random numbers for a tensor that is divided over ranks, "
                "which they cannot do as one process does; use it after the 'row' layer, where "
                "every rank has all of it, or set its probability to 0"
            )
        if func.__name__.endswith("_") or named.get("inplace"):
            raise ConfigError(
                f"tensor: {name} draws random numbers in place, inside a model with divided "
                "layers; use the form that returns a new tensor"
            )
        args, named = tree_map(_unwrap_whole, (args, named))
        return tree_map(self._wrap, func(*args, **named))


def _mixes(values: Iterable[object]) -> bool:
    """Whether plain tensors meet DTensors. Called at every operation, where few of them do."""
    plain = divided = False
    for value in values:
        for one in tree_leaves(value) if isinstance(value, tuple | list | dict) else (value,):
            if isinstance(one, DTensor):
                divided = True
            elif isinstance(one, Tensor):
                plain = True
    return plain and divided


def _unwrap_whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    whole = [Replicate()] * value.device_mesh.ndim
    return value.redistribute(placements=whole).to_local(grad_placements=whole)


class Boundary:
    """Plain tensors outside the model, DTensors inside.

    Args:
        model: Divided.
        mesh: Over the ranks that share it.
        keep: Whether scores that are divided by classes stay so.
    """

    def __init__(self, model: nn.Module, mesh: Any, *, keep: bool) -> None:
        self.mesh, self.keep = mesh, keep
        self.draws = False
        """Whether the model has drawn random numbers: then generators are compared, too."""
        self.forward = ExitStack()
        model.register_forward_pre_hook(self.enter, with_kwargs=True)
        model.register_forward_hook(self.leave, with_kwargs=True, always_call=True)

    def enter(self, model: nn.Module, args: Any, named: Any) -> Any:
        """Check that the ranks have the same batch, and wrap it."""
        self._check_same(tree_leaves((args, named)), draws=self.draws and model.training)
        self.forward.enter_context(
            implicit_replication()
        )  # for what torch makes inside an operator
        self.forward.enter_context(_Inside(self.mesh, self))
        if self.mesh.device_type == "cpu":  # torch cannot divide its flash attention for CPUs
            self.forward.enter_context(sdpa_kernel(SDPBackend.MATH))

        def wrap(value: Any) -> Any:
            plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            return replicate(value, self.mesh) if plain else value

        return tree_map(wrap, args), tree_map(wrap, named)

    def leave(self, model: nn.Module, args: Any, named: Any, out: Any) -> Any:
        """Unwrap what the model gives."""
        try:
            return tree_map(self._unwrap, out)
        finally:
            self.forward.close()

    def _unwrap(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        is_scores = value.placements[0] == Shard(value.dim() - 1)
        if not (self.keep and is_scores):
            value = value.redistribute(placements=[Replicate()]).to_local()
            if isinstance(value, AsyncCollectiveTensor) and not value.requires_grad:
                value = value.wait()
        return value

    def _check_same(self, leaves: list[Any], *, draws: bool) -> None:
        """Collective: ranks that share layers must have the same batch, and draw the same."""
        if self.mesh.size() == 1:
            return
        device = torch.device(self.mesh.device_type)
        found = [digest(leaves)]
        if draws:
            own = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
            found.append(digest([own]))
        mine = torch.stack([one.to(device) for one in found])
        ends = torch.cat([mine, -mine])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.mesh.get_group())
        largest, smallest = ends.view(2, -1).tolist()
        if largest[0] != -smallest[0]:
            raise CollectiveError(
                "ranks that share layers were given different batches; take them from a "
                "Loader(world, data, grid=grid, ...), or give all ranks of one data coordinate "
                "the same"
            )
        if largest != [-one for one in smallest]:
            raise CollectiveError(
                "ranks that share layers have random generators in different states, so that they "
                "would drop different elements; seed by grid.coordinate.data, or leave torch's "
                "generator to hpctrain.init(seed=...)"
            )
