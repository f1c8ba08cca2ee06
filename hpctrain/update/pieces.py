"""The parts of parameters that this rank updates, and an optimizer of the same kind over them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.optim.optimizer as torchs_hooks
from torch import Tensor

from hpctrain.update.memory import flat_gradient, flat_memory
from hpctrain.update.sharing import Fragment

__all__ = ["Piece", "make_inner", "make_pieces", "take_options", "without_global_hooks"]

_OF_ONES_OWN = ("param_groups", "state", "defaults")


@dataclass(eq=False, slots=True)
class Piece:
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
) -> list[Piece]:
    """Tensors over the memory of the parameters themselves."""
    made = []
    for fragment in fragments:
        parameter = parameters[fragment.parameter]
        tensor = parameter.detach()
        if not whole:
            tensor = flat_memory(parameter)[fragment.start : fragment.stop]
        made.append(Piece(fragment, tensor, whole))
    return made


def make_inner(optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]) -> torch.optim.Optimizer:
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
