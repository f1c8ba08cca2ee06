"""In which order backward fills gradients, seen once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["Watcher", "complete"]


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
        """Begin anew, as at the start of a backward pass."""
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
