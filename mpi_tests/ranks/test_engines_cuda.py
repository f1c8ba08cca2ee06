"""Engines on CUDA tensors; skipped where there is no GPU. Two ranks may share one, on `mpi`."""

from __future__ import annotations

import itertools

import pytest
import torch
from mpi4py import MPI

import hpctrain as hpc
from hpctrain.engines import Op, choose, create, probe_horovod
from hpctrain.engines import differentiable as diff
from hpctrain.errors import ConfigError
from mpi_tests.ranks.engines_kit import DTYPES, OPS, allowed, close, expected, values

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

NAMES = ["mpi", "horovod", "torch"] + (["local"] if MPI.COMM_WORLD.Get_size() == 1 else [])


@pytest.fixture(scope="module")
def gpu_world():
    with hpc.init(seed=7, device="cuda", allow_shared_device=True) as world:
        yield world


@pytest.fixture(scope="module")
def gpu_engines(gpu_world):
    engines = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(params=NAMES)
def gpu_engine(request, gpu_world, gpu_engines):
    name = request.param
    users = [(info.host, info.device.uuid) for info in gpu_world.ranks]
    shared = len(set(users)) < len(users)
    try:
        choose(
            name,
            device_kind="cuda",
            size=gpu_world.size,
            horovod=probe_horovod(),
            shared_devices=shared,
        )
    except ConfigError as error:
        pytest.skip(str(error))
    if name not in gpu_engines:
        gpu_engines[name] = create(gpu_world, name, timeout_s=60)
    return gpu_engines[name]


def test_allreduce_of_every_dtype(gpu_engine):
    for op, dtype in itertools.product(OPS, DTYPES):
        if allowed(op, dtype):
            tensor = values(gpu_engine.rank, dtype=dtype).cuda()
            gpu_engine.allreduce_(tensor, op)
            close(tensor.cpu(), expected(gpu_engine.size, op, dtype=dtype))


def test_cpu_tensors_travel_too(gpu_engine):
    for dtype in DTYPES:
        tensor = values(gpu_engine.rank, dtype=dtype)
        close(gpu_engine.allreduce_(tensor), expected(gpu_engine.size, Op.SUM, dtype=dtype))
    assert gpu_engine.allgather(torch.tensor(gpu_engine.rank)).device.type == "cpu"


def test_moving_and_unequal_sizes(gpu_engine):
    size, rank = gpu_engine.size, gpu_engine.rank
    for dtype in DTYPES:
        sent = values(rank, dtype=dtype).cuda()
        close(gpu_engine.broadcast_(sent, size - 1).cpu(), values(size - 1, dtype=dtype))
        gathered = gpu_engine.allgather(values(rank, (rank, 2), dtype).cuda())
        assert gathered.device == gpu_engine.device
        close(gathered.cpu(), torch.cat([values(r, (r, 2), dtype) for r in range(size)]))
    splits = [(rank + to) % 2 for to in range(size)]
    came, received = gpu_engine.alltoall(torch.full((sum(splits), 3), rank).cuda(), splits)
    assert received == splits  # symmetric
    assert came[:, 0].tolist() == [r for r in range(size) if (r + rank) % 2]


def test_reduce_scatter(gpu_engine):
    shapes = ((5, 2), (1,), (gpu_engine.size * 2, 3))
    for op, shape in itertools.product(OPS, shapes):
        part = gpu_engine.reduce_scatter(values(gpu_engine.rank, shape).cuda(), op)
        whole = expected(gpu_engine.size, op, shape)
        close(part.cpu(), whole.tensor_split(gpu_engine.size)[gpu_engine.rank])


def test_asynchronous_after_work_on_the_stream(gpu_engine):
    """What is sent is what the stream will have written, and what is read is what has come."""
    size, rank = gpu_engine.size, gpu_engine.rank
    heavy = torch.rand(2000, 2000, device="cuda")
    tensors, works = [], []
    for i in range(8):
        for _ in range(5):
            heavy = (heavy @ heavy).clamp(0, 1)
        tensors.append(torch.full((1000,), float(rank + i), device="cuda") + heavy[0, 0] * 0)
        works.append(gpu_engine.allreduce_async_(tensors[-1], Op.AVERAGE, what=f"t{i}"))
    blocking = gpu_engine.allreduce_(torch.ones(3, device="cuda"))
    for i, work in enumerate(works):
        work.wait()
        doubled = tensors[i] * 2
        assert set(doubled.tolist()) == {(size - 1) + 2.0 * i}
    assert blocking.tolist() == [size] * 3


def test_on_a_side_stream(gpu_engine):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.rand(4000, 4000, device="cuda").mul_(0).add_(gpu_engine.rank)
        gpu_engine.allreduce_(tensor)
        total = tensor.sum().item()
    assert total == pytest.approx(16e6 * gpu_engine.size * (gpu_engine.size - 1) / 2)


def test_average_of_float16_does_not_overflow(gpu_engine):
    tensor = torch.full((4,), 60000.0, dtype=torch.float16, device="cuda")
    assert gpu_engine.allreduce_(tensor, Op.AVERAGE).isfinite().all()


def test_split_and_gradients(gpu_engine):
    part = gpu_engine.split(min(gpu_engine.rank, 1))
    assert part is not None
    assert part.allreduce_(torch.ones(2, device="cuda")).tolist() == [part.size] * 2
    part.close()
    mine = torch.ones(gpu_engine.rank + 1, 2, device="cuda", requires_grad=True)
    diff.allgather(gpu_engine, mine).sum().backward()
    assert set(mine.grad.flatten().tolist()) == {gpu_engine.size}


def test_another_gpu_is_refused(gpu_engine):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    other = (gpu_engine.device.index + 1) % torch.cuda.device_count()
    with pytest.raises(ConfigError, match="move it there"):
        gpu_engine.allreduce_(torch.ones(2, device=f"cuda:{other}"))
