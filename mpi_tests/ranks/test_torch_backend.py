"""The torch backend: every collective, op and dtype against expected values, at any n."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpctrain.errors import CollectiveError, ConfigError, TimedOutError
from hpctrain.torch_backend import open_default_group
from mpi_tests.ranks.engines_kit import DTYPES, close, values

_c10d = distributed_c10d
# Newer versions of torch have renamed them, and warn of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPS = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PREMUL_SUM": operator.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": operator.mul,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


@pytest.fixture(scope="module", autouse=True)
def default_group(world):
    before = dist.is_initialized()  # by a test that met the limits of an older torch
    opened = open_default_group(world, timeout_s=60)
    assert dist.get_backend() == opened.backend == "hpctrain"
    yield opened
    opened.close()
    assert dist.is_initialized() == before


def allowed(name, dtype):
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if name in ("BAND", "BOR", "BXOR"):
        return whole
    if name in ("AVG", "PREMUL_SUM"):
        return not whole
    return not (name in ("MIN", "MAX") and dtype.is_complex)


def op_of(name):
    return dist._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def expected(size, name, shape, dtype):
    every = [values(rank, shape, dtype) for rank in range(size)]
    if dtype is torch.bool:
        every = [part.to(torch.uint8) for part in every]
        return functools.reduce(torch.maximum if name == "SUM" else OPS[name], every).to(dtype)
    total = functools.reduce(OPS[name], every)
    if name == "AVG":
        return total / size
    return total * 0.5 if name == "PREMUL_SUM" else total


CASES = [case for case in itertools.product(OPS, DTYPES) if allowed(*case)]


def test_all_reduce_of_every_op_and_dtype(world):
    for name, dtype in CASES:
        if name == "PRODUCT" and dtype.is_complex:
            continue  # torch itself refuses it here
        tensor = values(world.rank, dtype=dtype)
        dist.all_reduce(tensor, op_of(name))
        close(tensor, expected(world.size, name, (3, 4), dtype))


def test_reduce_scatter_of_every_op_and_dtype(world):
    size, rank = world.size, world.rank
    for name, dtype in CASES:
        shape = (size * 2, 3)
        want = expected(size, name, shape, dtype)[rank * 2 : rank * 2 + 2]
        given = values(rank, shape, dtype)
        output = torch.empty(2, 3, dtype=dtype)
        reduce_scatter_single(output, given, op_of(name))
        close(output, want)
        close(given, values(rank, shape, dtype))
        output = torch.empty(2, 3, dtype=dtype)
        dist.reduce_scatter(output, list(given.chunk(size)), op_of(name))
        close(output, want)


def test_reduce_to_each_root(world):
    for root, name in itertools.product(range(world.size), ("SUM", "AVG", "PRODUCT")):
        tensor = values(world.rank)
        dist.reduce(tensor, root, op_of(name))
        own = world.rank == root
        close(
            tensor, expected(world.size, name, (3, 4), tensor.dtype) if own else values(world.rank)
        )


def test_moving_every_dtype(world):
    size, rank = world.size, world.rank
    for dtype in DTYPES:
        every = [values(r, dtype=dtype) for r in range(size)]
        root = size - 1
        tensor = values(rank, dtype=dtype)
        dist.broadcast(tensor, root)
        close(tensor, every[root])
        parts = [torch.empty(3, 4, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, every[rank])
        close(torch.stack(parts), torch.stack(every))
        joined = torch.empty(size * 3, 4, dtype=dtype)
        all_gather_single(joined, every[rank])
        close(joined, torch.cat(every))
        mine = [torch.empty(3, 4, dtype=dtype) for _ in range(size)] if rank == root else None
        dist.gather(every[rank], mine, root)
        if mine is not None:
            close(torch.stack(mine), torch.stack(every))
        came = torch.empty(3, 4, dtype=dtype)
        dist.scatter(came, [v.clone() for v in every] if rank == root else None, root)
        close(came, every[rank])


def test_all_to_all(world):
    size, rank = world.size, world.rank

    def rows(sender, receiver):
        return (sender * 2 + receiver) % 3

    sent = [torch.full((rows(rank, r), 2), 10.0 * rank + r) for r in range(size)]
    came = [torch.empty(rows(r, rank), 2) for r in range(size)]
    dist.all_to_all(came, sent)
    for sender, part in enumerate(came):
        close(part, torch.full((rows(sender, rank), 2), 10.0 * sender + rank))
    splits = [rows(rank, r) for r in range(size)], [rows(r, rank) for r in range(size)]
    output = torch.empty(sum(splits[1]), 2)
    dist.all_to_all_single(output, torch.cat(sent), splits[1], splits[0])
    close(output, torch.cat(came))
    equal = torch.empty(size)
    dist.all_to_all_single(equal, torch.arange(float(size)) + 100 * rank)
    close(equal, torch.tensor([100.0 * r + rank for r in range(size)]))


def test_sizes_that_differ_by_rank(world):
    size, rank = world.size, world.rank
    parts = [torch.empty(r, 2) for r in range(size)]
    dist.all_gather(parts, torch.full((rank, 2), float(rank)))
    for r, part in enumerate(parts):
        close(part, torch.full((r, 2), float(r)))
    given = [torch.full((r + 1,), float(rank + r)) for r in range(size)]
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, given)
    close(output, torch.full((rank + 1,), float(sum(r + rank for r in range(size)))))


def test_layouts_and_nothing(world):
    size = world.size
    for tensor in (values(world.rank, (4, 6)).t(), values(world.rank, (4, 6))[:, ::2]):
        want = sum(
            values(r, (4, 6)).t() if tensor.shape[0] == 6 else values(r, (4, 6))[:, ::2]
            for r in range(size)
        )
        strided = tensor.clone(memory_format=torch.preserve_format)
        dist.all_reduce(strided)
        close(strided, want)
    wide = torch.zeros(size * 2, 6)[:, ::2]
    all_gather_single(wide, values(world.rank, (2, 6), torch.float32)[:, ::2])
    close(wide, torch.cat([values(r, (2, 6), torch.float32)[:, ::2] for r in range(size)]))
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    all_gather_single(torch.empty(0, 3), empty)
    reduce_scatter_single(torch.empty(0, 3), torch.empty(0, 3))
    scalar = torch.tensor(float(world.rank))
    dist.all_reduce(scalar, dist.ReduceOp.MAX)
    assert scalar == size - 1


def test_functional_collectives(world):
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    size, rank = world.size, world.rank
    summed = funcol.all_reduce(torch.full((2,), float(rank)), "sum", group)
    close(funcol.wait_tensor(summed), torch.full((2,), float(sum(range(size)))))
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    joined = gather(torch.full((1, 2), float(rank)), 0, group)
    close(
        funcol.wait_tensor(joined), torch.arange(float(size))[:, None].expand(size, 2).contiguous()
    )
    part = scatter(torch.arange(float(size)), "avg", 0, group)
    close(funcol.wait_tensor(part), torch.tensor([float(rank)]))
    moved = funcol.all_to_all_single(torch.full((size,), float(rank)), None, None, group)
    close(funcol.wait_tensor(moved), torch.arange(float(size)))


def test_coalesced(world):
    size, rank = world.size, world.rank
    outputs, inputs = (
        [torch.empty(size), torch.empty(size * 2)],
        [torch.full((k,), float(rank)) for k in (1, 2)],
    )
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, given in zip(outputs, inputs, strict=True):
            all_gather_single(output, given)
    manager.wait()
    close(outputs[0], torch.arange(float(size)))
    close(outputs[1], torch.arange(float(size)).repeat_interleave(2))
    tensors = [torch.ones(2), torch.ones(3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all((tensor == size).all() for tensor in tensors)


def test_messages_in_a_ring(world):
    size, rank = world.size, world.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return
    for count in (0, 3, 300_000):  # the last one is too long to be sent before it is awaited
        sent, came = torch.full((count,), float(rank)), torch.empty(count)
        ops = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, came, left)]
        works = dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
        close(came, torch.full((count,), float(left)))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((4,), rank), right)
        strided = torch.zeros(4, 2, dtype=torch.int64)
        dist.irecv(strided[:, 1], left)
    manager.wait()
    close(strided[:, 1], torch.full((4,), left))
    assert (strided[:, 0] == 0).all()


def test_message_from_anybody(world):
    if world.size == 1:
        return
    if world.rank == 0:
        seen = set()
        for _ in range(world.size - 1):
            came = torch.empty(1)
            seen.add(dist.recv(came))
            assert came.item() in range(1, world.size)
        assert seen == set(range(1, world.size))
    else:
        dist.send(torch.tensor([float(world.rank)]), 0)


def test_a_receiver_s_gradient_leaf_is_written(world):
    if world.size == 1 or world.rank > 1:
        return
    if world.rank == 0:
        dist.send(torch.arange(3.0), 1)
    else:
        leaf = torch.zeros(3, requires_grad=True)
        dist.recv(leaf, 0)
        close(leaf.detach(), torch.arange(3.0))


def test_a_message_that_never_comes_is_named(world):
    if world.size == 1:
        return
    if world.rank == 0:
        work = dist.irecv(torch.empty(3), 1, tag=5)
        from datetime import timedelta

        with pytest.raises(TimedOutError, match=r"recv of float32 \(3,\) from rank 1 .*tag 5"):
            work.wait(timedelta(seconds=0.05))


def test_a_message_of_another_size_is_refused(world):
    if world.size == 1:
        return
    if world.rank == 0:
        dist.send(torch.empty(2), 1, tag=6)
    elif world.rank == 1:
        with pytest.raises(CollectiveError, match="sent 8 bytes, the tensor that receives has 12"):
            dist.recv(torch.empty(3), 0, tag=6)


def test_groups_in_groups(world):
    size, rank = world.size, world.rank
    evens = dist.new_group(list(range(0, size, 2)))
    backwards = dist.new_group(list(reversed(range(size))))
    if rank % 2 == 0:
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=evens)
        assert tensor == sum(range(0, size, 2))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=backwards)
    assert sorted(o["rank"] for o in objects) == list(range(size))
    dist.barrier()


def test_differing_calls_are_refused_on_all_ranks(world):
    if world.size == 1:
        return
    odd = world.rank == 1
    with pytest.raises(
        CollectiveError, match=r"rank 0 calls all_reduce SUM float32 \(2,\).*rank 1"
    ):
        dist.all_reduce(torch.zeros(3 if odd else 2))
    with pytest.raises(CollectiveError, match=r"rank 0 calls broadcast .*rank 1 calls all_reduce"):
        dist.all_reduce(torch.zeros(2)) if odd else dist.broadcast(torch.zeros(2), 0)
    with pytest.raises(CollectiveError, match="MAX"):
        dist.all_reduce(torch.zeros(2), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    with pytest.raises(ConfigError, match=r"rank 1, .*times as many elements"):
        dist.group.WORLD._allgather_base(
            torch.empty(2 * world.size + odd), torch.empty(2), _c10d.AllgatherOptions()
        )
    tensor = torch.ones(1)  # the group still works
    dist.all_reduce(tensor)
    assert tensor == world.size


def test_what_cannot_be_done_is_refused(world):
    with pytest.raises(ConfigError, match=r"BAND of torch\.float32"):
        dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND)
    with pytest.raises(ConfigError, match="average of int64"):
        dist.all_reduce(torch.zeros(2, dtype=torch.int64), dist.ReduceOp.AVG)
    with pytest.raises(ConfigError, match="tag=-3"):
        dist.group.WORLD.send([torch.zeros(1)], 0, -3)
    with pytest.raises(ConfigError, match="rank 99 is not in the group"):
        dist.group.WORLD.recv([torch.zeros(1)], 99, 0)


def test_another_default_group_is_refused(world, default_group):
    shared = open_default_group(world)  # a second user of the same group
    shared.close()
    assert dist.is_initialized()
