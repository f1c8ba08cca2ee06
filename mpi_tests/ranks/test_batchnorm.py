"""BatchNorm over all ranks is BatchNorm over one big batch, in float64, on every engine."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.optim import SyncBatchNorm
from hpctrain.replica.equal_ranks import digest

KINDS = {
    "1d": (nn.BatchNorm1d, ()),
    "1d-long": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (3, 2)),
    "3d": (nn.BatchNorm3d, (2, 1, 3)),
}
OPTIONS = {
    "default": {},
    "cumulative": {"momentum": None},
    "untracked": {"track_running_stats": False},
    "plain": {"affine": False, "eps": 1e-3},
}
CASES = [*((kind, "default") for kind in KINDS), *(("2d", o) for o in OPTIONS if o != "default")]


def draw(step, sizes, shape, offset=0.0):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(sum(sizes), 4, *shape, dtype=torch.float64, generator=generator) + offset
    out = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    return x, out


def sizes_of(size, step):
    return [1 + (rank + step) % 3 for rank in range(size)] if size > 1 else [3]


def layers(kind, options):
    alone = kind(4, **options).double()
    if alone.affine:
        with torch.no_grad():
            alone.weight.copy_(torch.tensor([0.5, -1.0, 2.0, 1.5]))
            alone.bias.copy_(torch.tensor([0.1, 0.0, -0.3, 1.0]))
    return copy.deepcopy(alone), alone


def assert_close(mine, other, message=""):
    assert torch.allclose(mine, other, rtol=1e-9, atol=1e-11), message


@pytest.mark.parametrize(("kind_name", "option_name"), CASES)
def test_equal_to_one_big_batch(world, engine, kind_name, option_name):
    kind, shape = KINDS[kind_name]
    mine, alone = layers(kind, OPTIONS[option_name])
    hpc.optim.sync_batchnorm(engine, mine)
    assert isinstance(mine, SyncBatchNorm)
    for step in range(3):
        sizes = sizes_of(world.size, step)
        x, weights = draw(step, sizes, shape)
        here = x.split(sizes)[world.rank].clone().requires_grad_()
        x.requires_grad_()
        out, expected = mine(here), alone(x)
        assert_close(out, expected.split(sizes)[world.rank])
        # The sum of all ranks' losses; each sees its own samples.
        ((out * weights.split(sizes)[world.rank]).pow(3).sum()).backward()
        ((expected * weights).pow(3).sum()).backward()
        assert_close(here.grad, x.grad.split(sizes)[world.rank])
    for name, parameter in alone.named_parameters():
        total = engine.allreduce_(mine.get_parameter(name).grad.clone())  # each rank has its part
        assert_close(total, parameter.grad, name)
    for name, buffer in alone.named_buffers():
        assert_close(mine.get_buffer(name).double(), buffer.double(), name)
    assert mine.state_dict().keys() == alone.state_dict().keys()
    assert len(set(world.comm.allgather(digest(mine.buffers())))) == 1
    mine.eval(), alone.eval()
    x, _ = draw(9, sizes, shape)
    assert_close(mine(x.split(sizes)[world.rank]), alone(x).split(sizes)[world.rank])


def test_a_large_mean_in_single_precision(world, engine):
    sizes = [4 + rank for rank in range(world.size)]
    x, _ = draw(0, sizes, (6,), offset=1000.0)
    x = x.float()
    mine, exact = nn.BatchNorm1d(4, momentum=1.0), nn.BatchNorm1d(4, momentum=1.0).double()
    hpc.optim.sync_batchnorm(engine, mine)
    out = mine(x.split(sizes)[world.rank])
    expected = exact(x.double()).split(sizes)[world.rank]
    assert torch.allclose(out.double(), expected, rtol=0, atol=1e-3)
    assert torch.allclose(mine.running_var.double(), exact.running_var, rtol=1e-4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4 * 6, 3)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.conv(x.unsqueeze(1)))).flatten(1))


def make_net():
    torch.manual_seed(3)
    return Net().double()


def batch(step, sizes):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(sizes), 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (sum(sizes),), generator=generator)


@pytest.mark.parametrize("overlap", [False, True])
def test_training_equals_one_process(world, engine, overlap):
    model, alone = make_net(), make_net()
    hpc.optim.sync_batchnorm(engine, model)
    optimizer, own = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone))
    replica = hpc.distribute(
        world, model, optimizer, engine=engine, overlap=overlap, bucket_bytes=200
    )
    for step in range(10):
        sizes = sizes_of(world.size, step)
        x, y = batch(step, sizes)
        mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        replica.backward(cross_entropy(replica(x[mine]), y[mine]), num_samples=sizes[world.rank])
        assert replica.step()
        own.zero_grad()
        cross_entropy(alone(x), y).backward()
        own.step()
    for (name, value), other in zip(
        model.state_dict().items(), alone.state_dict().values(), strict=True
    ):
        assert torch.allclose(value.double(), other.double(), rtol=0, atol=1e-9), name
    assert len(set(world.comm.allgather(digest(model.state_dict().values())))) == 1
    replica.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own, at a graph break
def test_a_compiled_model(world, engines):
    x, _ = draw(0, sizes_of(world.size, 0), ())
    here = x.split(sizes_of(world.size, 0))[world.rank]
    model, plain = layers(nn.BatchNorm1d, {})
    for layer in (model, plain):
        hpc.optim.sync_batchnorm(engines["mpi"], layer)
    compiled = torch.compile(nn.Sequential(model, nn.Tanh()), backend="aot_eager")
    for _ in range(2):
        compiled(here).square().sum().backward()
        plain(here).tanh().square().sum().backward()
    assert_close(model.weight.grad, plain.weight.grad)
    assert_close(model.running_var, plain.running_var)


def test_checkpointed_layers_share_statistics_once(world, engines):
    sizes = sizes_of(world.size, 0)
    x, y = batch(0, sizes)
    mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
    models = [make_net(), make_net()]
    for model in models:
        hpc.optim.sync_batchnorm(engines["mpi"], model)
    hpc.optim.checkpoint_activations(models[1], "norm", "conv")
    for model in models:
        for _ in range(2):
            cross_entropy(model(x[mine]), y[mine]).backward()
    for (name, one), other in zip(
        models[0].state_dict().items(), models[1].state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_statistics_of_groups_of_ranks(world, engine):
    group_size = 2 if world.size % 2 == 0 else 1
    mine, alone = layers(nn.BatchNorm1d, {})
    part = hpc.optim.sync_batchnorm(engine, mine, group_size=group_size)
    assert part.size == group_size
    sizes = sizes_of(world.size, 1)
    x, _ = draw(0, sizes, (3,))
    first = world.rank // group_size * group_size
    parts = x.split(sizes)[first : first + group_size]
    expected = alone(torch.cat(parts)).split([len(part) for part in parts])[world.rank - first]
    assert_close(mine(x.split(sizes)[world.rank]), expected)
    assert_close(mine.running_var, alone.running_var)
    if part is not engine:
        part.close()


def test_a_rank_without_samples(world, engines):
    engine = engines["mpi"]
    mine, alone = layers(nn.BatchNorm1d, {})
    hpc.optim.sync_batchnorm(engine, mine)
    if world.size == 1:
        with pytest.raises(ConfigError, match="has 1 values a channel on all 1 ranks"):
            mine(torch.ones(1, 4, dtype=torch.float64))
        return
    sizes = [0, *([2] * (world.size - 1))]
    x, _ = draw(0, sizes, (3,))
    here = x.split(sizes)[world.rank]
    with torch.no_grad():  # statistics alone are exact
        assert_close(mine(here), alone(x).split(sizes)[world.rank])
    assert_close(mine.running_mean, alone.running_mean)
    # A rank without samples makes no backward pass: refused on all ranks before anybody waits.
    with pytest.raises(ConfigError, match=f"1 of {world.size} ranks have no samples"):
        mine(here)


def test_copies_keep_their_ranks_and_pickles_say_that_they_have_none(world, engines):
    model = make_net()
    hpc.optim.sync_batchnorm(engines["mpi"], model)
    hpc.optim.sync_batchnorm(engines["mpi"], model)  # a second call changes nothing
    x, _ = batch(0, [4])
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert f"{world.size} ranks" in repr(model)
    loaded = pickle.loads(pickle.dumps(model))
    loaded.norm.eval()
    model.norm.eval()
    assert torch.equal(loaded(x), model(x))
    loaded.norm.train()
    with pytest.raises(ConfigError, match="norm was loaded from a file"):
        loaded(x)


def test_mistakes_are_named(world, engines):
    engine = engines["mpi"]
    with pytest.raises(ConfigError, match="needs an engine and got World"):
        hpc.optim.sync_batchnorm(world, make_net())
    with pytest.raises(ConfigError, match=f"group_size=5 does not divide the {world.size}"):
        hpc.optim.sync_batchnorm(engine, make_net(), group_size=5)
    with pytest.raises(ConfigError, match="Linear has no BatchNorm"):
        hpc.optim.sync_batchnorm(engine, nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="LazyBatchNorm1d"):
        hpc.optim.sync_batchnorm(engine, nn.Sequential(nn.LazyBatchNorm1d()))
    layer = nn.BatchNorm2d(4)
    hpc.optim.sync_batchnorm(engine, layer)
    with pytest.raises(ConfigError, match=r"shape \(2, 4\); it takes 4 dimensions"):
        layer(torch.ones(2, 4))


def test_local_statistics_are_averaged(world):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(2, track_running_stats=False))
    model[0].running_mean.fill_(world.rank)
    model[0].running_var.fill_(1.0 + 2 * world.rank)
    model[0].num_batches_tracked.fill_(10 + world.rank)
    hpc.optim.average_batchnorm(world, model)
    middle = (world.size - 1) / 2
    assert model[0].running_mean.tolist() == pytest.approx([middle] * 3)
    assert model[0].running_var.tolist() == pytest.approx([1 + 2 * middle] * 3)
    assert model[0].num_batches_tracked.item() == 9 + world.size
    assert len(set(world.comm.allgather(digest(model.buffers())))) == 1


def test_half_precision_inputs(world, engines):
    sizes = [3 + rank for rank in range(world.size)]
    x, weights = draw(0, sizes, (4, 2), offset=3.0)
    mine, alone = nn.BatchNorm2d(4), nn.BatchNorm2d(4).double()
    hpc.optim.sync_batchnorm(engines["mpi"], mine)
    here = x.split(sizes)[world.rank].bfloat16().requires_grad_()
    whole = x.bfloat16().double().requires_grad_()
    out, expected = mine(here), alone(whole)
    assert out.dtype == here.dtype
    (out.double() * weights.split(sizes)[world.rank]).sum().backward()
    (expected * weights).sum().backward()
    part = expected.split(sizes)[world.rank]
    assert torch.allclose(out.double(), part, rtol=1e-2, atol=1e-2)  # bfloat16 has 8 bits
    grad = whole.grad.split(sizes)[world.rank]
    assert torch.allclose(here.grad.double(), grad, rtol=2e-2, atol=2e-2)
    assert torch.allclose(mine.running_mean.double(), alone.running_mean, rtol=1e-5)
