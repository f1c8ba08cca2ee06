"""A loss is tried with its rows twice over: means pass, sums and pairs do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss

from hpctrain.errors import ConfigError
from hpctrain.pipeline.loss_means import LossMeans, trouble_with_mean


def check(loss_fn, dtype=torch.float32, target=None, means=None):
    torch.manual_seed(3)
    output = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    wanted = torch.randn(4, 5, dtype=dtype) if target is None else target
    loss = loss_fn(output, wanted)
    state = torch.get_rng_state()
    (means or LossMeans()).check(loss_fn, output, wanted, loss)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_means_pass_and_sums_do_not(dtype):
    check(mse_loss, dtype)
    for reduction in (lambda o, t: ((o - t) ** 2).sum(), nn.MSELoss(reduction="sum")):
        with pytest.raises(ConfigError, match="sums over its rows"):
            check(reduction, dtype)


def test_weighted_means_pass():
    classes = torch.tensor([0, 1, 2, -100])
    check(nn.CrossEntropyLoss(weight=torch.rand(5)), target=classes)


def test_pairs_of_rows_are_refused():
    with pytest.raises(ConfigError, match="no mean over its rows"):
        check(lambda o, t: cross_entropy(o @ t.T, torch.arange(len(t))))


def test_terms_that_cancel_are_not_taken_for_a_sum():
    """In 32 bits what is left of 1e4 - 1e4 is an error of rounding."""
    target = torch.randn(4, 5)
    check(lambda o, _: (o + 1e4).mean() - (o.detach().double() + 1e4).mean().float(), target=target)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, t: mse_loss(dropout(o, 0.5), t),
        lambda o, t: mse_loss(o.view(4, 5), t.view(4, 5)),
        lambda o, t: (o - t).mean() * float("nan"),
    ],
    ids=["random", "certain rows", "nan"],
)
def test_what_cannot_be_tried_passes(loss_fn):
    check(loss_fn)


def test_each_function_is_tried_once():
    calls, means = [], LossMeans()

    def loss_fn(output, target):
        calls.append(len(output))
        return mse_loss(output, target)

    for _ in range(3):
        check(loss_fn, means=means)
    assert calls == [4, 8, 4, 4]


def test_a_module_keeps_its_own_state():
    class Counting(nn.Module):
        num = 0

        def forward(self, output, target):
            self.num += 1
            return mse_loss(output, target)

    loss_fn = Counting()
    check(loss_fn)
    assert loss_fn.num == 1


def test_limits():
    assert trouble_with_mean(0.0, 0.0, is_exact=True) is None
    assert trouble_with_mean(1.0, None, is_exact=True) is None
    assert trouble_with_mean(1.0, 1.0009, is_exact=True) is None
    assert trouble_with_mean(1.0, 1.3, is_exact=False) is None
    assert "no mean" in trouble_with_mean(1.0, 1.3, is_exact=True)
    assert "sums" in trouble_with_mean(1.0, 2.01, is_exact=False)
