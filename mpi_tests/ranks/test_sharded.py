"""The sharded update equals one process: every optimizer, with parameters that are cut."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import optim

import hpctrain as hpc
from hpctrain.errors import ConfigError
from mpi_tests.built import BUILT
from mpi_tests.ranks.split import (
    STEPS,
    Matrices,
    Split,
    Twins,
    build,
    check_bits,
    groups,
    tensors_of,
    twins,
)

# Of a parameter that lies in another order than its gradient: torch says it on one process too.
pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")


def make(kind, *, split=True, **options):
    return lambda model: kind(groups(model) if split else model.parameters(), **options)


class Plain(optim.Optimizer):
    """A user's own: new tensors at every step instead of writing to the old ones."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                    p.sub_(state["mean"], alpha=group["lr"])


class ByElement(Plain):
    shards_by = "element"


class ByParameter(Plain):
    shards_by = "parameter"


class Lazy(Plain):
    """State that comes late."""

    shards_by = "element"

    def step(self):
        super().step()
        for state in self.state.values():
            state["count"] = state.get("count", torch.zeros(()))
            if state["count"] and len(state) == 2:
                state["late"] = torch.ones(())
            state["count"] = state["count"] + 1


BY_ELEMENT = {
    "momentum": make(optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": make(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": make(optim.Adam, lr=0.01),
    "adamw": make(optim.AdamW),
    "foreach": make(optim.AdamW, foreach=True),
    "amsgrad": make(optim.Adam, amsgrad=True),
    "rmsprop": make(optim.RMSprop, momentum=0.5, centered=True),
    "adagrad": make(optim.Adagrad, initial_accumulator_value=0.1),
    "adadelta": make(optim.Adadelta, lr=0.5),
    "adamax": make(optim.Adamax),
    "nadam": make(optim.NAdam),
    "radam": make(optim.RAdam),
    "asgd": make(optim.ASGD),
    "rprop": make(optim.Rprop, split=False, lr=0.001),
    "own": make(ByElement),
}


def describe(replica, size):
    text = replica.describe()
    assert size == 1 or "shared memory" in text
    return text


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_every_optimizer(world, engines, name):
    with twins(world, engines["mpi"], BY_ELEMENT[name]) as t:
        t.train()
        assert t.size == 1 or "sharded by element" in describe(t.replica, t.size)


def real(model):
    """Complex and empty parameters are beyond these, on one process too."""
    return [p for p in model.parameters() if not p.is_complex() and p.numel()]


def by_parameter():
    cases = {"own": lambda m: ByParameter(m.parameters())}
    if hasattr(optim, "Adafactor"):
        cases["adafactor"] = lambda m: optim.Adafactor(real(m), lr=0.01)
    if hasattr(optim, "Muon"):
        cases["muon"] = lambda m: optim.Muon(m.parameters(), lr=0.01)
    return cases


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # torch's Muon, any process
@pytest.mark.parametrize("name", by_parameter())
def test_by_whole_parameters(world, engines, name):
    model = Matrices if name == "muon" else Split
    with twins(world, engines["mpi"], by_parameter()[name], model=model) as t:
        t.train(1 if name == "muon" else STEPS)  # bfloat16 inside it magnifies rounding
        assert t.size == 1 or "sharded by parameter" in describe(t.replica, t.size)


@pytest.mark.parametrize("engine_name", BUILT)
def test_fused(world, engines, engine_name):
    """It goes through weights and gradients side by side, whatever their order in memory."""
    with twins(
        world, engines[engine_name], lambda m: optim.AdamW(real(m), fused=True, weight_decay=0.1)
    ) as t:
        t.train()


def test_a_class_of_ones_own_is_replicated_and_said(world, engines):
    with twins(world, engines["mpi"], make(Plain)) as t:
        t.train()
        text = describe(t.replica, t.size)
        assert t.size == 1 or "replicated: Plain is not known to update elements" in text


def test_sharded_where_it_cannot_be_is_refused(world, engines):
    model = build()
    if world.size > 1:
        with pytest.raises(ConfigError, match=r'"sharded" is not possible: Plain is not'):
            hpc.distribute(
                world, model, make(Plain)(model), engine=engines["mpi"], update="sharded"
            )
    with pytest.raises(ConfigError, match="update='some' is unknown; choose auto, sharded"):
        hpc.distribute(world, model, make(Plain)(model), engine=engines["mpi"], update="some")


def test_state_of_a_changing_form_is_refused(world, engines):
    if world.size == 1:
        pytest.skip("one rank divides nothing")
    model = build(Matrices)
    replica = hpc.distribute(world, model, Lazy(model.parameters()), engine=engines["mpi"])
    x = torch.randn(3, 64, dtype=torch.float64)
    replica.backward(replica(x, 0).mean())
    replica.step()
    replica.backward(replica(x, 0).mean())
    with pytest.raises(ConfigError, match=r"Lazy has changed the form of its state 'late'"):
        replica.step()
    replica.close()


@pytest.mark.parametrize("kind", [optim.AdamW, functools.partial(optim.AdamW, fused=True)])
def test_replicated_gives_the_same_bits(world, engines, kind):
    """Real weights: a complex one is cut into pieces whose ends round differently."""
    models = []
    for update in ("sharded", "replicated"):
        t = Twins(
            world, engines["mpi"], lambda m: kind(m.parameters()), model=Matrices, update=update
        )
        t.train()
        t.replica.close()
        models.append([*t.model.parameters(), *tensors_of(t.optimizer)])
    for sharded, replicated in zip(*models, strict=True):
        assert torch.equal(sharded, replicated)


@pytest.mark.parametrize(
    ("dtype", "apart"), [(torch.bfloat16, 2e-3), (torch.float16, 5e-4), (torch.float32, 1e-6)]
)
def test_narrow_and_mixed_dtypes(world, engines, dtype, apart):
    """Beside float64 weights, some of another kind: near to one process, the same bits on ranks.

    Between nodes a sum of 16 bits is rounded once more. AdamW's second moment of such gradients is
    at float16's smallest number, where that decides whether it is zero: `eps` is far above it.
    What may differ is a few of the dtype's steps at the size of the weights.
    """

    def made(model):
        model.second.to(dtype)
        model.second.register_forward_pre_hook(lambda _, x: x[0].to(dtype))
        model.second.register_forward_hook(lambda _m, _x, y: y.double())
        return optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)

    t = Twins(world, engines["mpi"], made, model=Matrices)
    before = t.model.second.weight.clone()
    t.train()
    assert (t.model.second.weight - before).abs().max() > 4e-3
    for mine, other in zip(t.model.parameters(), t.alone.parameters(), strict=True):
        assert torch.allclose(mine.double(), other.double(), rtol=0, atol=apart)
    assert t.optimizer.state[t.model.second.weight]["exp_avg"].dtype == dtype
    check_bits(world, [*t.model.parameters(), *tensors_of(t.optimizer)])
    t.replica.close()


def test_a_model_of_16_bits_alone(world, engines):
    model = build(Matrices).to(torch.bfloat16)
    replica = hpc.distribute(
        world, model, optim.SGD(model.parameters(), 0.1, momentum=0.9), engine=engines["mpi"]
    )
    x = torch.randn(3, 64).to(torch.bfloat16)
    for _ in range(2):
        replica.backward(replica(x, 0).mean())
        replica.step()
    check_bits(world, [*model.parameters(), *tensors_of(replica.optimizer)])
    replica.close()
