"""Data sets on their way: scatter, reshuffle, gather."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch

import hpctrain as hpc
from hpctrain.data.shuffle import Order
from hpctrain.errors import CollectiveError, ConfigError

Pair = namedtuple("Pair", "x y")
RECORD = np.dtype([("a", "<f4", (3,)), ("b", ">i2")])


def rows_of(total: int, dtype: object) -> object:
    """An array or a tensor whose row i can be told from row j."""
    if isinstance(dtype, torch.dtype):
        numbers = torch.arange(total * 6).reshape(total, 2, 3)
        return (numbers % 2).bool() if dtype is torch.bool else (numbers % 120).to(dtype)
    raw = np.arange(total * np.dtype(dtype).itemsize, dtype=np.int64).astype(np.uint8)
    if np.dtype(dtype).kind == "U":
        return np.array([f"sample {i}" for i in range(total)], dtype)
    return raw.view(dtype)


def same(got: object, want: object) -> None:
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, tuple | list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            same(one, other)
    elif isinstance(want, torch.Tensor | np.ndarray):
        assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape))
        if isinstance(want, torch.Tensor):
            assert torch.equal(got, want)
        else:
            assert got.tobytes() == want.tobytes()
    else:
        assert got == want


def pick(data: object, rows: np.ndarray) -> object:
    """The rows that a rank should have, the plain way."""
    if isinstance(data, dict):
        return {key: pick(part, rows) for key, part in data.items()}
    if isinstance(data, tuple):
        parts = [pick(part, rows) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    if isinstance(data, list):
        return [data[row] for row in rows]
    return data[torch.from_numpy(rows.copy())] if isinstance(data, torch.Tensor) else data[rows]


def scattered(world, data, *, root=0, **options):
    return hpc.scatter(world, data if world.rank == root else None, root=root, **options)


DTYPES = [
    "f2", "f4", "f8", "i1", "u2", ">i4", "i8", "c8", "bool", "M8[s]", "U12", "V5", RECORD,
    torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.complex64, torch.bool,
    torch.uint8, torch.float8_e4m3fn,
]  # fmt: skip


def test_every_dtype_arrives_bit_for_bit(world):
    for number, dtype in enumerate(DTYPES):
        data = rows_of(13, dtype)
        root = number % world.size
        shard = scattered(world, data, root=root, seed=5, chunk_bytes=64)
        same(shard.data, pick(data, shard.indices))


def ragged(total, make):
    return [make((i * 7) % 5 + 1) for i in range(total)]


FORMS = {
    "dict": lambda n: {"x": np.arange(n * 4.0).reshape(n, 4), "y": np.arange(n)},
    "tuple": lambda n: (torch.arange(n * 3).reshape(n, 3), np.arange(n, dtype="u1")),
    "named": lambda n: Pair(np.arange(n), {"deep": torch.arange(n)}),
    "ragged": lambda n: ragged(n, lambda k: np.full((k, 2), k, "f4")),
    "ragged tensors": lambda n: {"t": ragged(n, torch.ones), "n": np.arange(n)},
    "no dimension": lambda n: [torch.tensor(i) for i in range(n)],
    "objects": lambda n: [{"id": i, "text": "x" * (i % 9)} for i in range(n)],
    "mixed": lambda n: (np.arange(n), [f"sample {i}" for i in range(n)], ragged(n, np.zeros)),
    "strided": lambda n: np.arange(n * 8).reshape(8, n).T,
    "backwards": lambda n: (np.arange(n * 2).reshape(n, 2)[::-1], torch.arange(2 * n)[::2]),
    "nothing a row": lambda n: {"x": np.zeros((n, 0)), "y": np.arange(n)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_goes_out_is_reshuffled_and_comes_back(world, form):
    for total in (0, 1, world.size, 23):
        data = FORMS[form](total)
        shard = scattered(world, data, seed=3, chunk_bytes=256)
        assert (len(shard), shard.num_rows) == (total, len(range(world.rank, total, world.size)))
        same(shard.data, pick(data, shard.indices))
        hpc.reshuffle(world, shard)
        order = Order(kind="numpy", num_samples=total, seed=3, epoch=1)
        wanted = order.between(world.rank, total, world.size)
        assert shard.order == order
        assert np.array_equal(shard.indices, wanted)
        same(shard.data, pick(data, wanted))
        back = hpc.gather(world, shard.data, shard.indices, root=None, chunk_bytes=128)
        if total:
            same(back, pick(data, np.arange(total)))


def test_the_shares_follow_the_order_cyclically(world):
    data = np.arange(50)
    shard = scattered(world, data, seed=11, epoch=4)
    order = Order(kind="numpy", num_samples=50, seed=11, epoch=4)
    assert np.array_equal(shard.data, order.at(np.arange(world.rank, 50, world.size)))
    assert np.array_equal(shard.take(np.array([1, 0])), shard.data[[1, 0]])
    stored = scattered(world, data, shuffle=False)
    assert np.array_equal(stored.data, data[world.rank :: world.size])


def test_large_rows_and_small_messages(world):
    """A sample larger than a chunk, and than a message: counts of 31 bits are never exceeded."""
    data = {"x": np.random.default_rng(1).integers(0, 255, (7, 5000), np.uint8)}
    shard = scattered(world, data, seed=1, chunk_bytes=64, message_bytes=999)
    same(shard.data, pick(data, shard.indices))


def test_shared_memory_and_messages_give_the_same(world):
    rng = np.random.default_rng(2)
    data = {"x": rng.random((3000, 129)), "y": rng.integers(0, 9, 3000)}
    large = scattered(world, data, seed=1)  # 3 MB: through node-shared memory
    small = scattered(world, data, seed=1, chunk_bytes=2 << 20)  # less than two chunks: messages
    same(large.data, small.data)
    same(large.data, pick(data, large.indices))


def test_the_root_may_keep_its_data_or_let_them_go(world):
    data = np.arange(24.0).reshape(12, 2)
    last = world.size - 1
    kept = scattered(world, data, root=last, seed=1)
    free = scattered(world, data, root=last, seed=1, keep_whole=False)
    same(kept.data, free.data)
    if world.rank == last:
        assert not np.shares_memory(free.data, data)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (None, "None on root"),
        (np.array([1, "a"], object), "Python objects"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "different numbers of samples"),
        ([{"a": 1}, {"b": 1}], "same keys"),
        ({1: np.zeros(3)}, "is not a string"),
        ((), "empty tuple"),
        (np.ma.masked_array([1.0], [True]), "MaskedArray"),
        (np.float64(3), "cannot be a column"),
        (np.array(3), "no dimension"),
        (torch.zeros(3, requires_grad=True), "detach"),
        (torch.zeros(3, 3).to_sparse(), "sparse"),
    ],
)
def test_what_cannot_travel_is_refused_by_all(world, data, word):
    root = world.size - 1
    with pytest.raises(ConfigError, match=word) as caught:
        scattered(world, data, root=root)
    told = world.comm.allgather(str(caught.value))
    assert set(told) == {told[0]}
    assert f"rank {root} of {world.size}" in told[0]


def test_wrong_arguments_are_refused_by_all(world):
    with pytest.raises(ConfigError, match="is not a rank"):
        hpc.scatter(world, None, root=world.size)
    with pytest.raises(ConfigError, match="chunk_bytes=1"):
        scattered(world, np.zeros(3), chunk_bytes=1)
    if world.size > 1:
        with pytest.raises(ConfigError, match="given here as well"):
            hpc.scatter(world, np.zeros(3))
        with pytest.raises(ConfigError, match="epoch is 1 on rank 1"):
            scattered(world, np.zeros(3), epoch=int(world.rank == 1))


class Fading:
    """A sample that can be pickled once: to be measured, and no more when it is to be sent."""

    times = 0

    def __reduce__(self):
        self.times += 1
        if self.times > 1:
            raise ValueError("the disk is gone")
        return str, ()


def test_a_row_that_cannot_be_read_is_everyones_error(world):
    if world.size == 1:
        return  # nothing is sent
    with pytest.raises(CollectiveError, match=r"rank 0 of .* the disk is gone"):
        scattered(world, [Fading() for _ in range(9)])
    assert len(scattered(world, np.zeros(9))) == 9  # and nothing is left on the way


def test_a_shard_refuses_rows_that_it_does_not_have(world):
    shard = scattered(world, np.arange(10), seed=1)
    with pytest.raises(ConfigError, match="which this rank has"):
        shard.take(np.array([shard.num_rows]))
    assert len(shard.take(np.array([], np.int64))) == 0


def test_reshuffle_can_go_back_and_refuses_a_fixed_order(world):
    data = torch.arange(101)
    shard = scattered(world, data, seed=9)
    before = shard.data
    hpc.reshuffle(world, shard, epoch=7)
    if world.size > 1:
        assert not torch.equal(shard.data, before)
    hpc.reshuffle(world, shard, epoch=0)
    assert torch.equal(shard.data, before)
    with pytest.raises(ConfigError, match="shuffle=False"):
        hpc.reshuffle(world, scattered(world, data, shuffle=False))
