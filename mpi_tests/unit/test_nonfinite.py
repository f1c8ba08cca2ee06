"""A rank notes its own loss or gradient that is not finite, with the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.faults.nonfinite import FiniteWatch


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_rank_notes_its_own_loss_and_gradients(value):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    watch = FiniteWatch(model, gradients_every=2)
    watch.loss(torch.tensor(1.0))
    for step in range(5):
        model(torch.full((1, 3), value if step in (1, 4) else 1.0)).sum().backward()
        # Step 1 is not looked at.
        assert (watch.finding is None) == (step < 4)
        watch.step_ended(step + 1)
    assert watch.finding.startswith("step 4: the gradient of 1.weight has 2 of 2 elements")
    watch.close()
    losses = FiniteWatch(model)
    losses.step_ended(7)
    losses.loss(torch.tensor([1.0, value]))
    assert losses.finding == f"step 7: the loss is {value}"


def test_large_but_finite_gradients_are_fine():
    model = nn.Linear(4, 1, bias=False)
    watch = FiniteWatch(model, gradients_every=1)
    (model(torch.full((1, 4), 3e38)) * 1.0).sum().backward()  # their sum overflows
    assert watch.finding is None
    with pytest.raises(ConfigError, match="gradients_every=-1 must be 0 or more"):
        FiniteWatch(model, gradients_every=-1)
