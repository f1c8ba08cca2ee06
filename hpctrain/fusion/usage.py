"""Which parameters a backward pass has used.

A hook that is a bare `list.append`: no Python code runs during backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain.fusion.layout import ParameterSpec

__all__ = ["Usage", "hook_gradient", "specs_of"]


class Usage:
    """Watches the parameters of a model."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        self._names = names
        self._parameters = parameters
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._ready: list[Tensor] = []
        self._handles: dict[int, RemovableHandle] = {}
        self.used: set[int] = set()
        """Used since the last exchange."""
        self.hook()

    def hook(self) -> None:
        """Hook what can have a gradient now; what was frozen until now included."""
        if len(self._handles) == len(self._parameters):
            return
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._handles:
                self._handles[index] = hook_gradient(parameter, self._ready.append)

    def settle(self) -> None:
        """After a backward pass of ours: note what it used."""
        self.used.update(self._index[id(p)] for p in self._ready)
        self._ready.clear()

    def unsettled(self) -> list[str]:
        """Parameters that a backward pass has used which nobody settled, by name, each once."""
        return [self._names[i] for i in dict.fromkeys(self._index[id(p)] for p in self._ready)]

    def forget(self) -> None:
        """Begin anew."""
        self._ready.clear()
        self.used.clear()

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
            numel=p.numel(),
            dtype=str(p.dtype).removeprefix("torch."),
            device=str(p.device),
            itemsize=p.element_size(),
        )
        for name, p in zip(names, parameters, strict=True)
    ]
