"""Grids on GPUs: several ranks share one, through host memory; alone, by NCCL.

Everything is equal to one process on the same GPU, in float64.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.torch_backend import choose_backend, open_default_group
from mpi_tests.ranks.engines_kit import close, values
from mpi_tests.ranks.test_saver import common

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

WIDTH, STEPS, LIMIT = 12, 4, 1e-11
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
PATTERNS = {"*.up": "column", "*.down": "row"}
# Newer versions of torch have renamed them, and warn of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.fixture(scope="module")
def gpu_world():
    with hpc.init(seed=7, device="cuda", allow_shared_device=True) as made:
        yield made


@pytest.fixture
def group(gpu_world):
    opened = open_default_group(gpu_world, timeout_s=60)
    yield opened
    opened.close()


# The backend


def test_the_backend_is_chosen_by_who_shares_a_gpu(gpu_world, group):
    users = [(info.host, info.device.kind, info.device.uuid or "") for info in gpu_world.ranks]
    expected = "nccl" if len(set(users)) == gpu_world.size else "hpctrain"
    assert choose_backend(users)[0] == group.backend == expected
    assert torch.cuda.is_initialized()


def test_collectives(gpu_world, group):
    size, rank = gpu_world.size, gpu_world.rank
    for dtype in DTYPES:
        every = [values(r, (size, 3), dtype) for r in range(size)]
        mine = every[rank].cuda()
        total = sum(every[1:], every[0])
        summed = mine.clone()
        dist.all_reduce(summed)
        close(summed.cpu(), total)
        largest = mine.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        close(largest.cpu(), torch.stack(every).amax(0))
        joined = torch.empty(size * size, 3, dtype=dtype, device="cuda")
        all_gather_single(joined, mine)
        close(joined.cpu(), torch.cat(every))
        part = torch.empty(1, 3, dtype=dtype, device="cuda")
        reduce_scatter_single(part, mine)
        close(part.cpu(), total[rank : rank + 1])
        sent = mine.clone()
        dist.broadcast(sent, size - 1)
        close(sent.cpu(), every[-1])
        came = torch.empty_like(mine)
        dist.all_to_all_single(came, mine)
        close(came.cpu(), torch.stack([other[rank] for other in every]))
    # NCCL asks for the device, and warns where it must guess.
    dist.barrier(**({"device_ids": [0]} if group.backend == "nccl" else {}))


def heavy(number):
    """A number that is there only after the GPU has worked for a while."""
    busy = torch.rand(1500, 1500, device="cuda")
    for _ in range(20):
        busy = (busy @ busy).clamp(0, 1)
    return torch.full((1000,), float(number), device="cuda") + busy[0, 0] * 0


def test_what_is_sent_is_what_the_stream_has_written(gpu_world, group):
    size, rank = gpu_world.size, gpu_world.rank
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = heavy(rank)
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()  # the default stream waits for the other one
    assert set((tensor * 2).tolist()) == {float(size * (size - 1))}
    given = heavy(rank)
    joined = torch.empty(size * 1000, device="cuda")
    all_gather_single(joined, given)
    given.zero_()  # what has been sent already
    assert (joined.view(size, 1000)[:, 0] * 2).tolist() == [2.0 * r for r in range(size)]


def test_messages_go_round(gpu_world, group):
    size, rank = gpu_world.size, gpu_world.rank
    if size == 1:
        pytest.skip("a message needs two ranks")
    got = torch.empty(1000, device="cuda")
    side = torch.cuda.Stream()
    sent = dist.isend(heavy(rank), (rank + 1) % size)
    with torch.cuda.stream(side):
        received = dist.irecv(got, (rank - 1) % size)
        while not received.is_completed():
            pass
    received.wait()  # on the default stream
    assert set((got + 1).tolist()) == {(rank - 1) % size + 1.0}
    sent.wait()
    strided = torch.zeros(4, 6, device="cuda")[:, ::2]
    ops = [
        dist.P2POp(dist.isend, torch.full((4, 3), float(rank), device="cuda"), (rank + 1) % size),
        dist.P2POp(dist.irecv, strided, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert set(strided.flatten().tolist()) == {float((rank - 1) % size)}


# Training


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build():
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(4))).double().cuda()


def batch(data, number):
    """Shares of unequal size, one for each data coordinate."""
    drawn = torch.Generator().manual_seed(number)
    rows = [4 + (number + d) % 3 for d in range(data)]
    shape = (2, sum(rows), WIDTH)
    x, y = torch.randn(shape, generator=drawn, dtype=torch.float64).cuda()
    return list(zip(x.split(rows), y.split(rows), strict=True))


def train_alone(data, steps=STEPS):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for number in range(steps):
        optimizer.zero_grad()
        parts = batch(data, number)
        mse_loss(
            model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])
        ).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return dict(model.named_parameters())


def compare(model, wanted):
    found = list(model.named_parameters())
    assert found
    for name, parameter in found:
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert (whole - wanted[name]).abs().max().item() <= LIMIT, name


SHARDED = [
    {"shard": "state"},
    {"shard": "gradients"},
    {"shard": "parameters"},
    {"shard": "parameters", "whole_gradients": True},
]
ONE_WAY = {
    **{"-".join(map(str, options.values())): ("data", options) for options in SHARDED},
    "stages": ("pipeline", {"stages": "auto"}),
    "tensor": ("tensor", {"tensor": PATTERNS}),
}
TWO_WAYS = {
    "data x stages": (("data", "pipeline"), {"stages": "auto"}),
    "shards x stages": (("data", "pipeline"), {"stages": "auto", "shard": "parameters"}),
    "data x tensor": (("data", "tensor"), {"tensor": PATTERNS}),
    "shards x tensor": (("data", "tensor"), {"tensor": PATTERNS, "shard": "parameters"}),
    "stages x tensor": (("pipeline", "tensor"), {"stages": "auto", "tensor": PATTERNS}),
}


def divide(grid, options):
    """A divided model, or the reason why this version has none."""
    try:
        return hpc.split(grid, build(), **options)
    except ConfigError as error:
        if "in this version" not in str(error):
            raise
        pytest.skip(str(error))


def distribute(grid, model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return hpc.distribute(grid.world, model, optimizer, grid=grid, clip_norm=0.05, **options)


def learn(grid, replica, first=0, steps=STEPS):
    for number in range(first, first + steps):
        x, y = batch(grid.data, number)[grid.coordinate.data]
        assert replica.learn(mse_loss, x, y, num_samples=len(y))


def check_equal_to_one_process(world, sizes, options):
    with hpc.Grid(world, timeout_s=60, **sizes) as grid:
        model = divide(grid, options)
        staged = {"micro_batches": 4} if "stages" in options else {}
        replica = distribute(grid, model, **staged)
        learn(grid, replica)
        compare(model, train_alone(grid.data))
        replica.close()


@pytest.mark.parametrize("case", ONE_WAY)
def test_divided_in_one_way(gpu_world, case):
    dim, options = ONE_WAY[case]
    if dim == "tensor" and gpu_world.size == 1:
        pytest.skip("one rank divides no layer")
    check_equal_to_one_process(gpu_world, {dim: gpu_world.size}, options)


@pytest.mark.parametrize("case", TWO_WAYS)
def test_divided_in_two_ways(gpu_world, case):
    if gpu_world.size != 4:
        pytest.skip("2 x 2 needs four ranks")
    dims, options = TWO_WAYS[case]
    check_equal_to_one_process(gpu_world, dict.fromkeys(dims, 2), options)


def test_a_model_that_no_rank_holds_whole(gpu_world):
    world = gpu_world

    def make():
        return nn.Sequential(*(Block() for _ in range(4))).double()

    with hpc.Grid(world, timeout_s=60) as grid:
        torch.manual_seed(3)
        model = hpc.split(grid, make, shard="parameters")
        assert all(p.device.type == "cuda" for p in model.parameters())
        compare(model, dict(build().named_parameters()))


def test_an_overflow_on_one_rank_leaves_out_the_step_on_all(gpu_world):
    world = gpu_world
    scaling = hpc.precision.LossScaling(init_scale=1024.0, growth_interval=3, max_skips=5)
    with hpc.Grid(world, timeout_s=60) as grid:
        model = hpc.split(grid, build().float(), shard="parameters")
        replica = distribute(grid, model, precision="fp16", scaling=scaling)
        skipped = []
        for number in range(5):
            bad = number == 2 and world.rank == world.size - 1
            x, y = (one.float() for one in batch(world.size, number)[world.rank])
            done = replica.learn(
                lambda out, target, bad=bad: mse_loss(out, target) * (torch.inf if bad else 1.0),
                x,
                y,
                num_samples=len(y),
            )
            skipped.append(bool(done.skipped))
        assert skipped == [False, False, True, False, False]
        for parameter in model.parameters():
            assert parameter.full_tensor().isfinite().all()
        replica.close()


@pytest.mark.parametrize("other", ["gradients", None])
def test_a_checkpoint_resumes_in_another_division(gpu_world, tmp_path, other):
    world = gpu_world
    folder = common(world, tmp_path)
    wanted = train_alone(world.size)
    for shard, first in (("parameters", 0), (other, 2)):
        with hpc.Grid(world, timeout_s=60) as grid:
            model = build()
            if shard is not None:
                model = hpc.split(grid, model, shard=shard)
            replica = distribute(grid, model)
            saver = hpc.Saver(world, folder, replica, every_s=None)
            if first:
                assert saver.restore() is not None
            learn(grid, replica, first=first, steps=2)
            saver.save(wait=True)
            saver.close()
            if first:
                compare(model, wanted)
            replica.close()


class Forked(nn.Module):
    """Ranks may go different ways, through units of the same size."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, way):
        return self.ways[way](x)


def test_different_branches_are_refused_a_step_later(gpu_world):
    world = gpu_world
    if world.size == 1:
        pytest.skip("one rank has one branch")
    with hpc.Grid(world, timeout_s=60) as grid:
        torch.manual_seed(3)
        model = hpc.split(grid, Forked().double().cuda(), shard="parameters")
        replica = distribute(grid, model)
        x = torch.ones(2, WIDTH, dtype=torch.float64, device="cuda")
        replica.learn(mse_loss, x, 0, x)
        replica.learn(mse_loss, x, int(world.rank == 0), x)
        with pytest.raises(CollectiveError, match="in the last step the ranks have gathered"):
            replica.learn(mse_loss, x, 0, x)
        replica.close()
