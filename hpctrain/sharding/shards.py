"""Shards of tensors: as pieces for a checkpoint, and back from pieces or whole tensors.

torch's DTensor knows its mesh and its placement; a checkpoint knows blocks. What is loaded may be a
DTensor that lies the same way, the whole tensor, or just this rank's piece of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import ConfigError
from hpctrain.pieces import Piece, Region, is_sharded, local_tensor, place_like
from hpctrain.tensor_names import fit_keys

__all__ = [
    "as_pieces",
    "block_of",
    "find_region",
    "fit_optimizer_state",
    "load_shards",
    "piece_of_state",
    "region_of",
    "shard_like",
]


def region_of(tensor: Tensor) -> Region:
    """Which block of the whole this rank holds; may be empty."""
    shard: Any = tensor
    mesh = shard.device_mesh
    cuts = [
        (int(placement.dim), getattr(placement, "split_factor", 1) > 1, mesh.size(i), at)
        for i, (placement, at) in enumerate(
            zip(shard.placements, mesh.get_coordinate(), strict=True)
        )
        if placement.is_shard() or hasattr(placement, "split_factor")
    ]
    return find_region(shard.shape, cuts)


def find_region(shape: Sequence[int], cuts: Sequence[tuple[int, bool, int, int]]) -> Region:
    """The block that is left of a tensor after it was cut several times. Pure.

    Args:
        shape: Of the whole.
        cuts: For each dimension of a mesh: which dimension of the tensor it cuts, whether what the
            other cuts have left is cut (torch's strided shards), into how many, and which is this
            rank's. As torch cuts: the first ones are of equal size, the last may be less or empty.
    """
    begins, sizes = [0] * len(shape), list(shape)
    for dim, _, count, place in sorted(cuts, key=lambda cut: cut[1]):  # a stable order
        length = -(-sizes[dim] // count)
        start = min(place * length, sizes[dim])
        begins[dim] += start
        sizes[dim] = min(length, sizes[dim] - start)
    return Region(tuple(begins), tuple(sizes))


def as_pieces(tree: Any) -> Any:
    """A state tree with a `Piece` for each sharded tensor; one tensor in two places is one piece.

    Tied weights are told by identity: give `model.state_dict(keep_vars=True)`.
    """
    return _as_pieces(tree, {})


def _as_pieces(tree: Any, known: dict[int, Piece]) -> Any:
    if is_sharded(tree):
        if id(tree) not in known:
            region = region_of(tree)
            local = local_tensor(tree.detach()).reshape(region.shape)
            known[id(tree)] = Piece(local, region.offset, tuple(tree.shape))
        return known[id(tree)]
    if isinstance(tree, nn.Parameter):
        return tree.detach()
    if type(tree) is dict:
        return {key: _as_pieces(value, known) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_as_pieces(value, known) for value in tree)
    return tree


def piece_of_state(
    optimizer: torch.optim.Optimizer, place: str, shape: tuple[int, ...]
) -> Region | None:
    """Which part of a saved tensor of an optimizer's state this rank wants; None: all of it.

    Args:
        optimizer: Over shards.
        place: In its state, such as `state/0/exp_avg`.
        shape: Of the whole tensor.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    first, _, rest = place.partition("/")
    number = rest.partition("/")[0]
    if first != "state" or not number.isdecimal() or int(number) >= len(parameters):
        return None
    parameter = parameters[int(number)]
    fits = is_sharded(parameter) and tuple(parameter.shape) == tuple(shape)
    return region_of(parameter) if fits else None


@torch.no_grad()
def load_shards(model: nn.Module, state: Mapping[str, Tensor | Piece]) -> None:
    """Load a model's state into its shards, from whole tensors, shards or this rank's pieces.

    Raises:
        ConfigError: names or shapes are those of another model.
    """
    own = model.state_dict()
    given = fit_keys(state, own)
    missing = [name for name in own if name not in given]
    strange = [name for name in given if name not in own]
    if missing or strange:
        raise ConfigError(
            f"this is the state of another model: it has no {', '.join(missing[:3]) or 'less'}, "
            f"and has {', '.join(strange[:3]) or 'no more'}"
        )
    for name, tensor in own.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name} is a {type(tensor).__name__}, not a tensor")
        local_tensor(tensor).copy_(block_of(tensor, given[name], name))


def fit_optimizer_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """An optimizer's state for shards: what is as large as a parameter lies as the parameter does.

    Args:
        optimizer: Over shards.
        state: As torch has it, of whole tensors, of shards, or of this rank's pieces.

    Raises:
        ConfigError: a tensor has another shape than its parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fitted = {}
    for number, values in state["state"].items():
        known = isinstance(number, int) and number < len(parameters)
        parameter = parameters[number] if known else None
        if parameter is None or not is_sharded(parameter):
            fitted[number] = values
            continue
        fitted[number] = {
            key: shard_like(parameter, value, f"state {number} {key}")
            for key, value in values.items()
        }
    return {**state, "state": fitted}


def shard_like(parameter: Tensor, value: Any, name: str) -> Any:
    """A value (of an optimizer's state) as a shard, where it has an element for each element.

    Args:
        parameter: A shard, which it is to lie like.
        value: A whole tensor or this rank's piece of it; anything else stays what it is.
        name: For messages.

    Raises:
        ConfigError: it has another shape.
    """
    is_whole = isinstance(value, Tensor) and value.shape == parameter.shape
    if is_sharded(value) or not (is_whole or isinstance(value, Piece)):
        return value
    return place_like(block_of(parameter, value, name).to(parameter.device, copy=True), parameter)


def block_of(target: Tensor, value: Tensor | Piece, name: str) -> Tensor:
    """This rank's block of what came."""
    region = region_of(target) if is_sharded(target) else Region.whole(target.shape)
    if isinstance(value, Piece):
        fits = (
            tuple(value.shape) == tuple(target.shape) and tuple(value.tensor.shape) == region.shape
        )
        if fits and (value.offset == region.offset or not region.num_elements):
            return value.tensor
    elif value.shape == target.shape:
        local = local_tensor(value)
        if is_sharded(value) and region_of(value) == region:
            return local
        if not is_sharded(value):
            return local[region.slices_in(Region.whole(target.shape))]
    raise ConfigError(
        f"{name} is of shape {tuple(value.shape)} in the state, and here it is "
        f"{tuple(target.shape)}, of which this rank holds {region}; load a state of the same model"
    )
