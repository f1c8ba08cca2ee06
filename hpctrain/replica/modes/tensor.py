"""Gradients of a model with divided layers: averaged over the data dimension, through an arena.

Each rank has the gradients of what it holds; the norm is that of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from hpctrain.errors import ConfigError
from hpctrain.replica.modes.arena import ArenaMode

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.replica.modes.partners import Partners
    from hpctrain.tensor_parallel import Division

__all__ = ["TensorMode"]


class TensorMode(ArenaMode):
    """How a replica treats gradients of layers that ranks share.

    Args:
        engine: Over the data dimension: ranks that hold the same parts.
        names: Of the parameters.
        parameters: Themselves, DTensors.
        partners: Over the tensor dimension.
        division: Which layers are divided.
    """

    holds_shards = True
    plain_refusal = (
        "loss.backward() with divided layers: gradients must be weighed by samples, the same on "
        "all ranks that share a layer; call replica.backward(loss, num_samples=...) or "
        "replica.learn(loss_fn, x, y)"
    )

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        partners: Partners,
        division: Division,
    ) -> None:
        super().__init__(engine, names, parameters, bucket_bytes=None, overlap=False)
        self.partners = partners
        self._division = division

    def each_alone(self) -> NoReturn:
        """Refused: a rank that has left would not compute its parts of layers.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "replica.join() with divided layers: ranks that share a layer must run it together; "
            "give every rank the same number of batches (a Loader does), with num_samples=0 for "
            "an empty one"
        )

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what was chosen."""
        plan, num_ranks = self._division.plan, self._division.num_ranks
        kinds = sorted(set(plan.values()))
        counts = ", ".join(f"{list(plan.values()).count(kind)} {kind}" for kind in kinds)
        return [("divided layers", f"{counts}, over {num_ranks} ranks"), *super().describe()]
