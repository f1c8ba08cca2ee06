"""Gradients through collectives, against one process that has all ranks' inputs.

The reference is one autograd graph over the inputs of all ranks whose loss is the sum of all ranks'
losses; the engines must give its gradients and its second derivatives.
"""

from __future__ import annotations

import pytest
import torch

from hpctrain.engines import Op
from hpctrain.engines import differentiable as diff
from hpctrain.errors import ConfigError


def start(rank, num_rows):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(num_rows, 2, dtype=torch.float64, generator=generator)


def loss(rank, result):
    """Not linear, and different on every rank."""
    weight = torch.arange(1.0, result.numel() + 1, dtype=result.dtype).view(result.shape)
    return (weight * (rank + 1) * result.sin()).sum() + (rank + 2) * (result**3).sum()


def splits_of(size, rank, num_rows):
    """Rows that a rank sends to each rank; some send none."""
    counts = [0] * size
    for row in range(num_rows):
        counts[(row * row + rank) % size] += 1
    return counts


def reference(name, op, inputs):
    """What every rank gets, computed from the inputs of all ranks."""
    size = len(inputs)
    if name == "allgather":
        return [torch.cat(inputs)] * size
    if name == "alltoall":
        cut = [x.split(splits_of(size, r, len(x))) for r, x in enumerate(inputs)]
        return [torch.cat([parts[rank] for parts in cut]) for rank in range(size)]
    total = torch.stack(inputs).sum(0) / (size if op is Op.AVERAGE else 1)
    return list(total.tensor_split(size)) if name == "reduce_scatter" else [total] * size


def collective(engine, name, op, mine):
    if name == "allgather":
        return diff.allgather(engine, mine)
    if name == "alltoall":
        counts = splits_of(engine.size, engine.rank, len(mine))
        return diff.alltoall(engine, mine, counts)[0]
    return getattr(diff, name)(engine, mine, op)


CASES = [
    ("allreduce", Op.SUM, "equal"),
    ("allreduce", Op.AVERAGE, "equal"),
    ("reduce_scatter", Op.SUM, "equal"),
    ("reduce_scatter", Op.AVERAGE, "equal"),
    ("allgather", Op.SUM, "equal"),
    ("allgather", Op.SUM, "unequal"),
    ("alltoall", Op.SUM, "equal"),
    ("alltoall", Op.SUM, "unequal"),
]


def inputs_of(size, kind):
    num_rows = [3 if kind == "equal" else r * 2 for r in range(size)]  # rank 0 has none
    return [start(r, count).requires_grad_() for r, count in enumerate(num_rows)]


def test_gradients_are_those_of_the_sum_of_losses(engine):
    for case in CASES:
        check_against_reference(engine, *case)


def check_against_reference(engine, name, op, kind):
    inputs = inputs_of(engine.size, kind)

    def total(*every):
        return sum(loss(r, y) for r, y in enumerate(reference(name, op, list(every))))

    wanted = torch.autograd.grad(total(*inputs), inputs, create_graph=True)
    mine = inputs[engine.rank].detach().clone().requires_grad_()
    result = collective(engine, name, op, mine)
    torch.testing.assert_close(result, reference(name, op, inputs)[engine.rank])
    (got,) = torch.autograd.grad(loss(engine.rank, result), mine, create_graph=True)
    torch.testing.assert_close(got, wanted[engine.rank], rtol=1e-12, atol=1e-12)
    # Once more: the gradient of the squared gradients, summed over ranks.
    twice = torch.autograd.grad(sum((g**2).sum() for g in wanted), inputs)
    (got_twice,) = torch.autograd.grad((got**2).sum(), mine)
    torch.testing.assert_close(got_twice, twice[engine.rank], rtol=1e-10, atol=1e-10)


def test_gradients_are_the_slope(engine, comm):
    """Numerically, through the engine itself: all ranks step along one direction."""
    for case in CASES:
        check_slope(engine, comm, *case)


def check_slope(engine, comm, name, op, kind):
    mine = inputs_of(engine.size, kind)[engine.rank]
    generator = torch.Generator().manual_seed(engine.rank)
    direction = torch.randn(mine.shape, dtype=mine.dtype, generator=generator)
    (got,) = torch.autograd.grad(loss(engine.rank, collective(engine, name, op, mine)), mine)

    def total(step):
        moved = mine.detach() + step * direction
        return comm.allreduce(loss(engine.rank, collective(engine, name, op, moved)).item())

    slope = (total(1e-5) - total(-1e-5)) / 2e-5
    assert comm.allreduce((got * direction).sum().item()) == pytest.approx(slope, rel=1e-6)


def test_the_input_stays_and_what_has_no_gradient_is_refused(engine):
    mine = torch.ones(3, requires_grad=True)
    diff.allreduce(engine, mine)
    assert mine.tolist() == [1.0] * 3
    for call in (diff.allreduce, diff.reduce_scatter):
        with pytest.raises(ConfigError, match="max has no gradient"):
            call(engine, mine, Op.MAX)


def test_complex_inputs(engine):
    mine = torch.full((2,), 1.0 + 2j * engine.rank, requires_grad=True)
    result = diff.allreduce(engine, mine)
    result.abs().square().sum().backward()
    assert torch.allclose(mine.grad, 2 * result.detach() * engine.size)
