"""Buffers that each rank has its own of: the running statistics of BatchNorm without syncing.

What another part (an average of the weights) keeps under the names of such buffers is each rank's
own as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.world import World

__all__ = ["find_own", "pick", "replace", "take_from_first"]


def find_own(world: World, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Collective: the buffers whose bits differ between ranks; all ranks must have the same names.

    Buffers are small beside parameters, and this is done once per checkpoint: each rank's digest
    of each of them travels.
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


def take_from_first(world: World, own: Mapping[str, Any]) -> dict[str, Any]:
    """Collective: rank 0's values of what differs, for whoever goes on on other ranks."""
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
