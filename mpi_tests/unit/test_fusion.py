"""The layout of the flat buffers, and the arithmetic of the window."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.fusion import Arena, ParameterSpec, plan
from hpctrain.fusion.layout import CONTROL_WORDS
from hpctrain.fusion.usage import Watcher, complete
from hpctrain.replica.policy import bucket_size
from hpctrain.replica.window import Turn, Window
from hpctrain.update.sliced import plan_messages, slice_of

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "complex128": 16}
specs = st.lists(
    st.builds(
        lambda numel, dtype: ParameterSpec(
            name="p", numel=numel, dtype=dtype, device="cpu", itemsize=ITEMSIZE[dtype]
        ),
        st.integers(0, 300),
        st.sampled_from(sorted(ITEMSIZE)),
    ),
    max_size=30,
)


@given(specs, st.one_of(st.none(), st.integers(1, 4000)))
def test_every_gradient_has_a_place_of_its_own(parameters, bucket_bytes):
    buckets = plan(parameters, bucket_bytes=bucket_bytes)
    assert sorted(i for bucket in buckets for i in bucket.members) == list(range(len(parameters)))
    taken: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for bucket in buckets:
        spans = taken.setdefault((bucket.dtype, bucket.device), [])
        for index, offset in zip(bucket.members, bucket.offsets, strict=True):
            assert parameters[index].dtype == bucket.dtype
            assert (offset * parameters[index].itemsize) % 64 == 0
            spans.append((offset, offset + parameters[index].numel))
        spans.append((bucket.flags, bucket.flags + len(bucket.members)))
        if bucket.control is not None:
            spans.append((bucket.control, bucket.control + CONTROL_WORDS))
        assert all(bucket.start <= a and b <= bucket.stop for a, b in spans[-1:])
    for spans in taken.values():
        spans = sorted(span for span in spans if span[0] < span[1])
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


@given(specs, st.one_of(st.none(), st.integers(1, 4000)))
def test_counts_travel_once_and_exactly(parameters, bucket_bytes):
    (carrier,) = [b for b in plan(parameters, bucket_bytes=bucket_bytes) if b.control is not None]
    assert carrier.dtype in ("float32", "float64")


@given(specs, st.integers(1, 4000))
def test_buckets_are_closed_when_they_are_full(parameters, bucket_bytes):
    for bucket in plan(parameters, bucket_bytes=bucket_bytes):
        sizes = [parameters[i].numel * parameters[i].itemsize for i in bucket.members]
        assert sum(sizes[:-1]) < bucket_bytes


@given(specs)
def test_gradients_travel_in_reverse_order(parameters):
    for bucket in plan(parameters, bucket_bytes=None):
        assert list(bucket.members) == sorted(bucket.members, reverse=True)


def test_gradients_are_views_and_strays_come_back():
    model = torch.nn.Linear(3, 2)
    arena = Arena(["w", "b"], list(model.parameters()), bucket_bytes=None)
    arena.attach()
    flat = next(iter(arena.flats.values()))
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert sorted(arena.uncollected()) == ["b", "w"]
    arena.collect()
    assert arena.uncollected() == []
    model.zero_grad()  # sets gradients to None
    model(torch.ones(1, 3)).sum().backward()
    assert not arena.is_attached()
    arena.collect()
    assert arena.is_attached()
    assert model.weight.grad.tolist() == [[1.0] * 3] * 2
    arena.close()


class Arrived:
    def wait(self):
        pass


@pytest.mark.parametrize(("frozen", "taken", "needs_flags"), [(1, 2, False), (0, 1, True)])
def test_flags_are_read_only_for_what_could_have_been_used(frozen, taken, needs_flags):
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(3))
    model[0].weight.requires_grad_(not frozen)
    arena = Arena("abc", list(model.parameters()), bucket_bytes=None)
    arena.attach()
    sum(model[i](torch.ones(1, 2)).sum() for i in range(3 - taken, 3)).backward()
    arena.collect()
    arena.arm(lambda message, num_gradients, text: Arrived(), [1.0] * CONTROL_WORDS, overlap=False)
    used = arena.finish().used()
    assert used == (frozenset(range(3 - taken, 3)) if needs_flags else None)
    assert (model[0].weight.grad is None) == bool(frozen)
    arena.close()


@given(st.permutations(range(6)), st.integers(0, 6))
def test_what_was_not_seen_comes_last_and_backwards(order, count):
    seen = order[:count]
    done = complete(seen, 6)
    assert done[:count] == seen
    assert done[count:] == sorted(set(range(6)) - set(seen), reverse=True)


def test_the_order_is_that_of_the_last_time():
    a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    watcher = Watcher([a, b])
    (a * b).sum().backward()
    watcher.forget()
    for parameter in (a, b, a):  # added to twice: ready when the last part is there
        parameter.sum().backward()
    assert watcher.stop() == [1, 0]
    a.sum().backward()
    assert watcher.stop() == []


def window(accumulate=1, calls=()):
    made = Window(accumulate)
    for weight in calls:
        made.admit(None if weight is None else int(weight))
        made.add(1.0 if weight is None else weight, weighted=weight is not None)
    return made


@given(st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=6))
def test_an_accumulation_divides_by_all_samples(ranks):
    windows = [window(3, map(float, counts)) for counts in ranks]
    total = sum(w.weight for w in windows)
    calls = sum(w.calls for w in windows)
    assert windows[0].calls == windows[0].accumulate
    assert windows[0].divisor(total, float(calls), float(len(ranks))) == sum(map(sum, ranks))


@given(st.integers(1, 6), st.integers(1, 5))
def test_without_counts_calls_add_up_and_ranks_are_averaged(size, num_calls):
    w = window(1, [None] * num_calls)
    assert w.divisor(float(size * num_calls), float(size * num_calls), float(size)) == size


def test_what_may_follow_what():
    w = window(2, [None])
    with pytest.raises(ConfigError, match="all of them or to none"):
        w.admit(3)
    w.add(1.0, weighted=False)
    w.mark_exchanged()
    with pytest.raises(ConfigError, match="without a step"):
        w.admit(None)
    w.clear()
    assert w.admit(3) == 3.0
    w.broken = "KeyboardInterrupt"
    with pytest.raises(ConfigError, match="interrupted by KeyboardInterrupt"):
        w.admit(None)
    with pytest.raises(ConfigError, match="accumulate=0"):
        Window(0)


@given(st.integers(0, 10**10))
def test_gradients_are_cut_into_pieces_worth_sending(total):
    size = bucket_size(total)
    assert 4 << 20 <= size <= 25 << 20
    assert total < 200 << 20 or size == 25 << 20


@given(st.integers(1, 5), st.integers(2, 6))
def test_the_last_batch_ends_with_as_many_steps_as_the_one_before(pieces, num_batches):
    turn, ends = Turn(), []
    for number in range(num_batches):
        turn.begin(last=number == num_batches - 1)
        ends += [turn.count_step() for _ in range(pieces)]
    assert ends == [False] * (pieces * num_batches - 1) + [True]
    turn.closed = True
    with pytest.raises(ConfigError, match=f"earlier batches had {pieces} step"):
        turn.admit()
    turn.begin(last=False)
    turn.admit()


def test_nobody_knows_how_many_steps_the_first_batch_has():
    turn = Turn()
    turn.begin(last=True)
    assert [turn.count_step() for _ in range(3)] == [False] * 3
    turn.begin(last=True)
    assert [turn.count_step() for _ in range(3)] == [False, False, True]
    turn.begin(last=False)  # a batch that was not stepped says nothing
    turn.begin(last=True)
    assert [turn.count_step() for _ in range(3)] == [False, False, True]


@given(specs, st.one_of(st.none(), st.integers(1, 4000)), st.integers(1, 5))
def test_slices_of_buckets_cover_every_element_once(parameters, bucket_bytes, num_ranks):
    """Equal slices, and messages of weights in which each element of each parameter is once."""
    buckets = plan(parameters, bucket_bytes=bucket_bytes, num_parts=num_ranks)
    sizes = [one.numel for one in parameters]
    for bucket in buckets:
        slices = [slice_of(bucket, rank, num_ranks) for rank in range(num_ranks)]
        assert slices[0][0] == bucket.start
        assert slices[-1][1] == bucket.flags
        assert all(a[1] == b[0] for a, b in pairwise(slices))
    messages = plan_messages(buckets, sizes, num_ranks, message_bytes=num_ranks * 512)
    taken = {
        (index, element)
        for message in messages
        for part in message.parts
        for index, first, last, _ in part
        for element in range(first, last)
    }
    parts = [part for message in messages for part in message.parts]
    assert len(taken) == sum(sizes) == sum(b - a for part in parts for _, a, b, _ in part)
    for message in messages:
        assert message.length * num_ranks * message.dtype.itemsize <= num_ranks * 512
        ends = [at + b - a for part in message.parts for _, a, b, at in part]
        assert max(ends) <= message.length
