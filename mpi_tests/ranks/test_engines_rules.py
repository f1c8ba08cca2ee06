"""What engines promise besides values: equal bits, refusals, parts, the watch, the choice."""

from __future__ import annotations

import pytest
import torch

import hpctrain as hpc
from hpctrain.engines import HorovodOptions, Op, choose, create
from hpctrain.errors import CollectiveError, ConfigError
from mpi_tests.built import BUILT
from mpi_tests.ranks.engines_kit import FLOATS, close


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
        root = comm.bcast(first.numpy(), root=0)
        assert first.numpy().tobytes() == root.tobytes()
        second = engine.allreduce_(given.clone(), Op.AVERAGE)
        if engine.capabilities.fixed_order_sum:
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
    with pytest.raises(ConfigError, match="op='mean' is unknown; choose one of sum, average"):
        engine.allreduce_(torch.ones(2), "mean")
    assert engine.allreduce_(torch.tensor(float(engine.rank)), "min").item() == 0.0
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


def test_horovod_starts_once(world, engines, comm):
    if "horovod" not in BUILT:
        pytest.skip("Horovod is not built")
    assert engines["horovod"].size == world.size
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
