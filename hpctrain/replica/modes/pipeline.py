"""Gradients of a model in stages: a stage's are averaged over the data dimension, through an arena.

Forward and backward are one pass, which the pipeline's runner makes. What stages have in common,
tied weights and the norm, is summed over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.precision import sum_of_squares
from hpctrain.replica.modes.arena import ArenaMode

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.fusion import Arrived
    from hpctrain.pipeline import PipelineRunner, PreparedBatch, StageState
    from hpctrain.replica.control_words import ControlWords

__all__ = ["PipelineMode", "StagedPass"]

_LEARN = "a pipeline has no loss before its backward; use replica.learn(loss_fn, x, y)"


class StagedPass:
    """A batch that waits for its pass through the stages; its loss is known afterwards.

    Args:
        runner: What runs it.
        batch: What all ranks have agreed to run.
    """

    def __init__(self, runner: PipelineRunner, batch: PreparedBatch) -> None:
        self._runner = runner
        self._batch = batch
        self.loss = torch.zeros((), device=runner.grid.world.device)

    def run(self, factor: float | Tensor) -> None:
        """Collective over the stages: forward and backward; gradients times a factor."""
        self.loss = self._runner.run(self._batch, factor=factor)


class PipelineMode(ArenaMode):
    """How a replica treats the gradients of one stage.

    Args:
        engine: Over the ranks that hold the same stage.
        names: Of the stage's parameters.
        parameters: Themselves.
        runner: What runs the stages.
        state: Where this stage's state is in a checkpoint.
    """

    needs_every_pass = True
    plain_refusal = f"loss.backward() with a model in stages: {_LEARN}"
    backward_refusal = f"replica.backward(loss) with a model in stages: {_LEARN}"

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        runner: PipelineRunner,
        state: StageState,
    ) -> None:
        super().__init__(engine, names, parameters, bucket_bytes=None, overlap=False)
        self.runner: PipelineRunner = runner
        self.state = state
        self._elsewhere = frozenset(
            index for index, p in enumerate(parameters) if id(p) in runner.ties.elsewhere
        )

    def exchange(self, control: ControlWords) -> Arrived:
        """Collective: complete the gradients of tied weights, and sum all over the data ranks."""
        self.runner.ties.sum_gradients()
        return super().exchange(control)

    def hide_unused(self, used: frozenset[int] | None) -> None:
        """Collective over the stages with tied weights: what no rank has used has no gradient."""
        indices = frozenset(range(len(self.parameters))) if used is None else used
        mine = frozenset(id(self.parameters[index]) for index in indices)
        found = self.runner.ties.used_anywhere(mine)
        super().hide_unused(
            frozenset(index for index, p in enumerate(self.parameters) if id(p) in found)
        )

    def norm_squared(self, excluded: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Collective over the stages: sums of squares of all of them, tied weights once."""
        device = self.arena.parameters[0].device
        kept = self.arena.runs(excluded | self._elsewhere)[0]
        left = self.arena.runs(excluded - self._elsewhere)[1]
        sums = torch.stack([sum_of_squares(kept, device), sum_of_squares(left, device)])
        return tuple(self.runner.sum_over_stages(sums).unbind())  # type: ignore[return-value]

    def each_alone(self) -> NoReturn:
        """Refused: a rank that has left would not run its stage.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "replica.join() with a model in stages: all stages must run together; give every rank "
            "the same number of batches (a Loader does), with num_samples=0 for an empty one"
        )

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what was chosen."""
        runner = self.runner
        cut = runner.model.hpctrain_cut
        rows: list[tuple[str, str]] = [
            *cut.describe(),
            ("schedule", f"{runner.schedule}, {runner.micro_batches} micro-batches"),
        ]
        if cut.ties:
            names = "; ".join(" = ".join(tie.names.values()) for tie in cut.ties[:3])
            rows.append(("tied weights", f"{len(cut.ties)}: {names}"))
        return [*rows, *super().describe()]

    def close(self) -> None:
        """Take the hooks away. Collective over the stages where weights are tied."""
        super().close()
        self.runner.close()

    def prepare(
        self,
        loss_fn: Callable[..., Tensor],
        inputs: Sequence[Any],
        target: Any,
        named: dict[str, Any],
        *,
        num_samples: int | None,
        rates: tuple[float | Tensor, ...],
    ) -> StagedPass:
        """Collective: see that all ranks can run a batch, before anything is sent.

        Args:
            loss_fn: As in `replica.learn`.
            inputs: As in `replica.learn`.
            target: As in `replica.learn`.
            named: As in `replica.learn`.
            num_samples: 0: the batch counts nothing, and is not run.
            rates: The optimizer's, which must be the same in all stages.

        Raises:
            ConfigError: on all ranks.
        """
        refuse_named(named)
        if num_samples == 0 and all(isinstance(one, Tensor) for one in (*inputs, target)):
            inputs, target = [one[:0] for one in inputs], target[:0]
        settings = f"num_samples={num_samples}, learning rates {[float(r) for r in rates]}, "
        return StagedPass(
            self.runner, self.runner.prepare(loss_fn, inputs, target, settings=settings)
        )

    def evaluate(self, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Collective over the stages: what the model gives, without gradients.

        Raises:
            ConfigError: gradients are enabled, or an input has a name.
        """
        if torch.is_grad_enabled():
            raise ConfigError(
                f"replica(x) with a model in stages gives no graph: {_LEARN}; to evaluate, call "
                "replica(x) under torch.no_grad()"
            )
        refuse_named(named)
        return self.runner.evaluate(*arguments)


def refuse_named(named: dict[str, Any]) -> None:
    """Refuse inputs by name: only tensors by position are cut into micro-batches.

    Raises:
        ConfigError: there is one.
    """
    if named:
        raise ConfigError(
            f"{', '.join(named)} given by name; a pipeline cuts inputs that are given by position"
        )
