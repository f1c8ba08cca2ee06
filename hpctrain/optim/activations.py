"""How many bytes a forward pass keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

__all__ = ["Activations", "measure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What checkpointing saves."""

    num_modules: int
    without_bytes: int
    with_bytes: int
    on: str
    """`cpu`: bytes kept after the forward pass; `cuda`: the peak of forward and backward."""

    @property
    def saved_bytes(self) -> int:
        """How many bytes fewer it needs."""
        return self.without_bytes - self.with_bytes

    def __str__(self) -> str:
        what = "kept for backward" if self.on == "cpu" else "at the peak"
        share = self.saved_bytes / self.without_bytes if self.without_bytes else 0.0
        return (
            f"activations {what}: {self.without_bytes / 2**20:.1f} MiB without checkpointing, "
            f"{self.with_bytes / 2**20:.1f} MiB with {self.num_modules} modules checkpointed "
            f"({share:.0%} saved)"
        )


def measure(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """How many bytes a loss needs besides the weights; leaves everything as it was."""
    device = next(model.parameters()).device
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            return _peak(model, loss, device) if devices else _kept(model, loss)
    finally:
        for buffer, before in buffers:
            buffer.data.copy_(before)


def _peak(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> int:
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    grads = torch.autograd.grad(loss(), wanted, allow_unused=True)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del grads
    return peak - before


def _kept(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Bytes of saved tensors and of inputs that checkpointed modules hold, each storage once."""
    counted: dict[int, int] = {}
    alive: list[Any] = []  # a storage that died could lend its address to another
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in counted:
            counted[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    def count_inputs(module: nn.Module, arguments: Any, named: Any) -> None:
        if "forward" in vars(module):
            for leaf in tree_leaves((arguments, named)):
                if isinstance(leaf, Tensor):
                    count(leaf)

    handles = [
        module.register_forward_pre_hook(count_inputs, with_kwargs=True)
        for module in model.modules()
    ]
    try:
        with saved_tensors_hooks(count, lambda tensor: tensor):
            value = loss()
        del value
    finally:
        for handle in handles:
            handle.remove()
    return sum(counted.values())
