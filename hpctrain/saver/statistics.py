"""Buffers that each rank has its own of: the running statistics of BatchNorm without syncing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from hpctrain.world import World

__all__ = ["find_own", "take_from_first"]


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


def take_from_first(world: World, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Collective: rank 0's values of buffers that differ, for whoever goes on on other ranks."""
    if not own:
        return {}
    mine = {name: tensor.detach().cpu() for name, tensor in own.items()}
    told: dict[str, Tensor] = world.comm.bcast(mine if world.rank == 0 else None, root=0)
    return told


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy(), digest_size=16).digest()
