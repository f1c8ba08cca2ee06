"""Why the convolution before a BatchNorm has no bias in the models of the equivalence suite."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mpi_tests.models import ConvBatchNorm, batch

CHUNKS = 3
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adam-large-eps": lambda p: torch.optim.Adam(p, lr=0.05, eps=1.0),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def train(optimizer_name, order):
    """Sum the gradients of micro-batches in an order; returns weights and the bias's gradients."""
    torch.manual_seed(5)
    model = ConvBatchNorm().double()
    model.conv = nn.Conv1d(1, 4, 3, padding=1).double()  # with the bias that the suite leaves out
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    slopes = []
    for step in range(50):
        chunks = batch(step, [3] * CHUNKS)
        parts = [
            torch.autograd.grad(cross_entropy(model(x, 0), y), list(model.parameters()))
            for x, y in chunks
        ]
        for place, parameter in enumerate(model.parameters()):
            parameter.grad = sum(parts[i][place] for i in order) / CHUNKS
        slopes.append(model.conv.bias.grad.abs().max().item())
        optimizer.step()
    return dict(model.named_parameters()), max(slopes)


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_a_bias_before_a_normalisation_is_moved_by_rounding_alone(optimizer_name):
    (one, slope), (other, _) = (train(optimizer_name, order) for order in ([0, 1, 2], [2, 1, 0]))
    apart = {name: (one[name] - other[name]).abs().max().item() for name in one}
    bias_apart = apart.pop("conv.bias")
    assert slope < 1e-15  # nothing but rounding
    assert max(apart.values()) < 1e-14  # all else does not mind the order
    if optimizer_name == "adam":
        assert bias_apart > 1e-11  # rounding, divided by an eps of 1e-8, step after step
    else:
        assert bias_apart < 1e-14
