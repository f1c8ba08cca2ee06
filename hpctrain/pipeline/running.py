"""A pipeline at work: a batch goes through all stages and comes back as gradients.

Every call is checked on all ranks before anything is sent, so that all of them raise together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.engines import Op
from hpctrain.errors import ConfigError
from hpctrain.grid import DIMENSIONS
from hpctrain.pieces import is_sharded
from hpctrain.pipeline.cutting import StageModel
from hpctrain.pipeline.failing import Called, Failures
from hpctrain.pipeline.flow import SCHEDULES, Flow, FlowKey, Flows, Place
from hpctrain.pipeline.loss_means import LossMeans
from hpctrain.pipeline.micro_batches import (
    Run,
    check_micro_batches,
    divide_batch,
    num_rows_of,
    rows_of,
    trouble_with_batch,
)
from hpctrain.pipeline.shapes import (
    TensorFacts,
    look_at_loss,
    look_at_stage,
    signature_of,
    trouble_with_parameters,
)
from hpctrain.pipeline.ties import TiedWeights
from hpctrain.world import agree

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.grid import Grid

__all__ = ["PipelineRunner", "PreparedBatch"]

Call = Callable[[nn.Module, tuple[Any, ...]], Any]
LossFn = Callable[[Any, Any], Tensor]
_SAMPLED = 64
_LOOKS_ON_GPU = 3
_ONE_ROW = Run(0, 1, 1)


class _Shapes(NamedTuple):
    """What travels for one shape of micro-batch."""

    inputs: tuple[TensorFacts, ...]
    """Into this rank's stage."""
    outputs: tuple[TensorFacts, ...]
    """Out of it."""
    result: tuple[TensorFacts, ...]
    """Out of the last stage."""


class PreparedBatch(NamedTuple):
    """A batch that all ranks have agreed to run."""

    runs: tuple[Run, ...]
    loss_fn: LossFn
    inputs: tuple[Tensor, ...]
    target: Tensor


class PipelineRunner:
    """Collective: runs one rank's stage of a model, in step with the other stages.

    Args:
        grid: The ranks; its `pipeline` dimension has as many as there are stages.
        model: This rank's stage, from `cut_model`.
        micro_batches: Into how many parts a batch is cut.
        schedule: `1f1b`, which holds the activations of at most as many micro-batches as there are
            stages, or `gpipe`, which holds all of them. The gradients are the same.
        call: How a module is run: in the precision that was chosen.
        gathered: Collective over the data dimension: has the stage's weights inside, where torch
            has sharded them; None: they are there. All data coordinates then evaluate equally
            often.

    Raises:
        ConfigError: on all ranks; the arguments do not fit each other.
    """

    def __init__(
        self,
        grid: Grid,
        model: StageModel,
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        call: Call = lambda module, arguments: module(*arguments),
        gathered: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        check_micro_batches(micro_batches)
        if schedule not in SCHEDULES:
            raise ConfigError(f"schedule={schedule!r}; choose {' or '.join(SCHEDULES)}")
        if not isinstance(model, StageModel):
            raise ConfigError(
                f"the grid has pipeline={grid.pipeline} and the model is {type(model).__name__}, "
                "which is not cut into stages; give what split(grid, model, stages=...) returns"
            )
        self.grid = grid
        self.model = model
        self.micro_batches = micro_batches
        self.schedule = schedule
        self._call = call
        self._gathered = gathered
        self._place = Place(
            stage=grid.coordinate.pipeline,
            num_stages=grid.pipeline,
            group=grid.group("pipeline"),
            device=grid.world.device,
        )
        self._failures = Failures(
            grid.world.rank,
            grid.coordinate.pipeline,
            model.hpctrain_cut.names_of(model.hpctrain_stage),
        )
        self._engine = grid.engine("pipeline")
        self.ties = TiedWeights(self._engine, model)
        self._flows = Flows(self._make_flow)
        self._shapes: dict[tuple[tuple[TensorFacts, ...], bool], _Shapes] = {}
        self._parameters = signature_of(model)
        self._loss_fn: LossFn | None = None
        self._factor: float | Tensor = 1.0
        self._losses: list[Tensor] = []
        self._means = LossMeans()
        self._num_looks = 0

    # Training

    def forward_backward(
        self,
        loss_fn: LossFn,
        inputs: Sequence[Tensor],
        target: Tensor,
        *,
        factor: float | Tensor = 1.0,
    ) -> Tensor:
        """Collective: add this batch's gradients to `p.grad`; the mean loss of its samples.

        The gradients are those of `factor * loss_fn(model(*inputs), target)` on one process, for a
        loss that is a mean over its rows. Those of tied weights are this stage's part:
        `ties.sum_gradients()` completes them.

        Args:
            loss_fn: Called on the last stage with each micro-batch's output and target.
            inputs: The model's inputs; the same on all ranks of one data coordinate.
            target: The same on all ranks of one data coordinate.
            factor: What the gradients are multiplied by.

        Returns:
            The loss, on all ranks; 0 for a batch without rows.

        Raises:
            ConfigError: on all ranks, before anything is sent.
        """
        return self.run(self.prepare(loss_fn, inputs, target), factor=factor)

    def prepare(
        self, loss_fn: LossFn, inputs: Sequence[Tensor], target: Tensor, *, settings: str = ""
    ) -> PreparedBatch:
        """Collective: check a batch on all ranks; what `run` then does cannot be refused.

        Args:
            loss_fn: As in `forward_backward`.
            inputs: As in `forward_backward`.
            target: As in `forward_backward`.
            settings: What else must be the same on all stages, in words.
        """
        trouble = trouble_with_batch(inputs, target)
        runs = self._admit(trouble, inputs, target, loss_fn, settings)
        return PreparedBatch(runs, loss_fn, tuple(inputs), target)

    def run(self, batch: PreparedBatch, *, factor: float | Tensor = 1.0) -> Tensor:
        """Collective: add a batch's gradients to `p.grad`; its mean loss.

        Raises:
            StageError: on all ranks; the model or the loss function raised in some stage, or the
                loss is no mean over its rows.
        """
        self._failures.begin()
        total = torch.zeros((), dtype=torch.float64, device=self._place.device)
        num_rows = num_rows_of(batch.inputs)
        for run in batch.runs:
            share = run.size / num_rows
            self._loss_fn, self._factor, self._losses = batch.loss_fn, factor * share, []
            try:
                self._learn(run, batch.inputs, batch.target)
            finally:
                self._loss_fn = None
            for loss in self._losses:
                total += loss.double() * share
        if self._place.num_stages > 1 and batch.runs:
            self._engine.broadcast_(total, self._place.num_stages - 1, what="the loss")
        self._failures.settle(self.grid.world.comm)
        return total

    def _learn(self, run: Run, inputs: Sequence[Tensor], target: Tensor) -> None:
        given = rows_of(inputs, run.start, run.stop)
        wanted = target[run.start : run.stop]
        if self._place.num_stages > 1:
            flow = self._flows.take(FlowKey(_micro_facts(given, run), run.num, trains=True))
            flow.learn(given, wanted)
            return

        def learn_rows(rows: slice) -> None:
            output = self._call(self.model, tuple(one[rows] for one in given))
            torch.autograd.backward(self._weighed_loss(output, wanted[rows]))

        for n in range(run.num):
            rows = slice(n * run.size, (n + 1) * run.size)
            self._failures.attempt("forward", partial(learn_rows, rows), lambda: None, given)

    def _weighed_loss(self, output: Any, target: Tensor) -> Tensor:
        """What torch differentiates for one micro-batch; zero where the user's function raised."""
        if self._loss_fn is None:
            raise ConfigError("a pipeline's loss was asked for outside forward_backward")
        zero = torch.zeros((), device=self._place.device, requires_grad=True)
        compute = partial(self._loss_of, self._loss_fn, output, target)
        loss = self._failures.attempt("loss", compute, lambda: zero)
        self._losses.append(loss.detach().reshape(()))
        return loss * self._factor

    def _loss_of(self, loss_fn: LossFn, output: Any, target: Tensor) -> Tensor:
        loss = loss_fn(output, target)
        self._means.check(loss_fn, output, target, loss)
        return loss

    # Evaluation

    def evaluate(self, *inputs: Tensor) -> Any:
        """Collective over the stages: what the model gives for a batch of any size, on all ranks.

        Without gradients, and in the mode that the modules are in (`train()`, `eval()`). Over the
        data dimension too, where the stage is sharded; a data coordinate that has run out of
        batches then gives one without rows.

        Raises:
            ConfigError: on all ranks of this data coordinate, before anything is sent.
            StageError: on the same ranks; the model raised in some stage.
        """
        trouble = trouble_with_batch(inputs)
        is_empty = trouble is None and num_rows_of(inputs) == 0
        if is_empty and self._gathered is None:
            trouble = "the batch has no rows; leave it out"
        runs = self._admit(trouble, inputs, None, None)
        self._failures.begin()
        with self._gathered() if self._gathered is not None else nullcontext():
            parts = [self._evaluate(run, inputs) for run in runs]
        self._failures.settle(self._batch_comm if self._gathered is None else self.grid.world.comm)
        joined = (
            [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
            if runs
            else self._no_rows(inputs)
        )
        return joined[0] if len(joined) == 1 else tuple(joined)

    def _no_rows(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the model gives for a batch without rows."""
        shapes = self._shapes[_micro_facts(inputs, _ONE_ROW), False]
        return [
            torch.empty((0, *one.shape[1:]), dtype=one.dtype, device=self._place.device)
            for one in shapes.result
        ]

    def _evaluate(self, run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = rows_of(inputs, run.start, run.stop)
        if self._place.num_stages == 1:
            with torch.no_grad():
                parts = [
                    _as_list(self._call(self.model, rows_of(given, n, n + run.size)))
                    for n in range(0, run.size * run.num, run.size)
                ]
            return [_undivided(torch.cat(pieces)) for pieces in zip(*parts, strict=True)]
        facts = _micro_facts(given, run)
        output = self._flows.take(FlowKey(facts, run.num, trains=False)).evaluate(given)
        found = []
        for number, one in enumerate(self._shapes[facts, False].result):
            shape = (one.shape[0] * run.num, *one.shape[1:])
            whole = torch.empty(shape, dtype=one.dtype, device=self._place.device)
            if self._place.is_last:
                whole.copy_(_undivided(_as_list(output)[number]))
            self._engine.broadcast_(whole, self._place.num_stages - 1, what="an output")
            found.append(whole)
        return found

    # Norms

    def norm_squared(self) -> Tensor:
        """Collective over the stages: the sum of squares of all gradients, tied ones once."""
        gradients = [
            p.grad
            for p in self.model.parameters()
            if p.grad is not None and id(p) not in self.ties.elsewhere
        ]
        total = torch.zeros((), dtype=torch.float64, device=self._place.device)
        for gradient in gradients:
            total += gradient.detach().double().square().sum()
        return self.sum_over_stages(total)

    def sum_over_stages(self, values: Tensor) -> Tensor:
        """Collective over the stages: small sums that each has made of what it holds."""
        if self._place.num_stages == 1:
            return values
        wide = values.double()
        self._engine.allreduce_(wide, Op.SUM, what="sums over the stages")
        return wide.to(values.dtype)

    # Before anything is sent

    def _admit(
        self,
        trouble: str | None,
        inputs: Sequence[Tensor],
        target: Tensor | None,
        loss_fn: LossFn | None,
        settings: str = "",
    ) -> tuple[Run, ...]:
        """Collective: check a batch on all ranks, and find the shapes that are not known yet.

        In training over the whole grid, in evaluation over the stages alone where these have their
        weights: there data coordinates may have different numbers of batches.
        """
        trains = loss_fn is not None
        is_whole = trains or self._gathered is not None
        everyone = self.grid.comm(*DIMENSIONS) if is_whole else self._batch_comm
        now = signature_of(self.model)
        if trouble is None:
            trouble = trouble_with_parameters(self._parameters, now)
        runs = () if trouble else divide_batch(num_rows_of(inputs), self.micro_batches)
        looked = runs or (() if trains or trouble else (_ONE_ROW,))
        wanted = [_micro_facts(rows_of(inputs, run.start, run.stop), run) for run in looked]
        is_changed = now != self._parameters
        is_known = all((facts, trains) in self._shapes for facts in wanted) and not is_changed
        batch = (*inputs, target) if target is not None else tuple(inputs)
        told = "" if trouble else f"{settings}{self._describe(batch)}"
        fine, known = self._compare(is_whole, trouble is None, told, is_known)
        if not fine:
            trouble = self._differences(trouble, told)
            agree(everyone, trouble, error=ConfigError)
        if not known:
            if self._any(is_changed):
                self._flows.clear()
                self._shapes.clear()
                self._parameters = now
            trouble = self._frozen_in_part()
            for facts in wanted:
                trouble = trouble or self._find_shapes(facts, target, loss_fn)
            agree(everyone, trouble, error=ConfigError)
        return runs

    @property
    def _batch_comm(self) -> Comm:
        """The ranks that are given the same batch: those of one data coordinate."""
        return self.grid.comm(*(("pipeline", "tensor") if self.grid.tensor > 1 else ("pipeline",)))

    def _compare(self, is_whole: bool, fine: bool, told: str, known: bool) -> tuple[bool, bool]:
        """Collective: whether all have the same batch and no trouble, and know its shapes."""
        from mpi4py import MPI

        digest = zlib.crc32(told.encode())
        words = np.array([digest, -digest, fine, known], dtype=np.int64)
        self._batch_comm.Allreduce(MPI.IN_PLACE, words, op=MPI.MIN)
        both = np.array([words[2] and words[0] == -words[1], words[3]], dtype=np.int64)
        if is_whole and self.grid.data > 1:
            self.grid.comm("data").Allreduce(MPI.IN_PLACE, both, op=MPI.MIN)
        return bool(both[0]), bool(both[1])

    def _any(self, is_so: bool) -> bool:
        """Collective over the ranks of one data coordinate."""
        told: list[bool] = self._batch_comm.allgather(is_so)
        return any(told)

    def _frozen_in_part(self) -> str | None:
        """Collective over the stages: which tied weights learn in some stages only, in words."""
        own = {name: p.requires_grad for name, p in self.model.named_parameters()}
        learns: list[dict[str, bool]] = self.grid.comm("pipeline").allgather(
            {name: own[name] for name in self.model.tied_names if name in own}
        )
        for tie in self.model.hpctrain_cut.ties:
            by_stage = {stage: learns[stage].get(name) for stage, name in tie.names.items()}
            frozen = [stage for stage, one in by_stage.items() if one is False]
            others = [stage for stage, one in by_stage.items() if one]
            if frozen and others:
                return (
                    f"{' = '.join(tie.names.values())} is frozen in stage {frozen[0]} and not in "
                    f"stage {others[0]}; freeze it in all stages, or in none"
                )
        return None

    def _differences(self, trouble: str | None, told: str) -> str | None:
        """Collective over the stages: this rank's trouble, or how their batches differ."""
        everyone: list[str] = self._batch_comm.allgather(told)
        if "" in everyone or len(set(everyone)) == 1:
            return trouble
        shapes = [one.partition(" with ")[0] for one in everyone]
        if len(set(shapes)) > 1:
            return (
                f"stage {self._place.stage} was given {told.partition(' with ')[0]}; all stages of "
                "one data coordinate must be given the same batch: make the loader with grid=grid"
            )
        return (
            "the stages of one data coordinate were given batches of the same shape and different "
            "contents; make the loader with grid=grid"
        )

    def _describe(self, batch: Sequence[Tensor]) -> str:
        """A batch in words, with a digest of some of its elements."""
        shapes = ", ".join(
            f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in batch
        )
        on_gpu = any(one.device.type != "cpu" for one in batch)
        self._num_looks += 1
        if on_gpu and self._num_looks > _LOOKS_ON_GPU:  # a look waits for the device
            return shapes
        digest = 0
        for one in batch:
            flat = one.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
            digest = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), digest)
        return f"{shapes} with {digest}"

    def _find_shapes(
        self, facts: tuple[TensorFacts, ...], target: Tensor | None, loss_fn: LossFn | None
    ) -> str | None:
        """Collective over the stages: what each gets and gives; why not, in words."""
        trains, place = loss_fn is not None, self._place
        comm: Comm = self.grid.comm("pipeline")
        given, mine = facts, facts
        trouble: str | None = None
        for stage in range(place.num_stages):
            told: tuple[tuple[TensorFacts, ...], str | None] = ((), None)
            if stage == place.stage:
                mine = given
                told = self._look(given, trains=trains)
                if loss_fn and target is not None and place.is_last and told[1] is None:
                    one = _one_target(target, facts)
                    told = told[0], look_at_loss(loss_fn, told[0], one, place.device)
            given, trouble = comm.bcast(told, root=stage)
            if trouble is not None:
                layers = ", ".join(self.model.hpctrain_cut.names_of(stage)[:3])
                return f"stage {stage} ({layers}): {trouble}"
            if stage == place.stage:
                outputs = given
        self._shapes[facts, trains] = _Shapes(mine, outputs, given)
        return None

    def _look(
        self, given: Sequence[TensorFacts], *, trains: bool
    ) -> tuple[tuple[TensorFacts, ...], str | None]:
        with torch.set_grad_enabled(trains):
            return look_at_stage(
                self.model.skeleton,
                given,
                self._place.device,
                call=self._call,
                is_last=self._place.is_last,
            )

    def _make_flow(self, key: FlowKey) -> Flow:
        shapes, device = self._shapes[key.batch, key.trains], self._place.device
        run = partial(self._call, self.model)
        return Flow(
            Called(run, self._failures, shapes.outputs, device),
            self._place,
            key,
            shapes.inputs,
            shapes.outputs,
            self.schedule,
            self._weighed_loss,
            self._failures,
        )

    def close(self) -> None:
        """Collective over the stages: give back what it holds."""
        self._flows.clear()
        self.ties.close()


def _undivided(output: Tensor) -> Tensor:
    """Scores that ranks hold by classes, put together. Collective over the tensor dimension."""
    return cast("Any", output).full_tensor() if is_sharded(output) else output


def _as_list(output: Any) -> list[Tensor]:
    return list(output) if isinstance(output, tuple | list) else [output]


def _micro_facts(inputs: Sequence[Tensor], run: Run) -> tuple[TensorFacts, ...]:
    return tuple(
        TensorFacts((run.size, *one.shape[1:]), one.dtype, requires_grad=False) for one in inputs
    )


def _one_target(target: Tensor, facts: Sequence[TensorFacts]) -> TensorFacts:
    """A micro-batch's target."""
    return TensorFacts((facts[0].shape[0], *target.shape[1:]), target.dtype, requires_grad=False)
