"""The stages of a model, as a part that a mode carries: one pass for forward and backward.

How the gradients of one stage are summed over its data ranks is the mode's affair. What stages have
in common is here: the pass through all of them, tied weights, norms, and where a stage's state is
in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.pipeline import PipelineRunner, PreparedBatch, StageState

__all__ = ["StagedPass", "Stages"]

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


class Stages:
    """The stages of a model, of which this rank has one.

    Args:
        runner: What runs them.
        state: Where this stage's state is in a checkpoint.
        parameters: Of this stage, as the mode has them.
    """

    plain_refusal = f"loss.backward() with a model in stages: {_LEARN}"
    backward_refusal = f"replica.backward(loss) with a model in stages: {_LEARN}"
    join_refusal = (
        "replica.join() with a model in stages: all stages must run together; give every rank "
        "the same number of batches (a Loader does), with num_samples=0 for an empty one"
    )

    def __init__(
        self,
        runner: PipelineRunner,
        state: StageState,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self.state = state
        self._runner = runner
        self._parameters = tuple(parameters)
        self.elsewhere = frozenset(
            index for index, p in enumerate(parameters) if id(p) in runner.ties.elsewhere
        )
        """Parameters, by index, that another stage counts where they must be counted once."""

    # What stages have in common

    def sum_tied(self) -> None:
        """Collective over the stages with tied weights: complete their gradients."""
        self._runner.ties.sum_gradients()

    def used_anywhere(self, used: frozenset[int] | None) -> frozenset[int]:
        """Collective over the stages with tied weights: what some stage has used, by index.

        Args:
            used: What this stage has, over its data ranks; None: all of it.
        """
        indices = frozenset(range(len(self._parameters))) if used is None else used
        found = self._runner.ties.used_anywhere(
            frozenset(id(self._parameters[index]) for index in indices)
        )
        return frozenset(index for index, p in enumerate(self._parameters) if id(p) in found)

    def sum_over(self, sums: Tensor) -> Tensor:
        """Collective over the stages: small sums that each has made of what it holds."""
        return self._runner.sum_over_stages(sums)

    # Batches

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
            self._runner, self._runner.prepare(loss_fn, inputs, target, settings=settings)
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
        return self._runner.evaluate(*arguments)

    # Reports

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say which stages there are, and how they are run."""
        runner = self._runner
        cut = runner.model.hpctrain_cut
        rows: list[tuple[str, str]] = [
            *cut.describe(),
            ("schedule", f"{runner.schedule}, {runner.micro_batches} micro-batches"),
        ]
        if cut.ties:
            names = "; ".join(" = ".join(tie.names.values()) for tie in cut.ties[:3])
            rows.append(("tied weights", f"{len(cut.ties)}: {names}"))
        return rows

    def close(self) -> None:
        """Collective over the stages where weights are tied: give back what it holds."""
        self._runner.close()


def refuse_named(named: dict[str, Any]) -> None:
    """Refuse inputs by name: only tensors by position are cut into micro-batches.

    Raises:
        ConfigError: there is one.
    """
    if named:
        raise ConfigError(
            f"{', '.join(named)} given by name; a pipeline cuts inputs that are given by position"
        )
