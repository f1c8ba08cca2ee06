"""The grid: torch's own parallelism over it is equal to one process, in float64, at any n."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.grid import factorings
from hpctrain.sharding import trouble_with_torch
from hpctrain.tensor_parallel import trouble_with_dtensors

WIDTH, ROWS, STEPS = 12, 12, 3
# What torch 2.6 says wherever a CPU tensor is divided.
quiet = pytest.mark.filterwarnings("ignore:DTensor random operators may not have")


@pytest.fixture
def make_grid(world):
    made = []

    def make(**sizes):
        made.append(hpc.Grid(world, timeout_s=60, **sizes))
        return made[-1]

    yield make
    for grid in made:
        grid.close()
    assert not dist.is_initialized()


def model():
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def batch(step):
    drawn = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=drawn)
    return x, torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=drawn)


def alone():
    """One process's parameters after some steps of AdamW."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.named_parameters())


def compare(named):
    want = alone()
    assert named
    for name, parameter in named:
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert (whole - want[name]).abs().max() <= 1e-11


def needs(trouble):
    if trouble is not None:
        pytest.skip(trouble)


def share_of(grid, tensor):
    return tensor.tensor_split(grid.data)[grid.coordinate.data]


def train(grid, net):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(STEPS):
        x, y = (share_of(grid, t) for t in batch(step))
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_fsdp_is_equal_to_one_process(make_grid, world):
    needs(trouble_with_torch("cpu"))
    grid = make_grid()
    net = model()
    for block in net:
        fully_shard(block, mesh=grid.mesh("data"))
    fully_shard(net, mesh=grid.mesh("data"))
    train(grid, net)
    compare(list(net.named_parameters()))


@quiet
def test_tensor_parallel_is_equal_to_one_process(make_grid, world):
    needs(trouble_with_dtensors())
    grid = make_grid(tensor=world.size)
    net = model()
    plan = {f"{i}.0": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)}
    parallelize_module(net, grid.mesh("tensor"), plan)
    train(grid, net)
    compare(list(net.named_parameters()))


def test_a_pipeline_is_equal_to_one_process(make_grid, world):
    grid = make_grid(pipeline=world.size)
    here = grid.coordinate.pipeline
    cut = torch.arange(4).tensor_split(grid.pipeline)
    blocks = [int(i) for i in cut[here]]
    net = nn.Sequential(*(model()[i] for i in blocks))
    micro = torch.zeros(3, WIDTH, dtype=torch.float64, requires_grad=True)
    stage = PipelineStage(
        net,
        here,
        grid.pipeline,
        torch.device("cpu"),
        input_args=(micro if here else micro.detach(),),
        output_args=(micro,),
        group=grid.group("pipeline"),
    )
    first = getattr(stage, "_get_init_p2p_neighbors_ops", list)()
    if len({op.tensor.dtype for op in first}) > 1:  # hpctrain's own pipelines mend it
        pytest.skip(f"stages of torch {torch.__version__} greet each other in two dtypes")

    def loss_fn(out, target):
        scales = "scale_grads" in inspect.signature(ScheduleGPipe).parameters  # since 2.7
        return nn.functional.mse_loss(out, target) / (1 if scales else 4)

    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(STEPS):
        x, y = batch(step)
        inputs = (x,) if here == 0 else ()
        last = {"target": y, "losses": []} if here == grid.pipeline - 1 else {}
        schedule.step(*inputs, **last)
        optimizer.step()
        optimizer.zero_grad()
    named = [
        (f"{blocks[int(name[0])]}{name[1:]}", parameter)
        for name, parameter in net.named_parameters()
    ]
    compare(named)


@quiet
def test_a_mesh_of_two_dimensions_is_equal_to_one_process(make_grid, world):
    needs(trouble_with_torch("cpu") or trouble_with_dtensors())
    tensor = 2 if world.size % 2 == 0 else 1
    grid = make_grid(tensor=tensor)
    net = model()
    plan = {f"{i}.0": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)}
    parallelize_module(net, grid.mesh("tensor"), plan)
    for block in net:
        fully_shard(block, mesh=grid.mesh("data"))
    fully_shard(net, mesh=grid.mesh("data"))
    train(grid, net)
    compare(list(net.named_parameters()))


def test_everything_follows_the_coordinate(make_grid, world):
    shapes = factorings(world.size)
    for shape in {shapes[0], shapes[len(shapes) // 2], shapes[-1]}:
        with make_grid(data=shape.data, pipeline=shape.pipeline, tensor=shape.tensor) as grid:
            check_grid(grid, world)


def check_grid(grid, world):
    for dims in (("data",), ("pipeline", "tensor"), ("tensor",), ("data", "pipeline", "tensor")):
        ranks = grid.ranks(*dims)
        comm, group, engine = grid.comm(*dims), grid.group(*dims), grid.engine(*dims)
        assert world.rank in ranks
        assert comm.allgather(world.rank) == list(ranks)
        assert dist.get_process_group_ranks(group) == list(ranks)
        assert engine.allgather(torch.tensor([world.rank])).tolist() == list(ranks)
        mesh = grid.mesh(*dims)
        assert mesh.mesh_dim_names == dims
        assert mesh.mesh.flatten().tolist() == list(ranks)
    assert grid.comm("data") is grid.comm("data")
    told = world.comm.allgather((tuple(grid.coordinate), grid.describe()))
    assert len({at for at, _ in told}) == world.size
    assert len({text for _, text in told}) == 1


def test_dims_are_checked(make_grid, world):
    grid = make_grid()
    for call in (grid.ranks, grid.comm, grid.group, grid.mesh, grid.engine):
        with pytest.raises(ConfigError, match=r"'nosuch'.*'data', 'pipeline', 'tensor'"):
            call("nosuch")
        with pytest.raises(ConfigError, match="each once"):
            call("data", "data")
        with pytest.raises(ConfigError, match="one or more"):
            call()
    grid.close()
    grid.close()
    with pytest.raises(ConfigError, match="grid is closed"):
        grid.comm("data")


def test_misfits_are_refused_on_all_ranks(make_grid, world):
    with pytest.raises(ConfigError, match=f"there are {world.size}; possible are data="):
        make_grid(data=world.size + 1)
    with pytest.raises(ConfigError, match="pipeline=0 must be a whole number"):
        make_grid(pipeline=0)
    if world.size > 1:
        with pytest.raises(ConfigError, match=r"rank 0 gives .*rank 1 gives"):
            make_grid(pipeline=1 if world.rank == 0 else world.size)
    with pytest.raises(ConfigError, match="timeout_s=0"):
        hpc.Grid(world, timeout_s=0)


def test_a_default_group_of_the_script_is_refused(world):
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"made a default process group itself \(gloo\)"):
        hpc.Grid(world)
    dist.destroy_process_group()


def test_a_group_that_the_script_destroyed_is_opened_again(make_grid, world):
    make_grid()
    dist.destroy_process_group()
    grid = make_grid()
    assert dist.get_process_group_ranks(grid.group("data")) == list(grid.ranks("data"))
