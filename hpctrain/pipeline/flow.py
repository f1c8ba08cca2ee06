"""torch's stage and schedule for micro-batches of one shape, all shapes given.

What is new here is only what torch is told: nothing is inferred by running the modules, gradients
are not divided by the number of micro-batches, and the loss of a micro-batch is weighed by us.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils._pytree import tree_map_only

from hpctrain.pipeline.failing import Failures, arrived, zeros_like_facts
from hpctrain.pipeline.shapes import TensorFacts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SCHEDULES", "Flow", "FlowKey", "Flows", "Place"]


class _GPipe(ScheduleGPipe):
    """As torch's, which from 2.7 to 2.12 refuses fewer micro-batches than stages, without need."""

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: Any) -> None:
        super().__init__(stage, max(n_microbatches, stage.num_stages), **options)
        self._n_microbatches = n_microbatches


SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {
    "1f1b": Schedule1F1B,
    "gpipe": _GPipe,
}
_MOST_FLOWS = 8
# Torch before 2.7 never divides gradients by the number of micro-batches.
_SCALE_NO_GRADIENTS: dict[str, Any] = (
    {"scale_grads": False}
    if "scale_grads" in inspect.signature(PipelineScheduleSingle).parameters
    else {}
)
# Older ones keep the outputs of the last stage until the next step.
_KEEP_NO_OUTPUTS: dict[str, Any] = (
    {"return_outputs": False}
    if "return_outputs" in inspect.signature(PipelineScheduleSingle.step).parameters
    else {}
)


class Place(NamedTuple):
    """Where this rank is in a pipeline."""

    stage: int
    num_stages: int
    group: ProcessGroup
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether the batch enters here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.num_stages - 1


class FlowKey(NamedTuple):
    """What makes one flow another than the next; the same on all stages."""

    batch: tuple[TensorFacts, ...]
    """One micro-batch as it enters the first stage."""
    num: int
    """How many micro-batches."""
    trains: bool
    """Whether there is a backward pass."""


class _Stage(PipelineStage):
    """Torch's, with a backward pass that does not raise while other stages wait for it.

    Torch 2.9 sends its first messages to the neighbours in two dtypes; here they have one.
    """

    failures: Failures
    inputs: tuple[TensorFacts, ...]

    def backward_one_chunk(self, bwd_chunk_id: int, *given: Any, **named: Any) -> None:
        """Differentiate one micro-batch; where that fails, the stage before gets zeros."""
        self.failures.attempt(
            "backward",
            partial(self._differentiate, bwd_chunk_id, *given, **named),
            partial(self._send_zeros, bwd_chunk_id),
        )

    def _differentiate(self, bwd_chunk_id: int, *given: Any, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *given, **named)
        found = self.bwd_cache.get(bwd_chunk_id, ())
        self.bwd_cache[bwd_chunk_id] = tree_map_only(Tensor, arrived, found)

    def _send_zeros(self, bwd_chunk_id: int) -> None:
        self.fwd_cache.pop(bwd_chunk_id, None)
        zeros = zeros_like_facts(self.inputs, self.device)
        self.bwd_cache[bwd_chunk_id] = tuple(
            one.detach() if one.requires_grad else None for one in zeros
        )

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        ops: list[Any] = super()._get_init_p2p_neighbors_ops()
        for op in ops:
            op.tensor = op.tensor.float().reshape(1)
        return ops


class Flow:
    """One shape of micro-batches on its way through the stages.

    Args:
        module: What this rank runs.
        place: Where this rank is.
        key: Shape and number of the micro-batches.
        inputs: What this stage gets.
        outputs: What it gives.
        schedule: `1f1b` or `gpipe`.
        loss: Called with a micro-batch's output and target, on the last stage.
        failures: Where exceptions of a backward pass are noted.
    """

    def __init__(
        self,
        module: nn.Module,
        place: Place,
        key: FlowKey,
        inputs: Sequence[TensorFacts],
        outputs: Sequence[TensorFacts],
        schedule: str,
        loss: Callable[[Any, Any], Tensor],
        failures: Failures,
    ) -> None:
        self.place = place
        stage = _Stage(
            module,
            place.stage,
            place.num_stages,
            place.device,
            input_args=tuple(facts.on_meta() for facts in inputs),
            output_args=tuple(facts.on_meta() for facts in outputs),
            group=place.group,
        )
        stage.failures, stage.inputs = failures, tuple(inputs)
        # With fewer micro-batches than stages the two schedules are the same.
        chosen = SCHEDULES[schedule if key.num >= place.num_stages else "gpipe"]
        if not key.trains:
            chosen = _GPipe
        self._schedule = chosen(
            stage, key.num, loss_fn=loss if key.trains else None, **_SCALE_NO_GRADIENTS
        )

    def learn(self, inputs: Sequence[Tensor], target: Tensor) -> None:
        """Collective over the stages: forward and backward of all micro-batches."""
        given = inputs if self.place.is_first else ()
        self._schedule.step(
            *given, target=target if self.place.is_last else None, **_KEEP_NO_OUTPUTS
        )

    def evaluate(self, inputs: Sequence[Tensor]) -> Any:
        """Collective over the stages: forward alone; what comes out, on the last stage."""
        with torch.no_grad():
            return self._schedule.step(*(inputs if self.place.is_first else ()))


class Flows:
    """The flows of one rank, made when they are first needed; the least used ones are dropped.

    Each holds buffers for what it receives. All ranks of a pipeline need the same ones in the same
    order, so they keep and drop the same ones.
    """

    def __init__(self, make: Callable[[FlowKey], Flow]) -> None:
        self._make = make
        self._held: OrderedDict[FlowKey, Flow] = OrderedDict()

    def take(self, key: FlowKey) -> Flow:
        """The flow for these shapes."""
        flow = self._held.pop(key, None) or self._make(key)
        self._held[key] = flow
        while len(self._held) > _MOST_FLOWS:
            self._held.popitem(last=False)
        return flow

    def clear(self) -> None:
        """Forget all of them."""
        self._held.clear()
