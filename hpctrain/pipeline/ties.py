"""Parameters that several stages hold: their gradients are summed, so that they stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.pieces import local_tensor, place_like
from hpctrain.pipeline.cutting import StageModel

if TYPE_CHECKING:
    from hpctrain.engines import Engine

__all__ = ["TiedWeights"]


class _Shared(NamedTuple):
    """Parameters that the same stages hold, in the same order on each of them."""

    engine: Engine
    parameters: list[nn.Parameter]


class TiedWeights:
    """Collective over the pipeline: the tied parameters of one rank's stage; they become equal.

    Args:
        engine: Over the stages.
        model: This rank's stage.
    """

    def __init__(self, engine: Engine, model: StageModel) -> None:
        self._groups: list[_Shared] = []
        self.elsewhere: frozenset[int] = frozenset()
        """Parameters, by `id`, that another stage counts where they must be counted once."""
        stage, ties = model.hpctrain_stage, model.hpctrain_cut.ties
        named = dict(model.named_parameters(remove_duplicate=False))
        self.elsewhere = frozenset(
            id(named[tie.names[stage]]) for tie in ties if stage in tie.names and tie.owner != stage
        )
        for holders in sorted({tuple(sorted(tie.names)) for tie in ties}):
            part = engine.split(0 if stage in holders else None)
            if part is not None:
                own = [
                    named[tie.names[stage]] for tie in ties if tuple(sorted(tie.names)) == holders
                ]
                self._groups.append(_Shared(part, own))
                for parameter in own:
                    part.broadcast_(local_tensor(parameter.detach()), what="tied weights")

    def sum_gradients(self) -> None:
        """Collective over the stages that hold them: add up what each has found.

        A parameter that no stage has used keeps no gradient at all.
        """
        for engine, parameters in self._groups:
            used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
            engine.allreduce_(used, what="which tied weights were used")
            wanted = [p for p, count in zip(parameters, used.tolist(), strict=True) if count]
            for alike in _by_kind(wanted):
                _sum_fused(engine, alike)

    def used_anywhere(self, used: frozenset[int]) -> frozenset[int]:
        """Collective over the stages that hold them: what some stage has used, by `id`.

        Args:
            used: What this stage has.
        """
        found = set(used)
        for engine, parameters in self._groups:
            marks = torch.tensor([id(p) in used for p in parameters], dtype=torch.int32)
            engine.allreduce_(marks, what="which tied weights were used")
            found |= {id(p) for p, n in zip(parameters, marks.tolist(), strict=True) if n}
        return frozenset(found)

    def close(self) -> None:
        """Collective: give back what the groups hold."""
        for group in self._groups:
            group.engine.close()
        self._groups = []


def _by_kind(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(found.values())


def _sum_fused(engine: Engine, parameters: Sequence[nn.Parameter]) -> None:
    """One message for all of them."""
    with torch.no_grad():
        flat = torch.cat([_gradient(p).reshape(-1) for p in parameters])
        engine.allreduce_(flat, what="gradients of tied weights")
        held = [local_tensor(p.detach()) for p in parameters]
        parts = torch.split(flat, [one.numel() for one in held])
        for parameter, local, part in zip(parameters, held, parts, strict=True):
            if parameter.grad is None:
                parameter.grad = place_like(part.view_as(local).clone(), parameter)
            else:
                local_tensor(parameter.grad).copy_(part.view_as(local))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of it: the stages divide a tied weight in the same way."""
    if parameter.grad is None:
        return torch.zeros_like(local_tensor(parameter.detach()))
    gradient = local_tensor(parameter.grad)
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient
