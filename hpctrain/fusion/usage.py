"""Which parameters a backward pass uses and in which order, and whether the pass was one of ours.

If nothing takes the gradients, a hook is a bare `list.append`: no Python code runs during
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain.fusion.layout import ParameterSpec
from hpctrain.pieces import local_tensor

__all__ = ["Arrived", "Usage", "Watcher", "complete", "hook_gradient", "specs_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """Results of an exchange besides gradients. Reading them on a GPU synchronizes it."""

    control: Tensor
    """The control words of `layout`, summed over all ranks."""
    flags: tuple[tuple[tuple[int, ...], Tensor], ...]
    """For each bucket: its members, and how many ranks used each."""
    all_used_here: bool
    """Whether this rank used every parameter that is not frozen, so that flags are not needed."""

    def used(self) -> frozenset[int] | None:
        """Parameters that some rank used, by index; None means all."""
        if self.all_used_here:
            return None
        found: set[int] = set()
        for members, flags in self.flags:
            marks = flags.real.tolist() if flags.is_complex() else flags.tolist()
            found.update(i for i, mark in zip(members, marks, strict=True) if mark > 0)
        return frozenset(found)


class Usage:
    """Watches the parameters of a model.

    Args:
        names: Of the parameters.
        parameters: Themselves.
        take: Called with a parameter's index when a pass of ours has added to its gradient.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        take: Callable[[int], None] | None = None,
    ) -> None:
        self._take = take
        self._ours = False
        self.num_taken = 0
        """Python hooks called so far."""
        self._names = names
        self._parameters = parameters
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._ready: list[Tensor] = []
        self._handles: dict[int, RemovableHandle] = {}
        self.hook()
        self._ours = False

    def hook(self) -> None:
        """Before a pass of ours: hook what can have a gradient now."""
        self._ours = True
        if len(self._handles) == len(self._parameters):
            return
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._handles:
                call = self._ready.append if self._take is None else self._taker(index, self._take)
                self._handles[index] = hook_gradient(parameter, call)

    def _taker(self, index: int, take: Callable[[int], None]) -> Callable[[Tensor], None]:
        def arrive(parameter: Tensor) -> None:
            if self._ours:
                self.num_taken += 1
                take(index)
            else:
                self._ready.append(parameter)

        return arrive

    def uncollected(self) -> list[str]:
        """Parameters that a backward pass used and that were not collected, by name, each once."""
        return [self._names[i] for i in dict.fromkeys(self._index[id(p)] for p in self._ready)]

    def collect(self) -> None:
        """After a backward pass of ours, or when all is forgotten."""
        self._ours = False
        self._ready.clear()

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def hook_gradient(parameter: Tensor, call: Callable[[Tensor], None]) -> RemovableHandle:
    """Call something whenever a backward pass has added to a parameter's gradient."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    return handle


def specs_of(names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> list[ParameterSpec]:
    """Parameters as the layout needs to know them."""
    return [
        ParameterSpec(
            name=name,
            numel=local_tensor(p.detach()).numel(),
            dtype=str(p.dtype).removeprefix("torch."),
            device=str(p.device),
            itemsize=p.element_size(),
        )
        for name, p in zip(names, parameters, strict=True)
    ]


class Watcher:
    """Notes the order in which gradients become ready, by hooks that are bare `list.append`s."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._seen: list[Tensor] = []
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._seen.append)  # type: ignore[no-untyped-call]
            for p in parameters
            if p.requires_grad
        ]

    def forget(self) -> None:
        """Start over, as at the start of a backward pass."""
        self._seen.clear()

    def stop(self) -> list[int]:
        """Take the hooks away; the parameters in the order in which each was last added to."""
        for hook in self._hooks:
            hook.remove()
        backwards = dict.fromkeys(self._index[id(p)] for p in reversed(self._seen))
        self._seen.clear()
        return list(reversed(backwards))


def complete(seen: Sequence[int], count: int) -> list[int]:
    """An order of all parameters: those that were seen, then the rest backwards. Pure."""
    rest = set(range(count)).difference(seen)
    return [*seen, *sorted(rest, reverse=True)]
