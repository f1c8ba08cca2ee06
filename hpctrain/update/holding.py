"""The state of a divided optimizer in node-shared memory, and as the user sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.fusion import like_parameter
from hpctrain.log import format_bytes
from hpctrain.update.pieces import ParameterPiece, Slot, StateEntry, lay_out
from hpctrain.update.sharing import Fragment
from hpctrain.world import PrivateView, SharedBlock, agree

if TYPE_CHECKING:
    from hpctrain.engines import NodeGroup

__all__ = ["SharedState"]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A state tensor as the user sees it, and how often it had been written to by then."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class _Home:
    """Where the state of a piece belongs."""

    piece: ParameterPiece
    state: dict[str, Any]
    """The inner optimizer's own."""
    slots: dict[str, Tensor | None]
    """By key, in shared memory; None if there is nothing to hold."""


class SharedState:
    """Moves what an optimizer makes for its pieces into memory that the node shares.

    The user's `optimizer.state` gets views of all of it. Reading them shows what the owners write;
    writing to them (or replacing them) is this rank's own affair until the next step, which takes
    the owner's edits in: done the same on all ranks, as on one process, that edits the whole.
    """

    def __init__(
        self,
        group: NodeGroup,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._group = group
        self._optimizer = optimizer
        self._names = names
        self._parameters = parameters
        self._blocks: list[tuple[SharedBlock, PrivateView]] = []
        self._homes: dict[Fragment, _Home] = {}
        """The state of this rank's pieces."""
        self._shown: dict[int, dict[str, _Shown | None]] = {}
        self._tensors: dict[int, dict[str, Tensor | None]] = {}
        """Each parameter's state as last shown."""
        self._watched: list[Tensor] = []
        """All tensors in it, and how often each had been written to by then."""
        self._versions: list[int] = []
        self._told: set[int] = set()
        """Parameters whose state all ranks have."""
        self._switches: list[tuple[bool, ...]] = []
        self._edited = False
        self._import = True

    def forget(self) -> None:
        """Take everything from the user's optimizer at the next step, as after loading it."""
        self._import = True

    # Before an update

    def take_in(self, inner: torch.optim.Optimizer, pieces: Sequence[ParameterPiece]) -> None:
        """See what the user has changed since the last update."""
        switches = _switches(self._optimizer)
        if self._import or switches != self._switches:
            self._reimport(inner, pieces, switches)
            return
        written = any(private.is_written() for _, private in self._blocks)
        if not written and self._is_untouched():
            return  # the usual case
        if self._is_rearranged():
            self._reimport(inner, pieces, switches)
            return
        for index, shown in self._shown.items():
            state = self._optimizer.state[self._parameters[index]]
            if written or any(not _is_as_shown(state[key], one) for key, one in shown.items()):
                self._take_edits(index, state, pieces)

    def _is_untouched(self) -> bool:
        """Whether every entry is the very tensor that was shown, and none was written to.

        Not by `tensor.data`, which changes no version: the kernel detects that.
        """
        state = self._optimizer.state
        for index, parameter in enumerate(self._parameters):
            own, shown = state.get(parameter) or {}, self._tensors.get(index, {})
            if own.keys() != shown.keys() or not all(map(is_, own.values(), shown.values())):
                return False
        return [tensor._version for tensor in self._watched] == self._versions

    def _is_rearranged(self) -> bool:
        """Whether state was added, removed or given another form: as after loading it."""
        for index, parameter in enumerate(self._parameters):
            state = self._optimizer.state.get(parameter) or {}
            shown = self._shown.get(index, {})
            if len(state) != len(shown) or not all(
                key in state and _has_form(state[key], one) for key, one in shown.items()
            ):
                return True
        return False

    def _reimport(
        self,
        inner: torch.optim.Optimizer,
        pieces: Sequence[ParameterPiece],
        switches: list[tuple[bool, ...]],
    ) -> None:
        self._import = False
        self._switches = switches
        inner.state.clear()
        self._shown.clear()
        self._tensors.clear()
        self._watched, self._versions = [], []
        self._told.clear()
        self._homes.clear()
        for piece in pieces:
            index = piece.fragment.parameter
            state = self._optimizer.state.get(self._parameters[index])
            for key, value in (state or {}).items():
                inner.state[piece.tensor][key] = self._own_part(piece, key, value)
        self.close()

    def _own_part(self, piece: ParameterPiece, key: str, value: Any) -> Any:
        parameter = self._parameters[piece.fragment.parameter]
        if not isinstance(value, Tensor):
            return value
        if key != "step" and value.shape == parameter.shape:
            return piece.part_of(value, parameter).clone()
        return value.detach().clone()

    def _take_edits(
        self, index: int, state: dict[str, Any], pieces: Sequence[ParameterPiece]
    ) -> None:
        self._edited = True
        for piece in pieces:
            if piece.fragment.parameter == index:
                for key, slot in self._homes[piece.fragment].slots.items():
                    # A count that was not touched may be another rank's, who is already counting.
                    whole = slot is not None and slot.shape == piece.tensor.shape
                    if not whole and _is_as_shown(state[key], self._shown[index].get(key)):
                        continue
                    if slot is not None:
                        slot.copy_(self._own_part(piece, key, state[key]).view(slot.shape))

    # After an update

    def bring_home(self, used: Sequence[bool]) -> frozenset[int]:
        """Keep state where it is shared; parameters whose state is not known yet.

        Args:
            used: Which parameters the update has moved; the same on all ranks.
        """
        for home in self._homes.values():
            self._move_back(home)
        if len(self._told) == len(self._parameters):
            return frozenset()
        return frozenset(
            index
            for index, parameter in enumerate(self._parameters)
            if index not in self._told and (used[index] or self._optimizer.state.get(parameter))
        )

    def share(
        self, inner: torch.optim.Optimizer, pieces: Sequence[ParameterPiece], new: frozenset[int]
    ) -> None:
        """Collective: share the state of parameters that were updated for the first time."""
        mine = [piece for piece in pieces if piece.fragment.parameter in new]
        agree(self._group.comm, self._trouble(inner, mine), error=ConfigError)
        entries = [entry for piece in mine for entry in _entries(inner, piece)]
        every = [entry for part in self._group.node.allgather(entries) for entry in part]
        empty = {
            (piece.fragment.parameter, key)
            for piece in mine
            for key, value in inner.state.get(piece.tensor, {}).items()
            if value is None
        }
        nothing = {pair for part in self._group.node.allgather(empty) for pair in part}
        slots, num_bytes = lay_out(every, [p.numel() for p in self._parameters])
        self._told |= new
        shown: dict[int, dict[str, _Shown | None]] = {index: {} for index in new}
        for index, key in sorted(nothing):
            shown[index][key] = None
        for piece in mine:
            state = inner.state[piece.tensor]
            empty_keys = [key for key, value in state.items() if value is None]
            self._homes[piece.fragment] = _Home(piece, state, dict.fromkeys(empty_keys))
        if num_bytes:
            block = self._group.allocate(num_bytes, "optimizer state", private=[(0, num_bytes)])
            private = block.views[0]
            self._blocks.append((block, private))
            for piece in mine:
                self._move(inner, piece, block, slots)
            for entry in every:
                if entry.whole or entry.start == 0:
                    tensor = self._view(private, entry, slots)
                    shown[entry.parameter][entry.key] = _Shown(tensor, tensor._version)
        for index, values in shown.items():
            if values:
                self._show(index, values)
        self._watch()

    def _trouble(
        self, inner: torch.optim.Optimizer, pieces: Sequence[ParameterPiece]
    ) -> str | None:
        for piece in pieces:
            for key, value in inner.state.get(piece.tensor, {}).items():
                if value is not None and not isinstance(value, Tensor):
                    return (
                        f"{type(self._optimizer).__name__} keeps {key}={value!r} for "
                        f"{self._names[piece.fragment.parameter]}, which is not a tensor and "
                        "cannot "
                        'be shared by ranks; pass update="replicated" to distribute'
                    )
        return None

    def _move(
        self,
        inner: torch.optim.Optimizer,
        piece: ParameterPiece,
        block: SharedBlock,
        slots: dict[tuple[int, int | None, str], Slot],
    ) -> None:
        """Put a piece's state where it belongs."""
        state = inner.state.get(piece.tensor, {})
        for entry in _entries(inner, piece):
            slot = slots[entry.parameter, None if entry.whole else entry.start, entry.key]
            offset = slot.offset + (entry.start * entry.itemsize if entry.whole else 0)
            value = state[entry.key]
            memory = block.tensor(value.dtype, start=offset, num_elements=value.numel())
            home = memory.view(value.shape)
            if piece.whole and entry.whole:
                home = like_parameter(memory, self._parameters[entry.parameter])
            home.copy_(value)
            state[entry.key] = home
            self._homes[piece.fragment].slots[entry.key] = home

    def _view(
        self,
        private: PrivateView,
        entry: StateEntry,
        slots: dict[tuple[int, int | None, str], Slot],
    ) -> Tensor:
        slot = slots[entry.parameter, None if entry.whole else entry.start, entry.key]
        dtype = getattr(torch, entry.dtype)
        flat = private.tensor(dtype, start=slot.offset, num_elements=slot.num_elements)
        if entry.whole:
            return like_parameter(flat, self._parameters[entry.parameter])
        return flat.view(entry.shape)

    def _show(self, index: int, values: dict[str, _Shown | None]) -> None:
        self._shown[index] = values
        tensors = {key: None if one is None else one.tensor for key, one in values.items()}
        self._optimizer.state[self._parameters[index]] = tensors
        self._tensors[index] = dict(tensors)

    def _watch(self) -> None:
        """Know from now on what is written to."""
        shown = [one for values in self._shown.values() for one in values.values()]
        self._watched = [one.tensor for one in shown if one is not None]
        self._versions = [one.version for one in shown if one is not None]

    def _move_back(self, home: _Home) -> None:
        """An optimizer may make new tensors at every step: what they hold goes where it is shared.

        Raises:
            ConfigError: the state has another form than at the first step.
        """
        for key, slot in home.slots.items():
            value = home.state.get(key)
            if value is slot:
                continue
            if slot is None or not isinstance(value, Tensor) or not _is_like(value, slot):
                raise self._changed(home, key)
            home.state[key] = slot.copy_(value)
        if len(home.state) != len(home.slots):
            raise self._changed(home, next(key for key in home.state if key not in home.slots))

    def _changed(self, home: _Home, key: str) -> ConfigError:
        return ConfigError(
            f"{type(self._optimizer).__name__} has changed the form of its state {key!r} for "
            f"{self._names[home.piece.fragment.parameter]} after its first step, which ranks that "
            'share it cannot follow; pass update="replicated" to distribute'
        )

    def refresh(self) -> None:
        """After all ranks have updated: show the shared values again, where a user has written."""
        if not self._edited:
            return
        self._edited = False
        for _, private in self._blocks:
            private.refresh()
        for index, shown in self._shown.items():
            self._show(
                index,
                {
                    key: None if one is None else _Shown(one.tensor, one.tensor._version)
                    for key, one in shown.items()
                },
            )
        self._watch()

    def describe(self) -> str:
        """Where it is and how much of it."""
        if not self._blocks:
            return "none yet"
        total = sum(block.num_bytes for block, _ in self._blocks)
        return f"{format_bytes(total)} a {self._group.share_name}, {self._blocks[0][0].backing.why}"

    def close(self) -> None:
        """Let the files go; what the user sees stays."""
        for block, _ in self._blocks:
            block.close()
        self._blocks.clear()


def _entries(inner: torch.optim.Optimizer, piece: ParameterPiece) -> list[StateEntry]:
    return [
        StateEntry(
            parameter=piece.fragment.parameter,
            start=piece.fragment.start,
            key=key,
            dtype=str(value.dtype).removeprefix("torch."),
            itemsize=value.element_size(),
            shape=tuple(value.shape),
            whole=key != "step" and value.shape == piece.tensor.shape,
        )
        for key, value in inner.state.get(piece.tensor, {}).items()
        if isinstance(value, Tensor)
    ]


def _is_as_shown(value: Any, shown: _Shown | None) -> bool:
    if shown is None:
        return value is None
    return value is shown.tensor and shown.tensor._version == shown.version


def _has_form(value: Any, shown: _Shown | None) -> bool:
    if shown is None:
        return value is None
    same = value is shown.tensor  # the usual case
    return same or (isinstance(value, Tensor) and _is_like(value, shown.tensor))


def _is_like(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and value.dtype == other.dtype


def _switches(optimizer: torch.optim.Optimizer) -> list[tuple[bool, ...]]:
    """Which options are on, by group: turning one on (momentum) gives new state.

    Not the learning rate, which schedules take to zero and back.
    """
    return [
        tuple(
            bool(value)
            for name, value in group.items()
            if name != "lr" and isinstance(value, bool | int | float | None)
        )
        for group in optimizer.param_groups
    ]
