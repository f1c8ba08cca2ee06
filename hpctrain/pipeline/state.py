"""A stage's part of a run's state, under the names and numbers that one process would use.

A checkpoint of a pipeline has every tensor of the whole model, each written by a rank whose stage
holds it: a run resumes from it on another grid, or on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.pieces import Piece, Region
from hpctrain.world import agree

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.pipeline.cutting import Cut, StageModel

__all__ = ["StageState"]

Wanted = Callable[[str, tuple[int, ...]], Region | None]


class _TensorKind(NamedTuple):
    """What must be known of a tensor that another stage holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def nothing(self) -> Piece:
        """This rank's piece of it."""
        return Piece(torch.empty(0, dtype=self.dtype), 0, self.shape)


class StageState:
    """Collective over the stages: how the parameters of all optimizers are numbered together.

    Args:
        comm: The stages.
        model: This rank's.
        optimizer: Over its parameters, in the order of `model.parameters()` in each group.

    Raises:
        ConfigError: on all stages; the parameters are in another order.
    """

    def __init__(self, comm: Comm, model: StageModel, optimizer: torch.optim.Optimizer) -> None:
        self._comm = comm
        self._model = model
        cut = model.hpctrain_cut
        own = {id(p): name for name, p in model.named_parameters()}
        mine = [[own[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        agree(comm, _trouble_with_order(list(own.values()), mine), error=ConfigError)
        groups = _join_groups(cut, comm.allgather(mine))
        number = {name: n for n, name in enumerate(name for group in groups for name in group)}
        self._groups = [[number[name] for name in group] for group in groups]
        self._numbers = [number[cut.first_names[name]] for group in mine for name in group]
        """By number in this stage's optimizer: the number in one over the whole model."""

    # The model

    def model_pieces(self, own: Mapping[str, Tensor | Piece]) -> dict[str, Piece]:
        """All tensors of the whole model by name: this stage's, and nothing of the others'.

        Args:
            own: This stage's state; pieces where its tensors are divided among ranks.
        """
        found: dict[str, Piece] = {}
        for name, shape, dtype in self._model.hpctrain_cut.tensors:
            held = own.get(name)
            found[name] = _TensorKind(shape, dtype).nothing() if held is None else _all_of(held)
        return found

    def own_model(self, saved: Mapping[str, Tensor | Piece]) -> dict[str, Tensor | Piece]:
        """This stage's tensors out of the whole model's."""
        return {name: _tensor_in(saved[name]) for name in self._model.state_dict()}

    # The optimizer

    def optimizer_pieces(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Collective over the stages: this stage's optimizer state as a part of the whole's.

        Args:
            state: As torch has it, and perhaps more under other keys; pieces where tensors are
                divided among ranks.
        """
        mine = {
            self._numbers[n]: {key: _kind_of(value) for key, value in values.items()}
            for n, values in state["state"].items()
        }
        kinds: dict[int, dict[str, Any]] = {}
        for told in self._comm.allgather(mine):
            kinds |= told
        own = {self._numbers[n]: values for n, values in state["state"].items()}
        whole = {
            n: {key: _piece(kind, own.get(n, {}).get(key)) for key, kind in kinds[n].items()}
            for n in sorted(kinds)
        }
        groups = [
            {**group, "params": numbers}
            for group, numbers in zip(state["param_groups"], self._groups, strict=True)
        ]
        return {**state, "state": whole, "param_groups": groups}

    def wanted(self, own: Wanted, place: str, shape: tuple[int, ...]) -> range | Region | None:
        """Which part of a saved tensor of the optimizer this rank wants; None: all of it.

        Args:
            own: Says so of a place in this stage's own optimizer.
            place: Such as `state/0/exp_avg`.
            shape: Of the tensor.
        """
        first, _, rest = place.partition("/")
        number, _, key = rest.partition("/")
        if first != "state" or not number.isdecimal():
            return None
        if int(number) not in self._numbers:
            return range(0)
        return own(f"state/{self._numbers.index(int(number))}/{key}", shape)

    def own_optimizer(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """This stage's optimizer state out of the whole's.

        Raises:
            ConfigError: it has other groups.
        """
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        if sizes != [len(group) for group in self._groups]:
            raise ConfigError(
                f"the optimizer's state has groups of {sizes} parameters, and the optimizers of "
                f"all stages together have {[len(group) for group in self._groups]}; make them of "
                "the same groups"
            )
        own = set(self._numbers)
        place = {number: n for n, number in enumerate(self._numbers)}
        state = {
            place[n]: {key: _tensor_in(value) for key, value in values.items()}
            for n, values in saved["state"].items()
            if n in own
        }
        groups = [
            {**group, "params": sorted(place[n] for n in numbers if n in own)}
            for group, numbers in zip(saved["param_groups"], self._groups, strict=True)
        ]
        return {**saved, "state": state, "param_groups": groups}


def _join_groups(cut: Cut, everyone: Sequence[list[list[str]]]) -> list[list[str]]:
    """The groups of one optimizer over the whole model. Pure."""
    order = {name: n for n, name in enumerate(cut.parameters)}
    joined: list[list[str]] = []
    for groups in zip(*everyone, strict=True):
        names = {cut.first_names[name] for group in groups for name in group}
        joined.append(sorted(names, key=order.__getitem__))
    return joined


def _trouble_with_order(names: Sequence[str], groups: Sequence[Sequence[str]]) -> str | None:
    """Why one process could not have this optimizer's state, in words; None: it could. Pure."""
    order = {name: n for n, name in enumerate(names)}
    for group in groups:
        if list(group) != sorted(group, key=order.__getitem__):
            return (
                "the optimizer has its parameters in another order than the model; give it them "
                "in the order of model.parameters() in each group"
            )
    return None


def _all_of(tensor: Tensor | Piece) -> Piece:
    if isinstance(tensor, Piece):
        return tensor
    return Piece(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))


def _kind_of(value: Any) -> Any:
    if isinstance(value, Piece):
        return _TensorKind(tuple(value.shape), value.tensor.dtype)
    return _TensorKind(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _piece(kind: Any, held: Any) -> Any:
    if not isinstance(kind, _TensorKind):
        return kind
    return kind.nothing() if held is None else _all_of(held)


def _tensor_in(value: Any) -> Any:
    """A piece that is all of a tensor, as a tensor."""
    is_all = isinstance(value, Piece) and tuple(value.tensor.shape) == tuple(value.shape)
    return value.tensor if is_all else value
