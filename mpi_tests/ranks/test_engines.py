"""The contract of all engines, on every one that is built; expectations from rank and size."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

import hpctrain as hpc
from hpctrain.engines import ENGINES, HorovodOptions, Op, choose, create
from hpctrain.engines.base import Engine
from hpctrain.engines.horovod_state import probe_horovod
from hpctrain.errors import CollectiveError, ConfigError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
NUMBERS = (*FLOATS, *COMPLEX, *INTEGERS)
DTYPES = (*NUMBERS, torch.bool)


class Diary:
    """A watch that writes down what it is told."""

    def __init__(self):
        self.calls: list[str] = []
        self.depth = 0

    def enter(self, call):
        self.depth += 1
        self.calls.append(call)

    def leave(self):
        self.depth -= 1


@pytest.fixture(scope="session")
def world():
    with hpc.init(seed=7, device="cpu", num_threads=1) as made:
        yield made


@pytest.fixture(scope="session")
def made(world):
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(params=list(ENGINES))
def engine(request, world, made):
    name = request.param
    if name == "local" and world.size > 1:
        pytest.skip("local is for one rank")
    if name == "horovod" and not probe_horovod().built:
        pytest.skip("Horovod is not built")
    if name not in made:
        made[name] = create(world, name, timeout_s=60)
    return made[name]


def values(rank, shape=(3, 4), dtype=torch.float64):
    """Small whole numbers that differ by rank and place and are exact in every dtype."""
    count = torch.Size(shape).numel()
    plain = (torch.arange(count) + rank) % 5
    if dtype is torch.bool:
        return (plain > 2).reshape(shape)
    result = plain.to(dtype)
    return (result + 1j * rank if dtype.is_complex else result).reshape(shape)


def expected(size, op, shape=(3, 4), dtype=torch.float64):
    """What all ranks together give, by torch on one process."""
    every = torch.stack([values(rank, shape, dtype) for rank in range(size)])
    if dtype is torch.bool:
        return every.all(0) if op is Op.MIN else every.any(0)
    if op in (Op.MIN, Op.MAX):
        return every.amin(0) if op is Op.MIN else every.amax(0)
    total = functools.reduce(operator.add, every)
    return total / size if op is Op.AVERAGE else total


def close(got, want):
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("op", [Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX])
def test_allreduce_of_every_dtype(engine, op):
    for dtype in DTYPES:
        tensor = values(engine.rank, dtype=dtype)
        whole = not (dtype.is_floating_point or dtype.is_complex)
        if (op is Op.AVERAGE and whole) or (op in (Op.MIN, Op.MAX) and dtype.is_complex):
            with pytest.raises(ConfigError, match=str(dtype).removeprefix("torch.")):
                engine.allreduce_(tensor, op)
            continue
        assert engine.allreduce_(tensor, op) is tensor
        close(tensor, expected(engine.size, op, dtype=dtype))


def test_reduce_scatter_of_every_dtype_and_remainder(engine):
    for op in (Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX):
        for dtype in (torch.bfloat16, torch.float64, torch.complex64, torch.int16, torch.bool):
            whole = not (dtype.is_floating_point or dtype.is_complex)
            if (op is Op.AVERAGE and whole) or (op in (Op.MIN, Op.MAX) and dtype.is_complex):
                continue
            for shape in ((5, 2), (1,), (engine.size * 2, 3)):
                given = values(engine.rank, shape, dtype)
                before = given.clone()
                part = engine.reduce_scatter(given, op)
                whole_result = expected(engine.size, op, shape, dtype)
                close(part, whole_result.tensor_split(engine.size)[engine.rank])
                close(given, before)


def test_moving_every_dtype(engine):
    size, rank = engine.size, engine.rank
    for dtype in DTYPES:
        root = size - 1
        close(engine.broadcast_(values(rank, dtype=dtype), root), values(root, dtype=dtype))
        gathered = engine.allgather(values(rank, (rank, 2), dtype))
        close(gathered, torch.cat([values(r, (r, 2), dtype) for r in range(size)]))


@pytest.mark.parametrize("empty", ["none", "one", "all"])
def test_unequal_sizes_with_zeros(engine, empty):
    size, rank = engine.size, engine.rank

    def num_rows(sender, receiver=0):
        if empty == "all" or (empty == "one" and sender == 0):
            return 0
        return (sender * 2 + receiver) % 3

    gathered = engine.allgather(values(rank, (num_rows(rank), 3)))
    close(gathered, torch.cat([values(r, (num_rows(r), 3)) for r in range(size)]))
    splits = [num_rows(rank, to) for to in range(size)]
    sent = torch.arange(sum(splits) * 2).view(-1, 2) + 100 * rank
    came, received = engine.alltoall(sent, splits)
    assert received == [num_rows(r, rank) for r in range(size)]
    parts = []
    for sender in range(size):
        counts = [num_rows(sender, to) for to in range(size)]
        theirs = torch.arange(sum(counts) * 2).view(-1, 2) + 100 * sender
        parts.append(theirs.split(counts)[rank])
    close(came, torch.cat(parts))


def layouts(rank):
    yield "transposed", values(rank, (4, 6)).t()
    yield "strided", values(rank, (4, 6))[:, ::2]
    yield "row", values(rank, (4, 6))[1]
    yield "0-d", values(rank, (4, 6))[1, 1]
    yield "channels last", values(rank, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    yield "conjugate", values(rank, (3,), torch.complex128).conj()
    yield "imaginary of a conjugate", values(rank, (3,), torch.complex128).conj().imag
    yield "empty", values(rank, (0, 6))


def test_layouts_in_place_leave_the_rest_alone(engine):
    for index, (name, view) in enumerate(layouts(engine.rank)):
        whole = view._base if view._base is not None else view
        every = [list(layouts(r))[index][1] for r in range(engine.size)]
        want = functools.reduce(operator.add, [each.clone() for each in every])
        total = whole.clone().sum() - view.clone().sum()
        engine.allreduce_(view)
        torch.testing.assert_close(view.clone(), want, msg=name)
        if name in ("strided", "row", "0-d"):
            torch.testing.assert_close(whole.sum() - view.sum(), total, msg=name)
        engine.broadcast_(view.mul_(engine.rank + 2), 0)
        torch.testing.assert_close(view.clone(), want * 2, msg=name)


def test_layouts_gathered(engine):
    for index, (name, view) in enumerate(layouts(engine.rank)):
        every = [list(layouts(r))[index][1] for r in range(engine.size)]
        want = torch.cat([each.reshape(1) if each.dim() == 0 else each for each in every])
        torch.testing.assert_close(engine.allgather(view), want.clone(), msg=name)


def test_asynchronous_keep_order_and_mix_with_blocking(engine):
    size, rank = engine.size, engine.rank
    tensors = [torch.full((50 + i,), float(rank + i)) for i in range(20)]
    works = [engine.allreduce_async_(t, what=f"t{i}") for i, t in enumerate(tensors)]
    blocking = engine.allreduce_(torch.tensor(rank + 1))
    assert blocking.item() == size * (size + 1) // 2
    for work in reversed(works):
        work.wait()
        work.wait()
    for i, tensor in enumerate(tensors):
        assert set(tensor.tolist()) == {size * (size - 1) / 2 + size * i}
    same = [torch.full((4,), float(rank + i)) for i in range(20)]
    for work in [engine.allreduce_async_(t, Op.AVERAGE) for t in same]:
        work.wait()
    assert [t[0].item() for t in same] == [(size - 1) / 2 + i for i in range(20)]


def test_asynchronous_on_what_needs_a_copy(engine):
    base = torch.zeros(4, 4, dtype=torch.bfloat16) + engine.rank
    work = engine.allreduce_async_(base[:, 1], Op.MAX)
    work.wait()
    assert base[:, 1].tolist() == [engine.size - 1.0] * 4
    assert base[:, 0].tolist() == [float(engine.rank)] * 4
    engine.allreduce_async_(torch.empty(0)).wait()


def test_small_chunks_give_the_same(engine, monkeypatch):
    monkeypatch.setattr(Engine, "chunk", 7)
    size, rank = engine.size, engine.rank
    for op in (Op.SUM, Op.AVERAGE, Op.MAX):
        close(engine.allreduce_(values(rank), op), expected(size, op))
        work_on = values(rank)
        engine.allreduce_async_(work_on, op).wait()
        close(work_on, expected(size, op))
        mine = expected(size, op).tensor_split(size)[rank]
        close(engine.reduce_scatter(values(rank), op), mine)
    close(engine.broadcast_(values(rank), size - 1), values(size - 1))
    gathered = engine.allgather(values(rank, (rank + 1, 3)))
    close(gathered, torch.cat([values(r, (r + 1, 3)) for r in range(size)]))
    splits = [to + rank for to in range(size)]
    came, received = engine.alltoall(values(rank, (sum(splits), 2)), splits)
    assert received == [rank + r for r in range(size)]
    sent = [values(r, (sum(to + r for to in range(size)), 2)) for r in range(size)]
    want = [s.split([to + r for to in range(size)])[rank] for r, s in enumerate(sent)]
    close(came, torch.cat(want))


def test_chunks_are_counted(engine, monkeypatch):
    monkeypatch.setattr(Engine, "chunk", 5)
    calls = []
    inner = engine._allreduce
    monkeypatch.setattr(engine, "_allreduce", lambda f, *a: (calls.append(len(f)), inner(f, *a)))
    engine.allreduce_(torch.ones(12))
    assert calls == [5, 5, 2]


def test_nan_wins_everywhere(engine, comm):
    for dtype in FLOATS:
        for op in (Op.MIN, Op.MAX):
            tensor = torch.tensor([1.0, -2.0, 0.0, float("inf")], dtype=dtype) * (engine.rank + 1)
            tensor[0] = float("nan") if engine.rank == engine.size - 1 else 1.0
            engine.allreduce_(tensor, op)
            assert tensor[0].isnan()
            bits = comm.allgather(tensor.view(torch.uint8).tolist())
            assert all(each == bits[0] for each in bits)


def test_ranks_are_bit_identical_and_so_are_two_runs(engine, comm):
    for count in (1, 37, 5000, 300_000):
        generator = torch.Generator().manual_seed(engine.rank)
        given = torch.randn(count, generator=generator)
        first = engine.allreduce_(given.clone(), Op.AVERAGE)
        digests = comm.allgather(hash(first.numpy().tobytes()) if count < 0 else first.sum().item())
        assert all(digest == digests[0] for digest in digests)
        root = comm.bcast(first.numpy(), root=0)
        assert first.numpy().tobytes() == root.tobytes()
        second = engine.allreduce_(given.clone(), Op.AVERAGE)
        if engine.name in ("local", "mpi"):
            assert torch.equal(first, second)


def refused(rank):
    yield torch.ones(3).to_sparse(), "sparse"
    yield torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"
    yield torch.ones(3, device="meta"), "meta"
    yield torch.ones(3).to(torch.float8_e4m3fn), "float8"
    yield torch.ones(1).expand(3), "clone"


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_refused_on_all_ranks_before_sending(engine, comm):
    for tensor, word in refused(engine.rank):
        with pytest.raises(ConfigError, match=word) as caught:
            engine.allreduce_(tensor)
        assert set(comm.allgather(str(caught.value))) == {str(caught.value)}
        if word != "clone":
            for call in (engine.allgather, engine.alltoall, engine.reduce_scatter):
                with pytest.raises(ConfigError, match=word):
                    call(tensor)
    for root in (-1, engine.size):
        with pytest.raises(ConfigError, match=f"root={root}"):
            engine.broadcast_(torch.ones(2), root)
    for call in (engine.alltoall, engine.reduce_scatter):
        with pytest.raises(ConfigError, match="no dimension"):
            call(torch.tensor(1.0))
    assert engine.allreduce_(torch.tensor(1)).item() == engine.size


def test_a_mistake_on_one_rank_is_refused_by_all(engine, comm):
    size, last = engine.size, engine.size - 1
    wrong = [1] * size if engine.rank != last else [2] * size
    with pytest.raises(ConfigError, match=f"rank {last}: alltoall: splits") as caught:
        engine.alltoall(torch.ones(size), wrong)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    with pytest.raises(ConfigError, match=f"rank {last}"):
        engine.alltoall(torch.ones(size, 2), [1] * (size + (engine.rank == last)))
    with pytest.raises(ConfigError, match=f"rank {last} gave color=-3"):
        engine.split(-3 if engine.rank == last else 0)
    if size > 1:
        dtype = torch.float32 if engine.rank != last else torch.float64
        for call in (engine.allgather, engine.alltoall):
            with pytest.raises(CollectiveError, match="float64") as mixed:
                call(torch.ones(size, 2, dtype=dtype))
            assert len(set(comm.allgather(str(mixed.value)))) == 1
    engine.barrier()


def test_split_into_unequal_parts_in_reverse_order(engine):
    rank, size = engine.rank, engine.size
    part = engine.split(min(rank, 1), key=-rank)
    members = [0] if rank == 0 else list(range(size - 1, 0, -1))
    assert part is not None
    assert (part.name, part.size, part.rank) == (engine.name, len(members), members.index(rank))
    gathered = part.allgather(torch.full((rank + 1,), rank))
    assert gathered.tolist() == [m for m in members for _ in range(m + 1)]
    came, received = part.alltoall(torch.arange(len(members)) + 10 * rank)
    assert came.tolist() == [10 * m + part.rank for m in members]
    assert received == [1] * len(members)
    assert part.broadcast_(torch.tensor(rank), part.size - 1).item() == members[-1]
    assert part.allreduce_(torch.tensor(rank)).item() == sum(members)
    rows = torch.arange(5) * (rank + 1)
    want = (torch.arange(5) * sum(m + 1 for m in members)).tensor_split(part.size)[part.rank]
    assert part.reduce_scatter(rows).tolist() == want.tolist()
    part.close()
    part.close()
    with pytest.raises(ConfigError, match="closed"):
        part.barrier()


def test_split_with_ranks_in_none(engine):
    inside = engine.rank != engine.size - 1 or engine.size == 1
    part = engine.split(5 if inside else None)
    assert (part is not None) == inside
    if part is not None:
        assert part.size == max(1, engine.size - 1)
        assert part.allreduce_(torch.ones(2)).tolist() == [part.size] * 2
        again = part.split(0)  # the same ranks once more
        assert again is not None
        assert again.allreduce_(torch.ones(1)).item() == part.size
        again.close()
        part.close()
    assert engine.allreduce_(torch.ones(1)).item() == engine.size


def test_the_watch_hears_the_same_on_all_ranks(engine, comm, monkeypatch):
    diary = Diary()
    monkeypatch.setattr(engine, "_watch", diary)
    engine.allreduce_(torch.ones(2, 3), what="bucket 0")
    engine.allreduce_async_(torch.ones(2), what="later").wait()
    engine.allgather(torch.ones(engine.rank, 2), what="rows")
    engine.broadcast_(torch.tensor(1))
    engine.barrier()
    assert diary.calls == [
        "allreduce bucket 0 float32 (2, 3)",
        "allreduce later float32 (2)",
        "allgather rows float32 (*, 2)",
        "broadcast int64 ()",
        "barrier",
    ]
    assert diary.depth == 0


def test_autograd_sees_what_was_overwritten(engine):
    weight = torch.ones(3, requires_grad=True)
    square = (weight * weight).sum()
    engine.broadcast_(weight)
    assert weight.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_adasum_where_there_is_one(engine):
    given = torch.zeros(2)
    given[engine.rank % 2] = 1.0 + engine.rank
    if Op.ADASUM not in engine.ops:
        with pytest.raises(ConfigError, match="adasum"):
            engine.allreduce_(given, Op.ADASUM)
        return
    assert engine.size & (engine.size - 1) == 0
    result = engine.allreduce_(given.clone(), Op.ADASUM)
    if engine.size == 1:
        close(result, given)
    elif engine.size == 2:  # orthogonal: Adasum is the sum
        close(result, torch.tensor([1.0, 2.0]))
    same = engine.allreduce_(torch.tensor([1.0, 2.0]), Op.ADASUM)
    close(same, torch.tensor([1.0, 2.0]))  # parallel: Adasum is the average


def test_create_chooses_and_refuses(world, comm, capfd):
    engine = create(world)
    assert engine.name == choose("auto", device_kind="cpu", size=world.size).name
    assert engine.reason in capfd.readouterr().err or world.rank != 0
    engine.close()
    last = world.size - 1
    with pytest.raises(ConfigError, match=f"rank {last} of .*mpi, horovod") as caught:
        create(world, "nccl" if world.rank == last else "mpi")
    assert len(set(comm.allgather(str(caught.value)))) == 1
    with pytest.raises(ConfigError, match="HorovodOptions"):
        create(world, "mpi", options=HorovodOptions(cycle_time_ms=2))


def test_horovod_starts_once(world, made, comm):
    if "horovod" not in made:
        pytest.skip("Horovod is not built")
    with pytest.raises(ConfigError, match="already runs with"):
        create(world, "horovod", options=HorovodOptions(cycle_time_ms=2))
    second = create(world, "horovod")
    assert second.allreduce_(torch.ones(1)).item() == world.size
    second.close()
    if world.size > 1:
        half = comm.Split(color=world.rank % 2, key=world.rank)
        with (
            hpc.init(seed=1, comm=half, device="cpu") as other,
            pytest.raises(ConfigError, match="already runs over"),
        ):
            create(other, "horovod")
        half.Free()


def test_two_engines_of_a_kind_do_not_meet(engine, world):
    if engine.name == "local":
        pytest.skip("it does not communicate")
    other = create(world, engine.name)
    first, second = torch.ones(3), torch.full((3,), 10.0)
    if world.rank % 2:  # asynchronous ones of different engines may start in any order
        later = other.allreduce_async_(second)
        sooner = engine.allreduce_async_(first)
    else:
        sooner = engine.allreduce_async_(first)
        later = other.allreduce_async_(second)
    sooner.wait()
    later.wait()
    assert first.tolist() == [world.size] * 3
    assert second.tolist() == [10.0 * world.size] * 3
    other.close()
