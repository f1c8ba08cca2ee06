"""A tensor train over several ranks: its largest core is divided along its row factor.

Each rank computes with plain tensors what its part of the core gives. For a linear layer these are
some of the outputs, for an embedding the rows whose digit is this rank's, and zeros elsewhere.
torch's DTensors know how the parts make the whole, and that gradients of the undivided cores and
of the input are sums over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hpctrain.nn.factors import TrainShape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CoreDivision", "divide_core"]

_ROWS = 1
"""The dimension of a core that is its row factor."""


@dataclass(frozen=True, eq=False, slots=True)
class CoreDivision:
    """Which core is divided, over which ranks, and what this rank's part is a train of."""

    mesh: DeviceMesh
    core: int
    shape: TrainShape
    """With this rank's row factor in the place of the whole one, and all padded rows."""

    def local_cores(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of the divided core, and the others whole, as plain tensors."""
        parts: list[Tensor] = []
        for number, core in enumerate(cores):
            lies: Any = Shard(_ROWS) if number == self.core else Partial()
            parts.append(cast("Any", core).to_local(grad_placements=[lies]))
        return parts

    def local_input(self, given: Tensor) -> Tensor:
        """What every rank has whole, as a plain tensor; its gradient is a sum over the ranks."""
        if not isinstance(given, DTensor):
            given = DTensor.from_local(given, self.mesh, [Replicate()], run_check=False)
        whole = given.redistribute(placements=[Replicate()])
        if whole.requires_grad:
            whole = cast("DTensor", whole.view(whole.shape))  # the hook is for this use alone
            cast("Any", whole).register_hook(
                lambda gradient: gradient.redistribute(placements=[Replicate()])
            )
        return whole.to_local(grad_placements=[Partial()])

    def join_digits(self, digits: Tensor) -> Tensor:
        """Outputs by digits, of which this rank has some, as those of the whole layer."""
        made = DTensor.from_local(digits, self.mesh, [Shard(1 + self.core)], run_check=False)
        return made.redistribute(placements=[Replicate()])

    def join_rows(self, rows: Tensor) -> Tensor:
        """Rows of which each is on one rank, and zero on the others, on all of them."""
        made = DTensor.from_local(rows, self.mesh, [Partial()], run_check=False)
        return made.redistribute(placements=[Replicate()])

    def local_ids(self, ids: Tensor, whole: TrainShape) -> tuple[Tensor, Tensor]:
        """The numbers of rows in this rank's train, and which of them are this rank's.

        Others get the number of some row. One that no rank has stays out of range.
        """
        size = self.shape.row_factors[self.core]
        after = math.prod(whole.row_factors[self.core + 1 :])
        digit = ids // after % whole.row_factors[self.core] - size * self.mesh.get_local_rank()
        is_mine = (digit >= 0) & (digit < size)
        before = ids // (after * whole.row_factors[self.core])
        local = (before * size + digit.clamp(0, size - 1)) * after + ids % after
        is_out = (ids < 0) | (ids >= whole.rows)
        return local.masked_fill(is_out, self.shape.rows), is_mine & ~is_out


def divide_core(
    cores: nn.ParameterList, shape: TrainShape, core: int, mesh: DeviceMesh
) -> CoreDivision:
    """Keep this rank's part of a core, in place; the size of the mesh divides its row factor."""
    old = cores[core]
    mine = old.data.chunk(mesh.size(), _ROWS)[mesh.get_local_rank()].clone()
    part = DTensor.from_local(mine, mesh, [Shard(_ROWS)], run_check=False)
    cores[core] = nn.Parameter(part, requires_grad=old.requires_grad)
    factors = list(shape.row_factors)
    factors[core] //= mesh.size()
    local = replace(shape, row_factors=tuple(factors), rows=math.prod(factors))
    return CoreDivision(mesh, core, local)
