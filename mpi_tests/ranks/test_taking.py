"""Large gradients: moved into shared memory one by one during backward, or added where they are.

Small models do so here.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpi_tests.models import SparseEmbedding
from mpi_tests.ranks.pair import STEPS


@pytest.fixture(autouse=True, params=["taken", "direct"])
def way(request, monkeypatch):
    if request.param == "taken":
        monkeypatch.setattr("hpctrain.replica.modes.node._TAKE_FROM_BYTES", 0)
    else:
        monkeypatch.setattr("hpctrain.replica.modes.node_memory._DIRECT_FROM_BYTES", 1)
    return request.param


def one_step(p, step, **backward):
    p.replica.backward(p.loss(step), **backward)
    p.replica.step()
    p.own.zero_grad()
    p.whole_loss(step).backward()
    p.own.step()


@pytest.mark.parametrize("model", ["mlp", "tied", "branches", "complex", "conv-batchnorm"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_equal_to_one_process(pair, model, optimizer, way):
    p = pair(model=model, optimizer=optimizer)
    for step in range(STEPS):
        one_step(p, step)
    used = sum(parameter.grad is not None for parameter in p.model.parameters())
    if (
        way == "taken" and p.world.size > 1 and model != "branches"
    ):  # one hook for each that has a gradient
        assert p.replica.counts()["hooks"] == STEPS * used
    p.check()


def test_accumulated_gradients_stay_there(pair):
    p = pair(optimizer="sgd", accumulate=3)
    for step in range(STEPS):
        p.own.zero_grad()
        for part in range(3):
            p.replica.backward(p.loss(3 * step + part))
            p.replica.step()
            (p.whole_loss(3 * step + part) / 3).backward()
        p.own.step()
    p.check()


def test_after_an_interrupted_backward_nothing_is_left(pair):
    p = pair(model="branches", optimizer="adamw")
    one_step(p, 0)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("interrupted")

    x, y = p.chunks(1)[p.world.rank]
    hidden = Broken.apply(p.model.even(x))
    with pytest.raises(KeyError):
        p.replica.backward(nn.functional.cross_entropy(p.model.out(hidden), y))
    p.replica.zero_grad()
    for step in range(2, STEPS):
        one_step(p, step)
    p.check()


def test_a_hook_of_the_users_sees_the_gradient(pair):
    p = pair(optimizer="sgd")
    seen = []
    handle = p.model.layers[0].weight.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(parameter.grad.clone())
    )
    one_step(p, 0)
    handle.remove()
    assert len(seen) == 1
    assert seen[0].any()
    p.check()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_sparse_gradients_and_graphs(pair, world, engines):
    import hpctrain as hpc

    torch.manual_seed(5)
    model = SparseEmbedding().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"], clip_norm=1.0)
    x = torch.randn(3, 12, dtype=torch.float64)
    replica.backward(replica(x, 0).square().mean())
    assert replica.step()
    replica.close()
    p = pair(optimizer="sgd")
    one_step(p, 0, create_graph=True)
    p.check()
