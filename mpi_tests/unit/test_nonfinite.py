"""A rank notes its own loss or gradient that is not finite, with the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.replica.finite import FiniteCheck


def look_at(check, model, *, step):
    names, parameters = zip(*model.named_parameters(), strict=True)
    check.look_at_gradients(names, parameters, step=step)
    model.zero_grad()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_rank_notes_its_own_loss_and_gradients(value):
    # More small parameters than are looked at each time: the large ones only now and then.
    model = nn.Sequential(nn.Linear(3, 2), *(nn.Linear(2, 2) for _ in range(5)))
    check = FiniteCheck(None, num_ranks=1, watches=True)
    check.look_at_loss(torch.tensor(1.0), step=0)
    for step in range(101):
        model(torch.ones(1, 3)).sum().backward()
        if step in (1, 100):
            model[0].weight.grad[0, 0] = value
        look_at(check, model, step=step)
        # Step 1 is not looked at.
        assert (check.finding is None) == (step < 100)
    assert check.finding == (
        "step 100: the gradient of 0.weight has 1 of 6 elements that are inf or NaN"
    )
    losses = FiniteCheck(None, num_ranks=1, watches=True)
    losses.look_at_loss(torch.tensor(value), step=7)
    losses.look_at_loss(torch.tensor(value), step=8)
    assert losses.finding == f"step 7: the loss is {value}"
    silent = FiniteCheck(None, num_ranks=1, watches=False)
    silent.look_at_loss(torch.tensor(value), step=7)
    assert silent.finding is None


def test_large_but_finite_gradients_are_fine():
    model = nn.Linear(4, 1, bias=False)
    check = FiniteCheck(None, num_ranks=1, watches=True)
    (model(torch.full((1, 4), 3e38)) * 1.0).sum().backward()  # their sum overflows
    look_at(check, model, step=0)
    assert check.finding is None
