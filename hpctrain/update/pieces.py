"""The parts of parameters that this rank updates, their state, and an optimizer over them.

A state tensor as large as its parameter (a momentum) is laid out whole, each fragment at its place,
so that every rank can see all of it; anything else (a step count) has a place per fragment.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.optim.optimizer as torchs_hooks
from torch import Tensor

from hpctrain.update.sharing import Fragment

__all__ = [
    "ParameterPiece",
    "Slot",
    "StateEntry",
    "flat_gradient",
    "flat_memory",
    "lay_out",
    "make_inner",
    "make_pieces",
    "take_options",
    "without_global_hooks",
]


def flat_memory(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory; a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient (or state) in the order of the parameter's memory, perhaps copied."""
    dense = gradient.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    if dense.stride() == parameter.stride() or dense.numel() <= 1:
        return flat_memory(dense)
    ordered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dense.dtype)
    return flat_memory(ordered.copy_(dense))


_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A state tensor that an optimizer has made for a fragment."""

    parameter: int
    start: int
    """Of the fragment, within the parameter."""
    key: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    whole: bool
    """Whether it has an element for every element of the fragment."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a block: bytes from its start, and elements."""

    offset: int
    num_elements: int


def lay_out(
    entries: Iterable[StateEntry], sizes: Sequence[int]
) -> tuple[dict[tuple[int, int | None, str], Slot], int]:
    """Give each entry a slot; those of one parameter that are parts of a whole share one.

    Args:
        entries: Of all fragments of a node.
        sizes: Elements of each parameter.

    Returns:
        Slots by parameter, fragment (None where it is whole) and key; and the bytes of the block.
    """
    slots: dict[tuple[int, int | None, str], Slot] = {}
    end = 0
    for entry in sorted(entries, key=lambda e: (e.key, e.parameter, e.start)):
        place = (entry.parameter, None if entry.whole else entry.start, entry.key)
        if place in slots:
            continue
        number = sizes[entry.parameter]
        if not entry.whole:
            number = 1
            for length in entry.shape:
                number *= length
        slots[place] = Slot(end, number)
        end += -(-number * entry.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
    return slots, end


@dataclass(eq=False, slots=True)
class ParameterPiece:
    """A fragment of a parameter as a tensor that shares its memory."""

    fragment: Fragment
    tensor: Tensor
    whole: bool
    """Whether it has the parameter's shape, or is flat."""

    def part_of(self, full: Tensor, parameter: Tensor) -> Tensor:
        """The piece's part of something as large as the parameter: a gradient, a momentum."""
        if self.whole:
            return full.detach()
        flat = flat_gradient(full, parameter)
        return flat[self.fragment.start : self.fragment.stop]


def make_pieces(
    fragments: Sequence[Fragment], parameters: Sequence[Tensor], *, whole: bool
) -> list[ParameterPiece]:
    """Tensors over the memory of the parameters themselves."""
    made = []
    for fragment in fragments:
        parameter = parameters[fragment.parameter]
        tensor = parameter.detach()
        if not whole:
            tensor = flat_memory(parameter)[fragment.start : fragment.stop]
        made.append(ParameterPiece(fragment, tensor, whole))
    return made


def make_inner(
    optimizer: torch.optim.Optimizer, pieces: Sequence[ParameterPiece]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and options over the pieces, with no state yet."""
    inner = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name not in vars(inner) and not name.startswith("_optimizer_") and name != "step":
            setattr(inner, name, value)
    group_of = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    order = [p for group in optimizer.param_groups for p in group["params"]]
    inner.state = defaultdict(dict)
    inner.param_groups = [{"params": []} for _ in optimizer.param_groups]
    for piece in pieces:
        number = group_of[id(order[piece.fragment.parameter])]
        inner.param_groups[number]["params"].append(piece.tensor)
    take_options(inner, optimizer)
    return inner


def take_options(inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Copy learning rates and all other options of the groups inward."""
    for own, group in zip(inner.param_groups, optimizer.param_groups, strict=True):
        for name, value in group.items():
            if name != "params":
                own[name] = value
    for name in ("grad_scale", "found_inf"):  # what torch.amp hands to fused optimizers
        if hasattr(optimizer, name):
            setattr(inner, name, getattr(optimizer, name))
        elif hasattr(inner, name):
            delattr(inner, name)


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Inside, steps run none of the hooks that torch calls around every optimizer's step.

    They run around the step of the user's optimizer, once, and this one is a part of that.
    """
    kept = (torchs_hooks._global_optimizer_pre_hooks, torchs_hooks._global_optimizer_post_hooks)
    if not any(kept):
        yield
        return
    torchs_hooks._global_optimizer_pre_hooks = OrderedDict()
    torchs_hooks._global_optimizer_post_hooks = OrderedDict()
    try:
        yield
    finally:
        torchs_hooks._global_optimizer_pre_hooks, torchs_hooks._global_optimizer_post_hooks = kept
