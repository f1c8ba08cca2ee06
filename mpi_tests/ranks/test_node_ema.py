"""Averages of the weights that a node holds once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

import hpctrain as hpc
from hpctrain.errors import ConfigError
from mpi_tests.built import BUILT
from mpi_tests.ranks.split import check_bits

STEPS = 4


class Net(nn.Module):
    """Parameters in several orders of memory and dtypes, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).double()
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3).double()
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.small = nn.Parameter(torch.randn(6).bfloat16())
        self.nothing = nn.Parameter(torch.zeros(0))
        self.out = nn.Linear(3, 1500, bias=False).double()

    def forward(self, x):
        seen = self.norm(self.conv(x)).mean((2, 3))
        return self.out(seen).mean() + self.phase.abs().sum() + self.small.float().sum()


class Run:
    """A replica with an average once a node, and one that each rank has for itself."""

    def __init__(self, world, engine, **options):
        torch.manual_seed(3)
        self.world, self.model = world, Net()
        make = optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.replica = hpc.distribute(world, self.model, make, engine=engine, **options)
        self.ema = hpc.optim.EMA.once_a_node(engine, self.model, 0.7, warm_up=True)
        self.own = hpc.optim.EMA(self.model, 0.7, warm_up=True)

    def train(self, steps=STEPS, start=0):
        for step in range(start, start + steps):
            generator = torch.Generator().manual_seed(10 * step + self.world.rank)
            x = torch.randn(4, 2, 5, 5, dtype=torch.float64, generator=generator)
            self.replica.backward(self.replica(x))
            assert self.replica.step()
            self.ema.update()
            self.own.update()

    def check(self):
        assert self.ema.num_updates == self.own.num_updates
        assert self.ema.averages.keys() == self.own.averages.keys()
        for name, own in self.own.averages.items():
            mine = self.ema.averages[name]
            assert (mine.shape, mine.dtype) == (own.shape, own.dtype), name
            assert torch.equal(mine, own), name
        parameters = dict(self.model.named_parameters())
        check_bits(self.world, [self.ema.averages[name] for name in parameters])


@pytest.fixture
def run(world, engines):
    made = []

    def make(**options):
        made.append(Run(world, engines["mpi"], **options))
        return made[-1]

    yield make
    for one in made:
        one.replica.close()


@pytest.mark.parametrize("share_parameters", [False, True])
def test_the_same_bits_as_each_ranks_own(world, run, share_parameters):
    options = {"update": "sharded", "share_parameters": True} if share_parameters else {}
    t = run(**options)
    t.train()
    t.check()
    statistics = t.ema.averages["norm.running_mean"]  # of this rank's own batches
    assert torch.equal(statistics, t.own.averages["norm.running_mean"])
    if world.size > 1:
        assert "a node, in " in t.ema.where
        assert len(set(world.comm.allgather(tuple(statistics.tolist())))) == world.size
    before = copy.deepcopy(t.model.state_dict())
    with t.ema.swapped_in():
        assert torch.equal(t.model.out.weight, t.own.averages["out.weight"])
        check_bits(world, t.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in t.model.state_dict().items())
    t.train(2, start=STEPS)
    t.check()


def test_reading_on_one_rank_alone(world, run):
    t = run()
    t.train(2)
    if world.rank == world.size - 1:  # nobody else takes part
        saved = t.ema.state_dict()
        assert all(torch.equal(saved["averages"][n], a) for n, a in t.own.averages.items())
    t.train(1, start=2)
    t.check()


def test_averages_edited_on_every_rank(run):
    t = run()
    t.train(2)
    for ema in (t.ema, t.own):
        ema.averages["out.weight"].data.mul_(0.5)
        ema.averages["conv.bias"].numpy()[1] = 3.0
    t.check()
    t.train(2, start=2)
    t.check()


def test_a_loaded_state_goes_on(world, run):
    t = run()
    t.train(2)
    saved = t.ema.state_dict()
    t.train(2, start=2)
    for ema in (t.ema, t.own):
        ema.load_state_dict(copy.deepcopy(saved))
    t.check()
    t.train(1, start=4)
    t.check()
    state = {"num_updates": 1, "averages": {**saved["averages"]}}
    if world.rank == world.size - 1:
        del state["averages"]["conv.bias"]
    with pytest.raises(ConfigError, match=r"conv\.bias is missing"):
        t.ema.load_state_dict(state)
    t.check()


def test_weights_that_differ_are_refused_on_all_ranks(world, engines):
    if world.size == 1:
        pytest.skip("one rank has nobody to differ from")
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"decay or warm_up of rank 1 differ"):
        hpc.optim.EMA.once_a_node(engines["mpi"], model, 0.9 if world.rank else 0.8)
    with torch.no_grad():
        model.bias[0] += world.rank
    with pytest.raises(ConfigError, match=r"weights of rank 1 differ .*after distribute"):
        hpc.optim.EMA.once_a_node(engines["mpi"], model, 0.9)


def test_where_nothing_is_shared_and_after_the_engine(world, engines):
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    for name in BUILT:
        if name != "mpi":
            ema = hpc.optim.EMA.once_a_node(engines[name], model)
            assert ema.where.startswith("each rank's own: ")
            ema.update()
    link = hpc.connect(world, "mpi", timeout_s=100)
    ema = hpc.optim.EMA.once_a_node(link.engine, model)
    link.close()
    assert torch.equal(ema.averages["weight"], model.weight)
    if world.size > 1:
        with pytest.raises(ConfigError, match="EMA: this mpi engine is closed"):
            ema.update()
