"""The loader on any number of ranks: every sample once, the same batches, resumable anywhere."""

from __future__ import annotations

import signal
from collections import deque
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

import hpctrain as hpc
from hpctrain.data.shuffle import Order
from hpctrain.errors import ConfigError, DataError
from mpi_tests.datasets import Broken, Counting, Fragile, Noisy, Parts, Shares, Turning


def numbers(size):
    return torch.arange(size), np.arange(size * 3).reshape(size, 3)


def gathered(world, loader, steps=None):
    """The samples of each batch, of all ranks; every rank must have its share of each."""
    batches = []
    for batch in loader:
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        assert len(first) == loader.num_samples
        parts = world.comm.allgather(first.tolist())
        sizes = [len(part) for part in parts]
        assert sum(sizes) == loader.global_samples
        assert max(sizes) - min(sizes) <= 1
        batches.append(sorted(i for part in parts for i in part))
        if len(batches) == steps:
            break
    return batches


def flat(batches):
    return sorted(i for batch in batches for i in batch)


@contextmanager
def first_ranks(world, count):
    """A world of the first ranks, or None on the others, which wait."""
    half = world.comm.Split(0 if world.rank < count else 1, world.rank)
    if world.rank < count:
        with hpc.init(seed=7, comm=half, device="cpu", num_threads=1) as some:
            yield some
    else:
        yield None
    half.Free()
    world.comm.Barrier()


@pytest.mark.parametrize("size", [0, 1, 3, 40, 97])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"shuffle": "keyed", "prefetch": 2}])
def test_every_sample_once_per_epoch(world, size, options):
    loader = hpc.Loader(world, numbers(size), global_batch=8, **options)
    epochs = [gathered(world, loader) for _ in range(2)]
    for number, batches in enumerate(epochs):
        assert flat(batches) == list(range(size)), number
        assert len(batches) == len(loader) == -(-size // 8)
    assert (loader.epoch, loader.consumed, loader.total) == (2, 0, 2 * size)
    if size == 97:
        assert (epochs[0] == epochs[1]) == (options.get("shuffle") is False)
        assert [len(batch) for batch in epochs[0]][-2:] == [5, 4]


def test_arrays_arrive_as_the_structure_they_have(world):
    x, y = numbers(40)
    loader = hpc.Loader(world, {"x": x, "rows": y}, global_batch=8, shuffle=False)
    for step, batch in enumerate(loader):
        mine = np.arange(8 * step + (world.rank - 8 * step) % world.size, 8 * step + 8, world.size)
        assert batch["x"].tolist() == mine.tolist()
        assert np.array_equal(batch["rows"].numpy(), y[mine])


def test_drop_last_and_keeping_a_short_last_batch(world):
    dropped = hpc.Loader(world, numbers(43), global_batch=8, drop_last=True)
    assert [len(b) for b in gathered(world, dropped)] == [8] * 5
    kept = hpc.Loader(world, numbers(43), global_batch=8, even_last=False)
    assert [len(b) for b in gathered(world, kept)] == [8] * 5 + [3]


def test_faster_ranks_have_more(world):
    weights = [1.0 + rank for rank in range(world.size)]
    loader = hpc.Loader(world, numbers(60), global_batch=30, weights=weights)
    for _ in loader:
        assert loader.num_samples == pytest.approx(30 * weights[world.rank] / sum(weights), abs=1)


# Stopping and going on


@pytest.mark.parametrize("shuffle", ["numpy", "keyed", False])
def test_an_epoch_goes_on_on_fewer_ranks_and_on_more(world, shuffle):
    """As 4 -> 3 -> 2 -> 1 -> 4: every remaining sample exactly once, in the batches of one run."""
    fleet = [*range(world.size, 0, -1), world.size]
    options = {"global_batch": 8, "shuffle": shuffle}
    expected = gathered(world, hpc.Loader(world, numbers(101), **options))
    seen, state = [], None
    for leg, count in enumerate(fleet):
        with first_ranks(world, count) as some:
            if some is not None:
                loader = hpc.Loader(some, numbers(101), **options)
                if state is not None:
                    loader.load_state_dict(state)
                last = leg == len(fleet) - 1
                seen += gathered(some, loader, steps=None if last else 2)
                state = loader.state_dict()
        state = world.comm.bcast(state, root=0)
        seen = world.comm.bcast(seen, root=0)
    assert seen == expected
    assert flat(seen) == list(range(101))
    assert (state["epoch"], state["consumed"], state["total"]) == (1, 0, 101)


def test_going_on_is_bit_exact(world):
    """Order within the batches too, on the same number of ranks, at every possible step."""

    def rest(loader):
        return [batch[0].tolist() for batch in loader]

    whole = rest(hpc.Loader(world, numbers(61), global_batch=8))
    for steps in range(9):
        first = hpc.Loader(world, numbers(61), global_batch=8)
        before = [batch[0].tolist() for _, batch in zip(range(steps), first, strict=False)]
        second = hpc.Loader(world, numbers(61), global_batch=8, seed=99)
        second.load_state_dict(first.state_dict())
        assert before + rest(second) == whole
        assert second.epoch == 1


def test_training_does_not_depend_on_the_ranks(world, engines):
    """Weights after two epochs with short batches are those of one process, stopped or not."""
    x, y = torch.randn(37, 5, generator=torch.Generator().manual_seed(3)).double(), None
    y = (x.sum(1) > 0).long()

    def build():
        torch.manual_seed(5)
        model = torch.nn.Linear(5, 2).double()
        return model, torch.optim.AdamW(model.parameters(), 0.05)

    alone, own = build()
    order = [Order(kind="numpy", num_samples=37, seed=7, epoch=e).between(0, 37) for e in (0, 1)]
    for indices in order:
        for start, stop in ((0, 8), (8, 16), (16, 24), (24, 32), (32, 37)):
            own.zero_grad()
            rows = torch.from_numpy(indices[start:stop].copy())
            cross_entropy(alone(x[rows]), y[rows]).backward()
            own.step()
    model, optimizer = build()
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    loader = hpc.Loader(world, TensorDataset(x, y), global_batch=8)
    for number in range(3):  # the first epoch in two goes
        for step, (a, b) in enumerate(loader):
            replica.backward(cross_entropy(replica(a), b), num_samples=len(b))
            assert replica.step()
            if number == 0 and step == 1:
                break
        if number == 0:
            state = loader.state_dict()
            loader = hpc.Loader(world, (x, y), global_batch=8)
            loader.load_state_dict(state)
    assert torch.allclose(model.weight, alone.weight, rtol=0, atol=1e-9)
    replica.close()


# Habits


def test_leaving_a_loop_early_begins_the_next_epoch(world):
    loader = hpc.Loader(world, numbers(40), global_batch=8)
    gathered(world, loader, steps=2)
    assert (loader.epoch, loader.consumed) == (0, 16)
    assert flat(gathered(world, loader)) == list(range(40))
    assert loader.epoch == 2


def test_two_loops_at_once_are_refused(world):
    loader = hpc.Loader(world, numbers(40), global_batch=8)
    outer = iter(loader)
    next(outer)
    next(iter(loader))
    with pytest.raises(ConfigError, match="one loop at a time"):
        next(outer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "global_batch is missing"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": 8, "shuffle": "local"}, "shuffle='local' is not possible"),
        ({"global_batch": 8, "weights": [0.0]}, "weights="),
        ({"global_batch": 8, "num_workers": 2}, "use prefetch"),
        ({"global_batch": 8, "prefetch": -1}, "prefetch=-1"),
        ({"global_batch": 8, "start_method": "fork"}, "unsafe"),
        ({"global_batch": 8, "collate": list}, "collate"),
    ],
)
def test_mistakes_are_named_on_all_ranks(world, options, message):
    with pytest.raises(ConfigError, match=message):
        hpc.Loader(world, numbers(40), **options)


def test_a_mistake_of_one_rank_is_everyones(world):
    last = world.rank == world.size - 1
    with pytest.raises(ConfigError, match=rf"rank {world.size - 1} of .* different numbers"):
        hpc.Loader(world, (torch.zeros(4), torch.zeros(5 if last else 4)), global_batch=4)
    loader = hpc.Loader(world, numbers(40), global_batch=8)
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="num_samples=41, and this loader has 40"):
        loader.load_state_dict(state | {"num_samples": 41 if last else 40})
    if world.size > 1:
        with pytest.raises(ConfigError, match="global_batch=1 leaves some of"):
            hpc.Loader(world, numbers(40), global_batch=1)
        with pytest.raises(ConfigError, match="num_samples=41 where rank 0 has 40"):
            hpc.Loader(world, numbers(41 if last else 40), global_batch=8)
        with pytest.raises(ConfigError, match="consumed=16 where rank 0 has 8"):
            loader.load_state_dict(state | {"consumed": 16 if last else 8})


@pytest.mark.parametrize("form", ["array", "list", "subset", "tensors"])
def test_data_that_are_split_by_rank_are_refused(world, form):
    """As many samples everywhere, and others: all but one part of them would be lost."""
    rows = np.arange(world.rank, 40 * world.size, world.size)
    data = {
        "array": rows,
        "list": rows.tolist(),
        "subset": Subset(Noisy(40 * world.size), rows.tolist()),
        "tensors": Subset(TensorDataset(torch.arange(40 * world.size)), rows.tolist()),
    }[form]
    if world.size == 1:
        assert len(hpc.Loader(world, data, global_batch=8)) == 5
        return
    with pytest.raises(ConfigError, match=r"ranks? 1.* of \d: .*split by rank would be lost"):
        hpc.Loader(world, data, global_batch=8)


# Weighted draws and batches of similar lengths


LENGTHS = (np.arange(101) * 37) % 50
DRAWS = {
    "weighted": {"sample_weights": np.arange(101) % 4, "num_draws": 73},
    "lengths": {"lengths": LENGTHS, "bucket_batches": 4},
}


@pytest.mark.parametrize("kind", list(DRAWS))
def test_drawn_epochs_do_not_depend_on_ranks_and_stops(world, kind):
    """The batches of one rank, on all ranks, stopped on all and resumed on fewer and more."""
    options = {"global_batch": 8, **DRAWS[kind]}
    with first_ranks(world, 1) as one:
        alone = None
        if one:
            loader = hpc.Loader(one, numbers(101), **options)
            alone = [gathered(one, loader) for _ in range(2)]
    alone = world.comm.bcast(alone, root=0)
    loader = hpc.Loader(world, numbers(101), **options)
    assert [gathered(world, loader) for _ in range(2)] == alone
    assert alone[0] != alone[1]
    total = 73 if kind == "weighted" else 101
    assert len(loader) == len(alone[0]) == -(-total // 8)
    assert loader.total == 2 * total
    if kind == "weighted":
        assert all(number % 4 for number in flat(alone[0]))
        assert len(set(flat(alone[0]))) < 73
    else:
        assert flat(alone[0]) == list(range(101))
        spread = [np.ptp(LENGTHS[batch]) for batch in alone[0]]
        assert np.mean(spread) < 15  # of 49 in a plain shuffle
    seen, state = [], None
    fleet = [*range(world.size, 0, -1), world.size]
    for leg, count in enumerate(fleet):
        with first_ranks(world, count) as some:
            if some is not None:
                part = hpc.Loader(some, numbers(101), **options)
                if state is not None:
                    part.load_state_dict(state)
                last = leg == len(fleet) - 1
                seen += gathered(some, part, steps=None if last else 2)
                state = part.state_dict()
        state = world.comm.bcast(state, root=0)
        seen = world.comm.bcast(seen, root=0)
    assert seen == alone[0]


@pytest.mark.parametrize("kind", list(DRAWS))
def test_drawn_epochs_resume_with_the_same_plan_only(world, kind):
    options = {"global_batch": 8, **DRAWS[kind]}
    loader = hpc.Loader(world, numbers(101), **options)
    gathered(world, loader, steps=2)
    state = loader.state_dict()
    name = "sample_weights" if kind == "weighted" else "lengths"
    changed = hpc.Loader(world, numbers(101), **(options | {name: options[name][::-1]}))
    with pytest.raises(ConfigError, match="is different here"):
        changed.load_state_dict(state)
    changed.load_state_dict(state | {"epoch": 1, "consumed": 0})  # between epochs they may change
    if kind == "lengths":
        with pytest.raises(ConfigError, match="lengths, batches or buckets have changed"):
            hpc.Loader(world, numbers(101), **(options | {"global_batch": 12})).load_state_dict(
                state
            )
    if world.size > 1:
        own = options | {name: np.roll(options[name], world.rank)}
        with pytest.raises(ConfigError, match="digest of sample_weights or lengths"):
            hpc.Loader(world, numbers(101), **own)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_is_drawn_twice_is_augmented_anew(world, workers):
    sampler = WeightedRandomSampler([1.0] + [0.0] * 29, 24)
    data = DataLoader(Noisy(30), batch_size=8, sampler=sampler, num_workers=workers)
    loader = hpc.Loader(world, data)
    rows = rows_of(world, loader)
    assert len(rows) == 24
    assert {row[0] for row in rows} == {0}
    assert len({row[1:] for row in rows}) == 24
    loader.close()


# Other people's data sets


def test_a_data_loader_is_dealt_out(world):
    data = DataLoader(TensorDataset(torch.arange(41)), batch_size=8, shuffle=True)
    loader = hpc.Loader(world, data)
    assert flat(gathered(world, loader)) == list(range(41))
    again = hpc.Loader(world, DataLoader(list(range(41)), batch_size=8, drop_last=True))
    assert len(again) == 5
    assert sorted(sum(world.comm.allgather([i for b in again for i in b.tolist()]), [])) == list(  # noqa: RUF017
        range(40)
    )


def rows_of(world, loader, steps=None):
    """Samples with their random numbers, of all ranks."""
    mine = []
    for step, batch in enumerate(loader):
        mine += [tuple(column[i].item() for column in batch) for i in range(loader.num_samples)]
        if step + 1 == steps:
            break
    return sorted(row for part in world.comm.allgather(mine) for row in part)


def test_augmentation_depends_on_no_ranks_workers_or_stops(world):
    with first_ranks(world, 1) as one:
        on_one = rows_of(one, hpc.Loader(one, Noisy(30), global_batch=8)) if one else None
    on_one = world.comm.bcast(on_one, root=0)
    torch.manual_seed(world.rank)
    of_the_model = torch.rand(2).tolist()
    torch.manual_seed(world.rank)
    here = rows_of(world, hpc.Loader(world, Noisy(30), global_batch=8))
    assert [row[0] for row in here] == list(range(30))
    assert here == on_one
    drawn = torch.rand(1).tolist()
    loader = hpc.Loader(world, Noisy(30), global_batch=8, num_workers=2)
    there = rows_of(world, loader, steps=2)
    # A batch system's warning to all processes of the job is not for workers.
    for child in psutil.Process().children(recursive=True):
        if "resource_tracker" not in " ".join(child.cmdline()):
            child.send_signal(signal.SIGUSR2)
    state = loader.state_dict()
    assert state["consumed"] == 16
    loader.load_state_dict(state)
    assert sorted(there + rows_of(world, loader)) == here
    assert rows_of(world, loader) != here  # the workers stayed; the epoch is new
    loader.close()
    assert drawn + torch.rand(1).tolist() == of_the_model


def test_a_worker_that_is_killed_is_told_in_the_loop(world):
    data = Fragile(16, "kill")
    loader = hpc.Loader(world, data, global_batch=16, num_workers=1, shuffle=False)
    if 8 % world.size == world.rank:
        with pytest.raises(DataError, match=r"worker 0 of the loader .* ended by SIGKILL"):
            list(loader)
    else:
        assert sum(loader.num_samples for _ in loader) > 0
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_dealt_out_and_goes_on(world, workers):
    loader = hpc.Loader(world, Counting(29), global_batch=8, num_workers=workers)
    whole = [batch[:, 0].int().tolist() for batch in loader]
    assert sorted(sum(world.comm.allgather(sum(whole, [])), [])) == list(range(29))  # noqa: RUF017
    assert (loader.epoch, loader.total) == (1, 29)
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
    if workers:
        return
    values = [batch.tolist() for batch in loader]  # of epoch 1
    assert all(1000 <= row[0] < 1029 for batch in values for row in batch)
    again = hpc.Loader(world, Counting(29), global_batch=8)
    again.load_state_dict(loader.state_dict() | {"epoch": 1, "consumed": 16})
    assert [batch.tolist() for batch in again] == values[2:]
    for options, message in (({"shuffle": True}, "no random access"), ({"num_workers": 2}, "0 or")):
        with pytest.raises(ConfigError, match=message):
            hpc.Loader(world, Counting(29), global_batch=8, **options)


# Streams that are split by rank


def numbers_of(world, loader, steps=None):
    """The numbers of each batch, of all ranks, after the sizes that the loader says."""
    batches = []
    for batch in loader:
        told = world.comm.allgather((batch["number"].tolist(), loader.num_samples))
        assert all(len(part) == count for part, count in told)
        assert sum(count for _, count in told) == loader.global_samples
        batches.append(sorted(number for part, _ in told for number in part))
        if len(batches) == steps:
            break
    return batches


def cut_strings(samples):
    """As default_collate, with text as an array: a batch of no rows must be possible."""
    return {
        "number": torch.tensor([sample["number"] for sample in samples]),
        "name": np.array([sample["name"] for sample in samples]),
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_is_split_by_rank_is_refused(world, workers):
    """It would lose all samples but those that two splits leave."""
    data = Parts(world.rank, world.size, [20] * world.size)
    loader = hpc.Loader(world, data, global_batch=8, num_workers=workers)
    if world.size == 1:
        assert [len(batch) for batch in numbers_of(world, loader)] == [8, 8, 4]
        return
    with pytest.raises(ConfigError, match=r"ranks? 1.* of \d is not the one of.*split='already'"):
        list(loader)
    assert loader.consumed == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_that_are_split_already_give_every_sample_once(world, workers):
    lengths = [21 + (rank < 2) for rank in range(world.size)]
    whole = sorted(
        row * world.size + rank for rank in range(world.size) for row in range(lengths[rank])
    )
    data = Parts(world.rank, world.size, lengths)
    options = {"global_batch": 2 * world.size, "split": "already", "collate": cut_strings}
    loader = hpc.Loader(world, data, num_workers=workers, **options)
    batches = numbers_of(world, loader)
    assert flat(batches) == whole
    # Split row by row, they are the batches of the one stream.
    size = 2 * world.size
    assert batches == [whole[at : at + size] for at in range(0, len(whole), size)]
    assert (loader.epoch, loader.total) == (1, len(whole))
    if workers:
        return
    again = hpc.Loader(world, data, **options)
    seen = numbers_of(world, again, steps=3)
    state = again.state_dict()
    assert state["consumed"] == 3 * size
    later = hpc.Loader(world, data, **options)
    later.load_state_dict(state)
    assert seen + numbers_of(world, later) == batches
    with pytest.raises(ConfigError, match="the new split puts other samples on each rank"):
        later.load_state_dict(state | {"num_ranks": world.size + 1})
    later.load_state_dict(state | {"num_ranks": world.size + 1, "consumed": 0, "epoch": 1})
    plain = hpc.Loader(world, Counting(9), global_batch=8)
    with pytest.raises(ConfigError, match="order='split', and this loader has 'stream'"):
        plain.load_state_dict(state)


def test_split_streams_of_very_unequal_lengths(world):
    lengths = [2 + 6 * rank for rank in range(world.size)]
    data = Parts(world.rank, world.size, lengths)
    options = {"global_batch": 4 * world.size, "split": "already", "collate": cut_strings}
    loader = hpc.Loader(world, data, **options)
    batches = numbers_of(world, loader)
    assert sum(map(len, batches)) == sum(lengths)
    assert len(set(flat(batches))) == sum(lengths)
    assert len(batches) == max(-(-length // 4) for length in lengths)
    for stop in range(len(batches)):  # also where a stream had ended before
        first = hpc.Loader(world, data, **options)
        before = numbers_of(world, first, steps=stop) if stop else []
        second = hpc.Loader(world, data, **options)
        second.load_state_dict(first.state_dict())
        assert before + numbers_of(world, second) == batches
    full = hpc.Loader(world, data, drop_last=True, **options)
    assert [len(batch) for batch in numbers_of(world, full)] == []


def test_split_that_is_not_what_it_says_is_refused(world):
    same = hpc.Loader(world, Counting(40), global_batch=8, split="already")
    if world.size > 1:
        with pytest.raises(ConfigError, match=f"would be used {world.size} times"):
            list(same)
        lengths = [5] * (world.size - 1) + [0]
        empty = Parts(world.rank, world.size, lengths)
        with pytest.raises(ConfigError, match=rf"rank {world.size - 1} of .* has no samples"):
            list(hpc.Loader(world, empty, global_batch=8, split="already"))
    with pytest.raises(ConfigError, match=r"every rank the whole data set"):
        hpc.Loader(world, numbers(40), global_batch=8, split="already")
    with pytest.raises(ConfigError, match="split='never' is unknown"):
        hpc.Loader(world, Counting(40), global_batch=8, split="never")


@pytest.mark.parametrize("split", [None, "same", "already"])
@pytest.mark.parametrize("after", [0, 20])
def test_a_stream_that_fails_on_one_rank_fails_on_all(world, after, split):
    last = world.size - 1
    data = Broken(world.rank, last, after)
    if split == "already":
        data.__class__ = BrokenPart
    loader = hpc.Loader(world, data, global_batch=8, split=split)
    kind, told = (OSError, "is gone") if world.rank == last else (DataError, f"rank {last} of")
    with pytest.raises(kind, match=told):
        list(loader)
    assert world.comm.allgather(loader.consumed) == [loader.consumed] * world.size


class BrokenPart(Broken):
    """Other samples on every rank."""

    def __iter__(self):
        return (100 * self.rank + number for number in super().__iter__())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("turns_at", [17, 23, 38, 39])
def test_streams_that_differ_after_a_while_are_refused(world, turns_at, workers):
    """They would lose the samples that each rank takes for another's."""
    last = world.size - 1
    data = Turning(40, turns_at=turns_at if world.rank == last else None)
    loader = hpc.Loader(world, data, global_batch=8, num_workers=workers)
    if world.size == 1:
        assert sum(len(batch) for batch in loader) == 40
        return
    seen = []
    with pytest.raises(
        ConfigError,
        match=rf"sample {turns_at} on rank {last} of {world.size} is not.*split='already'",
    ):
        seen.extend(number for batch in loader for number in batch.tolist())
    assert max(seen, default=0) < turns_at  # refused before a sample is used
    assert world.comm.allgather(loader.consumed) == [loader.consumed] * world.size
    if not workers:
        unchecked = hpc.Loader(world, data, global_batch=8, split="same")
        assert sum(world.comm.allgather(sum(map(len, unchecked)))) == 40


@pytest.mark.parametrize("split", [None, "same"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("short", "long"), [(20, 21), (20, 40), (39, 40), (1, 40), (0, 3), (16, 17)]
)
def test_streams_that_differ_in_length_are_refused(world, short, long, drop_last, split):
    """Some would go on alone and wait for the others, or all would lose the rest."""
    last = world.size - 1
    data = Turning(short if world.rank == last else long)
    loader = hpc.Loader(world, data, global_batch=8, drop_last=drop_last, split=split)
    if world.size == 1:
        assert sum(len(batch) for batch in loader) == (short // 8 * 8 if drop_last else short)
        return
    with pytest.raises(ConfigError, match=r"(differ in length|sample \d+ on rank).*split="):
        # A barrier as a step: whoever went on alone would wait there.
        deque((world.comm.Barrier() for _ in loader), maxlen=0)
    assert world.comm.allgather(loader.consumed) == [loader.consumed] * world.size
    if split == "same" or short > 12:
        with pytest.raises(
            ConfigError,
            match=rf"rank {last} of {world.size} ended early .samples: {short} on",
        ):
            list(loader)


class Unseeded(Counting):
    """Equal samples whose augmentation draws from a generator of its own."""

    def __iter__(self):
        noise = np.random.default_rng()
        for sample in super().__iter__():
            yield torch.stack([sample[0], torch.tensor(noise.random())])


def test_streams_that_differ_in_augmentation_alone_are_let_through_when_said(world):
    if world.size > 1:
        with pytest.raises(ConfigError, match="pass split='same'"):
            list(hpc.Loader(world, Unseeded(29), global_batch=8))
    loader = hpc.Loader(world, Unseeded(29), global_batch=8, split="same")
    mine = [row[0] for batch in loader for row in batch.int().tolist()]
    assert sorted(sum(world.comm.allgather(mine), [])) == list(range(29))  # noqa: RUF017


class Once(torch.utils.data.IterableDataset):
    """A stream that can be read once, as of a pipe: what was compared must not be lost."""

    def __init__(self, size):
        self.rows = iter(range(size))

    def __iter__(self):
        return self.rows


def test_comparing_streams_loses_no_sample(world):
    loader = hpc.Loader(world, Once(61), global_batch=8)
    mine = [number for batch in loader for number in batch.tolist()]
    assert sorted(sum(world.comm.allgather(mine), [])) == list(range(61))  # noqa: RUF017


class Dicing(Counting):
    """A stream whose collate draws, too."""

    @staticmethod
    def collate(samples):
        return torch.cat([torch.stack(samples), torch.rand(len(samples), 1)], dim=1)


def test_a_collate_that_draws_leaves_the_stream_alone(world):
    def read(state=None):
        loader = hpc.Loader(world, Dicing(29), global_batch=8, collate=Dicing.collate)
        if state is not None:
            loader.load_state_dict(state)
        return loader, [batch.tolist() for batch in loader]

    loader, drawing = read()
    plain = [batch.tolist() for batch in hpc.Loader(world, Counting(29), global_batch=8)]
    assert [[row[:2] for row in batch] for batch in drawing] == plain
    state = loader.state_dict() | {"epoch": 0, "consumed": 16, "total": 16}
    assert read(state)[1] == drawing[2:]  # what collate draws goes on bit-exactly, too
    drawn = [row[2] for batch in world.comm.allgather(drawing) for part in batch for row in part]
    assert len(set(drawn)) == 29
    short = hpc.Loader(world, Counting(11), global_batch=8)
    short.load_state_dict(state)
    with pytest.raises(DataError, match="ended after 11 samples, and 16 are consumed"):
        list(short)


# Scattered data


def test_shares_in_their_own_order_are_never_exchanged(world):
    shares = Shares(world.comm, 41, Order(kind="stored", num_samples=41, seed=3, epoch=0))
    loader = hpc.Loader(world, shares, global_batch=8, seed=5)
    first, second = (gathered(world, loader) for _ in range(2))
    assert flat(first) == [10 * i for i in range(41)]
    assert first == second
    assert shares.num_exchanges == 0


def test_scattered_shares_follow_the_global_order(world):
    order = Order(kind="numpy", num_samples=41, seed=3, epoch=0)
    shares = Shares(world.comm, 41, order)
    loader = hpc.Loader(world, shares, global_batch=8)
    whole = hpc.Loader(world, {"value": np.arange(41) * 10}, global_batch=8, seed=3)
    for epoch in range(3):
        assert gathered(world, loader) == gathered(world, whole)
        assert shares.num_exchanges == epoch
    state = loader.state_dict() | {"consumed": 16}
    fresh = hpc.Loader(world, Shares(world.comm, 41, order.of_epoch(3)), global_batch=8)
    fresh.load_state_dict(state)
    whole.load_state_dict(state)
    assert gathered(world, fresh) == gathered(world, whole)


def test_a_local_shuffle_exchanges_nothing(world):
    shares = Shares(world.comm, 41, Order(kind="stored", num_samples=41, seed=3, epoch=0))
    loader = hpc.Loader(world, shares, global_batch=8, shuffle="local")
    first, second = (gathered(world, loader) for _ in range(2))
    assert flat(first) == flat(second) == [10 * i for i in range(41)]
    assert first != second
    assert shares.num_exchanges == 0
    inside = loader.state_dict() | {"consumed": 16}
    order = Order(kind="numpy", num_samples=41, seed=4, epoch=0)
    dealt = hpc.Loader(world, Shares(world.comm, 41, order), global_batch=8, shuffle="local")
    with pytest.raises(ConfigError, match="distributed in another order"):
        dealt.load_state_dict(inside)
    dealt.load_state_dict(loader.state_dict())  # between epochs any deal will do
