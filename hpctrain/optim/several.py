"""Several optimizers over one loss, as one: matrices by Muon, the rest by AdamW.

It has the groups of all of them in order, and a state of the form that one optimizer with all those
groups would have. Schedules work on the optimizers themselves.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import ConfigError

__all__ = ["Several", "combine", "label_of", "members_of", "spans_of"]


class Several(torch.optim.Optimizer):
    """Optimizers that step together.

    Args:
        members: In the order in which they step; no parameter is in two of them.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        # Groups, state and hooks are the members' own: torch's constructor would make others.
        self.members = tuple(members)

    @property
    def label(self) -> str:
        """The members' classes, which tell one combination from another."""
        return " + ".join(type(member).__name__ for member in self.members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Every member's groups; what is written to one is written to its member."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> ChainMap[Tensor, Any]:  # type: ignore[override]
        """Every member's state."""
        return ChainMap(*(member.state for member in self.members))

    def __repr__(self) -> str:
        return f"Several({', '.join(map(repr, self.members))})"

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Let every member step."""
        if closure is not None:
            raise ConfigError(
                "step(closure) with several optimizers: each would evaluate it after the previous "
                "one has changed the weights; call backward before step"
            )
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        for member in self.members:
            member.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: it does not say whose.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("add the group to one of the optimizers that distribute was given")

    def state_dict(self) -> dict[str, Any]:
        """The state of one optimizer with all groups."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        start = 0
        for member in self.members:
            one = member.state_dict()
            state |= {start + index: value for index, value in one["state"].items()}
            groups += [
                {**group, "params": [start + index for index in group["params"]]}
                for group in one["param_groups"]
            ]
            start += _count(member)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave.

        Raises:
            ConfigError: it has another number of groups.
        """
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"the state has {len(groups)} parameter groups, and {self.label} have "
                f"{len(self.param_groups)}; load it into the same optimizers in the same order"
            )
        start = 0
        for member in self.members:
            own = [groups.pop(0) for _ in member.param_groups]
            stop = start + _count(member)
            member.load_state_dict(
                {
                    "state": {
                        index - start: value
                        for index, value in state_dict["state"].items()
                        if start <= index < stop
                    },
                    "param_groups": [
                        {**group, "params": [index - start for index in group["params"]]}
                        for group in own
                    ],
                }
            )
            start = stop

    # Hooks are hung on every member

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Before each member's step."""
        return _Handles([member.register_step_pre_hook(hook) for member in self.members])

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """After each member's step."""
        return _Handles([member.register_step_post_hook(hook) for member in self.members])

    def register_load_state_dict_pre_hook(
        self, hook: Any, prepend: bool = False
    ) -> RemovableHandle:
        """Before each member loads."""
        return _Handles([m.register_load_state_dict_pre_hook(hook, prepend) for m in self.members])

    def register_load_state_dict_post_hook(
        self, hook: Any, prepend: bool = False
    ) -> RemovableHandle:
        """After each member has loaded."""
        return _Handles([m.register_load_state_dict_post_hook(hook, prepend) for m in self.members])


class _Handles(RemovableHandle):
    """One handle for the same hook on several optimizers."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def combine(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """One optimizer, whatever was given."""
    if not isinstance(given, list | tuple):
        return given  # type: ignore[return-value]
    return given[0] if len(given) == 1 else Several(given)


def spans_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.optim.Optimizer, slice]]:
    """The optimizers behind one, and which of its parameters each has."""
    start = 0
    for member in members_of(optimizer):
        stop = start + _count(member)
        yield member, slice(start, stop)
        start = stop


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers behind one."""
    return optimizer.members if isinstance(optimizer, Several) else (optimizer,)


def label_of(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer is called in reports and checkpoints."""
    return optimizer.label if isinstance(optimizer, Several) else type(optimizer).__name__


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
