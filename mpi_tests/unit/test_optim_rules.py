"""LARS and LAMB against the published rules, written down once more in NumPy and float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import hpctrain as hpc
from hpctrain.optim.layerwise import LayerwiseOptimizer

SHAPES = [(5, 7), (3,), (), (2, 3, 4), (6, 1)]


class LarsOnPaper:
    """Algorithm 1 of You, Gitman and Ginsburg (2017), one weight at a time."""

    def __init__(self, lr, momentum=0.9, weight_decay=0.0, trust_coefficient=0.001, trust=True):
        self.lr, self.m, self.decay = lr, momentum, weight_decay
        self.eta, self.trust, self.v = trust_coefficient, trust, 0.0

    def __call__(self, w, g):
        w_norm, g_norm = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
        local = 1.0
        if self.trust and w_norm > 0 and g_norm > 0:
            local = self.eta * w_norm / (g_norm + self.decay * w_norm)
        self.v = self.m * self.v + self.lr * local * (g + self.decay * w)
        return w - self.v


class LambOnPaper:
    """Algorithm 2 of You et al. (2019), one weight at a time."""

    def __init__(
        self, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bounds=None, trust=True
    ):
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, weight_decay
        self.bounds, self.trust, self.t, self.m, self.v = bounds, trust, 0, 0.0, 0.0

    def __call__(self, w, g):
        b1, b2 = self.betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        r = (self.m / (1 - b1**self.t)) / (np.sqrt(self.v / (1 - b2**self.t)) + self.eps)
        u = r + self.decay * w
        phi, u_norm = np.linalg.norm(np.ravel(w)), np.linalg.norm(np.ravel(u))
        ratio = 1.0
        if self.trust and phi > 0 and u_norm > 0:
            phi = min(max(phi, self.bounds[0]), self.bounds[1]) if self.bounds else phi
            ratio = phi / u_norm
        return w - self.lr * ratio * u


CASES = {
    "lars": (hpc.optim.LARS, {"lr": 3.0}, LarsOnPaper(3.0)),
    "lars-decay": (
        hpc.optim.LARS,
        {"lr": 2.0, "momentum": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.05},
        LarsOnPaper(2.0, 0.5, 0.1, 0.05),
    ),
    "lars-plain": (
        hpc.optim.LARS,
        {"lr": 0.1, "weight_decay": 0.1, "trust_ratio": False},
        LarsOnPaper(0.1, weight_decay=0.1, trust=False),
    ),
    "lamb": (hpc.optim.LAMB, {"lr": 0.1}, LambOnPaper(0.1)),
    "lamb-bounds": (
        hpc.optim.LAMB,
        {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "norm_bounds": (0.5, 2.0)},
        LambOnPaper(0.1, (0.8, 0.95), 1e-3, bounds=(0.5, 2.0)),
    ),
    "lamb-plain": (
        hpc.optim.LAMB,
        {"lr": 0.1, "weight_decay": 0.2, "trust_ratio": False},
        LambOnPaper(0.1, weight_decay=0.2, trust=False),
    ),
}


def gradients(step, weights):
    generator = np.random.default_rng([step, 3])
    drawn = [generator.normal(size=w.shape) for w in weights]
    if step == 3:
        drawn[0] *= 0.0  # a gradient of zeros has no direction
    return [None if step % 4 == 1 and i == 3 else g for i, g in enumerate(drawn)]


@pytest.mark.parametrize("name", CASES)
def test_the_published_rule(name):
    kind, options, rule = CASES[name]
    generator = np.random.default_rng(1)
    expected = [np.asarray(generator.normal(size=shape)) for shape in SHAPES]
    expected[1] *= 0.0  # a weight of zeros has no norm to be in proportion to
    rules = [copy.deepcopy(rule) for _ in expected]
    weights = [torch.nn.Parameter(torch.tensor(w)) for w in expected]
    optimizer = kind(weights, **options)
    for step in range(12):
        grads = gradients(step, expected)
        for i, g in enumerate(grads):
            weights[i].grad = None if g is None else torch.tensor(g)
            if g is not None:
                expected[i] = rules[i](expected[i], np.asarray(g))
        optimizer.step()
        for mine, paper in zip(weights, expected, strict=True):
            np.testing.assert_allclose(mine.detach().numpy(), paper, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [hpc.optim.LARS, hpc.optim.LAMB])
def test_groups_have_their_own_options(kind):
    torch.manual_seed(0)
    first, second = (torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2))
    together = kind(
        [
            {"params": [first], "weight_decay": 0.3},
            {"params": [second], "lr": 0.5, "trust_ratio": False},
        ],
        lr=0.1,
    )
    copies = [torch.nn.Parameter(p.detach().clone()) for p in (first, second)]
    apart = [
        kind([copies[0]], lr=0.1, weight_decay=0.3),
        kind([copies[1]], lr=0.5, trust_ratio=False),
    ]
    for _ in range(4):
        for p, c in zip((first, second), copies, strict=True):
            p.grad = torch.randn_like(p)
            c.grad = p.grad.clone()
        for optimizer in (together, *apart):
            optimizer.step()
    assert torch.equal(first, copies[0])
    assert torch.equal(second, copies[1])


@pytest.mark.parametrize("kind", [hpc.optim.LARS, hpc.optim.LAMB])
def test_complex_weights_are_pairs_of_real_ones(kind):
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))
    pairs = torch.nn.Parameter(torch.view_as_real(whole.detach()).clone())
    one, other = kind([whole], lr=0.1), kind([pairs], lr=0.1)
    for _ in range(4):
        whole.grad = torch.randn_like(whole)
        pairs.grad = torch.view_as_real(whole.grad).clone()
        one.step()
        other.step()
    assert torch.allclose(torch.view_as_real(whole.detach()), pairs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [hpc.optim.LARS, hpc.optim.LAMB])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_do_not_overflow(kind, dtype):
    weight = torch.nn.Parameter(torch.full((300, 300), 300.0, dtype=dtype))  # norm 90,000
    weight.grad = torch.full_like(weight, 300.0)
    kind([weight], lr=100.0 if kind is hpc.optim.LARS else 0.1).step()
    assert torch.isfinite(weight).all()
    assert (weight < 300).all()


@pytest.mark.parametrize("kind", [hpc.optim.LARS, hpc.optim.LAMB])
def test_a_loaded_state_goes_on_bit_for_bit(kind):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    grads = [[torch.randn(4, 3) for _ in weights] for _ in range(6)]
    through = kind(weights, lr=0.1)
    copies = None
    for step, these in enumerate(grads):
        if step == 3:
            copies = [torch.nn.Parameter(w.detach().clone()) for w in weights]
            resumed = kind(copies, lr=0.7)
            resumed.load_state_dict(copy.deepcopy(through.state_dict()))
        for parameters, optimizer in ((weights, through), (copies, step >= 3 and resumed)):
            if parameters:
                for p, g in zip(parameters, these, strict=True):
                    p.grad = g.clone()
                optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, copies, strict=True))


def test_closures_and_what_a_sharded_update_may_cut():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hpc.optim.LARS([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert weight[0].item() < 1.0
    assert LayerwiseOptimizer.shards_by == hpc.optim.LAMB.shards_by == "parameter"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (hpc.optim.LARS, {"lr": -1.0}, "lr=-1.0 must be 0 or more"),
        (hpc.optim.LARS, {"lr": float("nan")}, "lr=nan must be"),
        (
            hpc.optim.LARS,
            {"lr": 1.0, "momentum": 1.0},
            "momentum=1.0 must be at least 0 and below 1",
        ),
        (hpc.optim.LAMB, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must both be"),
        (hpc.optim.LAMB, {"norm_bounds": (2.0, 1.0)}, r"norm_bounds=\(2.0, 1.0\) must be"),
    ],
)
def test_mistakes_are_named(kind, options, message):
    with pytest.raises(hpc.errors.ConfigError, match=message):
        kind([torch.nn.Parameter(torch.ones(2))], **options)


def test_sparse_gradients_are_refused_by_name():
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = hpc.optim.LAMB(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(hpc.errors.ConfigError, match="LAMB needs the norm of a whole gradient"):
        optimizer.step()
