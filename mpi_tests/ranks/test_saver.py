"""The saver: a run that was stopped goes on as if it had not been, on any number of ranks."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hpctrain as hpc
from hpctrain.checkpoint import export, list_checkpoints, read_checkpoint
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.replica.equal_ranks import digest
from hpctrain.world.guard import AgreedExit
from mpi_tests.ranks.split import tensors_of
from mpi_tests.ranks.test_loader import first_ranks

SAMPLES, BATCH, EPOCHS = 45, 12, 3  # at least two samples a rank: BatchNorm needs them


class Net(nn.Module):
    """With dropout, whose numbers each rank draws, and with statistics that each rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 1)
        )

    def forward(self, x):
        return self.layers(x)


class Run:
    """A training with everything that has a state."""

    def __init__(self, world, folder, **options):
        self.world, self.options = world, options
        world.streams.bind_equal()
        data = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))
        target = data.sum(1, keepdim=True)
        self.loader = hpc.Loader(world, (data, target), global_batch=BATCH)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        given = {name: options.pop(name) for name in ("engine", "update") if name in options}
        given["accumulate"] = options.pop("accumulate", 1)
        self.replica = hpc.distribute(world, self.model, self.optimizer, **given)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.average = hpc.optim.EMA(self.model)
        self.saver = hpc.Saver(
            world,
            folder,
            self.replica,
            self.loader,
            named={"schedule": self.schedule, "average": self.average},
            **{"every_s": None, **options},
        )
        self.seen: list[int] = []

    def train(self, stop_at=None, before=lambda run: None):
        """Train to the end, or to a request to stop; whether it came to the end."""
        code = 0
        try:
            for x, y in self.saver.resume(EPOCHS):
                before(self)
                loss = (self.replica(x) - y).square().mean()
                self.replica.backward(loss, num_samples=len(y))
                if self.replica.step():
                    self.schedule.step()
                    self.average.update()
                random.random()
                np.random.rand()
                self.seen.append(self.loader.total)
                if self.saver.step + 1 == stop_at:
                    self.saver.request_stop("the test says so")
        except AgreedExit as error:
            code = error.code
        assert code in (0, 75)
        return code == 0

    def print_of_weights(self):
        """Everything that a run ends with, of this rank."""
        tensors = [*self.model.state_dict().values(), *tensors_of(self.optimizer)]
        tensors += list(self.average.averages.values())
        draws = (random.random(), float(np.random.rand()), torch.rand(1).item())
        return (
            digest(tensors),
            draws,
            self.optimizer.param_groups[0]["lr"],
            self.loader.state_dict(),
        )

    def close(self):
        self.saver.close()
        self.replica.close()
        self.loader.close()


@contextmanager
def made(world, folder, **options):
    run = Run(world, folder, **options)
    yield run
    run.close()


def common(world, tmp_path):
    """One folder for all ranks."""
    return world.comm.bcast(tmp_path)


def undisturbed(world, folder, **options):
    with made(world, folder, **options) as run:
        assert run.train()
        return run.print_of_weights(), run.saver.step


@pytest.mark.parametrize("stop_at", [2, 6, 7])
def test_a_stopped_run_goes_on_bit_for_bit(world, engine, tmp_path, stop_at):
    folder = common(world, tmp_path)
    expected, steps = undisturbed(world, folder / "whole", engine=engine)
    with made(world, folder / "cut", engine=engine) as run:
        assert not run.train(stop_at)
        stopped_at = run.saver.step
        assert stopped_at == stop_at + 1  # all ranks know one boundary later
    with made(world, folder / "cut", engine=engine) as run:
        assert run.train()
        assert run.saver.step == steps == 12
        assert len(run.seen) == steps - stopped_at
        assert run.print_of_weights() == expected
    with made(world, folder / "cut", engine=engine) as run:
        assert run.train()
        assert run.seen == []  # finished is finished


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_accumulation_and_updates_of_every_kind(world, engines, tmp_path, update):
    if world.size == 1 and update == "sharded":
        pytest.skip("one rank has nothing to divide")
    folder = common(world, tmp_path)
    options = {"engine": engines["mpi"] if world.size > 1 else "auto", "accumulate": 3}
    if world.size > 1:
        options["update"] = update
    expected, steps = undisturbed(world, folder / "whole", **options)
    with made(world, folder / "cut", **options) as run:
        assert not run.train(3)
        assert not run.replica.is_mid_step
        assert run.saver.step == 4  # the fourth ends the epoch, and with it a step of one part
    with made(world, folder / "cut", **options) as run:
        assert run.train()
        assert (run.print_of_weights(), run.saver.step) == (expected, steps)


def test_another_number_of_ranks_has_the_same_weights_and_state(world, tmp_path):
    folder = common(world, tmp_path)
    with made(world, folder, every_steps=4) as run:
        assert not run.train(3)
        saved = digest([*run.model.parameters(), *tensors_of(run.optimizer)])
        consumed = run.loader.total
    for count in range(1, world.size):
        with first_ranks(world, count) as some:
            if some is None:
                continue
            mine = folder.with_name(f"{folder.name}-{count}")
            if some.rank == 0:
                shutil.copytree(folder, mine)
            some.comm.Barrier()
            with made(some, mine) as run:
                restored = run.saver.restore()
                assert (restored.step, restored.num_ranks) == (4, world.size)
                assert digest([*run.model.parameters(), *tensors_of(run.optimizer)]) == saved
                assert run.loader.total == consumed
                assert run.train()
                assert run.loader.total == EPOCHS * SAMPLES


@pytest.mark.parametrize("name", ["SIGUSR2", "SIGUSR1", "SIGTERM"])
def test_a_signal_to_one_rank_stops_all_at_one_step(world, tmp_path, name):
    came = []
    before = signal.signal(getattr(signal, name), lambda number, frame: came.append(number))
    try:
        with made(world, common(world, tmp_path)) as run:
            last = world.size - 1

            def strike(run):
                if run.saver.step == 3 and world.rank == last:
                    os.kill(os.getpid(), getattr(signal, name))

            assert not run.train(before=strike)
            assert set(world.comm.allgather(run.saver.step)) == {5}
        assert len(came) == (world.rank == last)  # the handler that was there hears it, too
        assert signal.getsignal(getattr(signal, name)) is not signal.SIG_DFL
    finally:
        signal.signal(getattr(signal, name), before)


def test_checkpoints_by_steps_and_by_hand(world, tmp_path):
    folder = common(world, tmp_path)
    saved = []
    with made(world, folder, every_steps=5, keep=hpc.Keep(last=2)) as run:
        run.saver.on("saved", saved.append)
        assert run.train()
    assert saved == [5, 10, 12]
    with made(world, folder) as run:
        run.saver.on("restored", lambda restored: saved.append(restored.step))
        assert run.train()
    assert saved[-1] == 12


def test_a_checkpoint_that_is_due_inside_a_window_waits_for_its_end(world, tmp_path):
    saved = []
    with made(world, common(world, tmp_path), every_steps=5, accumulate=2) as run:
        run.saver.on("saved", saved.append)
        assert run.train()
    assert saved == [6, 10, 12]


def test_an_epoch_left_early_and_loops_of_ones_own(world, tmp_path):
    folder = common(world, tmp_path)
    with made(world, folder) as run:
        epochs = []
        for epoch in run.saver.epochs(3):
            for x, _ in run.saver.batches():
                run.replica.backward(run.replica(x).mean(), num_samples=len(x))
                run.replica.step()
                if run.loader.consumed >= 16:
                    break
            epochs.append((epoch, run.loader.consumed))
        assert epochs == [(0, 24), (1, 24), (2, 24)]
    with made(world, folder) as run:
        assert list(run.saver.epochs(3)) == []


def test_what_cannot_be_saved_is_refused(world, tmp_path):
    folder = common(world, tmp_path)
    with pytest.raises(ConfigError, match="nothing to save"):
        hpc.Saver(world, folder)
    with pytest.raises(ConfigError, match="by name"):
        hpc.Saver(world, folder, object())
    with pytest.raises(ConfigError, match="no state_dict"):
        hpc.Saver(world, folder, named={"clock": object()})
    with pytest.raises(ConfigError, match="every_s='often'"):
        hpc.Saver(world, folder, named={"x": nn.Linear(1, 1)}, every_s="often")
    with made(world, folder, accumulate=2) as run:
        batch = next(iter(run.loader))
        run.replica.backward(run.replica(batch[0]).mean(), num_samples=len(batch[0]))
        with pytest.raises(ConfigError, match="middle of a step"):
            run.saver.save()
        run.replica.step(flush=True)
        run.saver.save(wait=True)
    with made(world, folder) as run:
        run.saver._parts.others.pop("average")
        with pytest.raises(CheckpointError, match="average"):
            run.saver.restore()


def test_another_optimizer_is_refused_and_other_options_are_said(world, tmp_path, capsys):
    folder = common(world, tmp_path)

    def restore(kind, **options):
        model = nn.Linear(3, 2)
        replica = hpc.distribute(world, model, kind(model.parameters(), 0.1, **options))
        saver = hpc.Saver(world, folder, replica, every_s=None)
        try:
            if saver.restore() is None:
                saver.save(wait=True)
            return replica.optimizer.param_groups[0]["weight_decay"]
        finally:
            saver.close()
            replica.close()

    assert restore(torch.optim.AdamW, weight_decay=0.25) == 0.25
    with pytest.raises(CheckpointError, match=r"state of AdamW.* optimizer is Adam;"):
        restore(torch.optim.Adam, weight_decay=0.25)
    with pytest.raises(CheckpointError, match="optimizer is SGD"):
        restore(torch.optim.SGD)
    capsys.readouterr()
    assert restore(torch.optim.AdamW, weight_decay=0.5) == 0.25
    said = world.comm.bcast(capsys.readouterr().err)
    assert "weight_decay 0.25 (the script says 0.5)" in said


def test_another_model_is_refused_by_name(world, tmp_path):
    folder = common(world, tmp_path)
    for sizes, refused in ((6, False), (7, True)):
        model = nn.Linear(sizes, 2)
        replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.1))
        saver = hpc.Saver(world, folder, replica, every_s=None)
        if refused:
            with pytest.raises(CheckpointError, match="weight"):
                saver.restore()
        else:
            assert saver.restore() is None
            saver.boundary()
            saver.save(wait=True)
        saver.close()
        replica.close()


def test_why_one_rank_asked_to_stop_is_known_to_all(world, tmp_path):
    said: list[str] = []

    def ask(run):
        if world.rank == world.size - 1:
            run.saver.request_stop("the queue is closing")

    with made(world, common(world, tmp_path)) as run:
        run.saver.on("stopping", said.append)
        assert not run.train(before=ask)
    assert said == ["the queue is closing"]


ROWS, PART, LOOPS = 79, 12, 3  # seven batches an epoch, the last one smaller


def _rows():
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(*_rows(), strict=True)


def _learner(rate_step):
    torch.manual_seed(11)
    model = nn.Linear(6, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, rate_step, 0.8)


def _one_process(window_of):
    """The weights of one process; `window_of` cuts an epoch's samples into those of each step."""
    model, optimizer, schedule = _learner(1)
    x, y = _rows()
    for _ in range(LOOPS):
        for start, stop in window_of:
            optimizer.zero_grad()
            (model(x[start:stop]) - y[start:stop]).square().mean().backward()
            optimizer.step()
            schedule.step()
    return model


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_pieces", [1, 2])
def test_the_loop_sees_the_step_that_ends_an_epoch(world, tmp_path, is_stream, num_pieces, capfd):
    model, optimizer, schedule = _learner(1)
    accumulate = 2 if num_pieces == 1 else 3
    replica = hpc.distribute(world, model, optimizer, accumulate=accumulate)
    data = _Stream() if is_stream else _rows()
    loader = hpc.Loader(world, data, global_batch=PART, shuffle=False)
    saver = hpc.Saver(world, common(world, tmp_path), replica, loader, every_s=None)
    seen, batches = 0, saver.resume(LOOPS)
    if is_stream:
        with pytest.raises(TypeError, match="stream"):
            len(batches)
    else:
        assert len(batches) == LOOPS * 7
    for x, y in batches:
        for piece in range(num_pieces):  # every rank has a sample in each piece, and counts it
            mine = slice(piece, None, num_pieces)
            weight = len(y[mine])
            loss = (replica(x[mine]) - y[mine]).square().mean() if weight else None
            replica.backward(loss, num_samples=weight)
            if replica.step():
                seen += 1
                schedule.step()
    calls = 7 * num_pieces
    steps = -(-calls // accumulate)
    assert (seen, replica.num_steps) == (LOOPS * steps, LOOPS * steps)
    assert schedule.last_epoch == seen
    if num_pieces == 1:
        alone = _one_process([(0, 24), (24, 48), (48, 72), (72, ROWS)])
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert "accumulation window" not in capfd.readouterr().err
    replica.close()
    saver.close()


def test_a_window_that_the_loop_leaves_open_is_stepped_and_said(world, tmp_path, capfd):
    model, optimizer, _ = _learner(1)
    replica = hpc.distribute(world, model, optimizer, accumulate=2)
    loader = hpc.Loader(world, _rows(), global_batch=PART, shuffle=False)
    saver = hpc.Saver(world, common(world, tmp_path), replica, loader, every_s=None)
    for number, (x, y) in enumerate(saver.resume(1)):
        replica.backward((replica(x) - y).square().mean(), num_samples=len(y))
        if number % 2:
            assert replica.step()
    assert replica.num_steps == 4
    alone = "miss this step" in capfd.readouterr().err
    assert alone == (world.rank == 0)
    x, y = next(iter(loader))  # after the loop nothing is the last batch any more
    replica.backward((replica(x) - y).square().mean(), num_samples=len(y))
    assert replica.step().reason == "accumulating"
    replica.close()
    saver.close()


def test_a_finished_run_says_that_nothing_is_left(world, tmp_path, capfd):
    folder = common(world, tmp_path)
    with made(world, folder) as run:
        assert len(run.saver.batches()) == 4
        assert run.train()
    assert "nothing is left" not in capfd.readouterr().err
    with made(world, folder) as run:
        assert len(run.saver.resume(EPOCHS)) == 0
        assert run.train()
        told = capfd.readouterr().err
        assert ("nothing is left to do" in told) == (world.rank == 0)
        assert world.rank or ("raise num_epochs" in told and str(folder) in told)
        assert list(run.saver.resume(EPOCHS - 1)) == []
        words = f"{EPOCHS - 1} epochs were requested, and {EPOCHS} are already done"
        assert (words in capfd.readouterr().err) == (world.rank == 0)
        assert len(run.saver.resume(EPOCHS + 2)) == 8


def test_a_resumed_last_batch_still_ends_the_epoch_in_the_loop(world, tmp_path):
    folder = common(world, tmp_path)

    def train(stop_at):
        model, optimizer, schedule = _learner(1)
        replica = hpc.distribute(world, model, optimizer, accumulate=2)
        loader = hpc.Loader(world, _rows(), global_batch=PART, shuffle=False)
        named = {"schedule": schedule}
        saver = hpc.Saver(world, folder, replica, loader, named=named, every_s=None)
        with contextlib.suppress(AgreedExit):
            for x, y in saver.resume(1):
                replica.backward((replica(x) - y).square().mean(), num_samples=len(y))
                if replica.step():
                    schedule.step()
                if saver.step + 1 == stop_at:
                    saver.request_stop("the test says so")
        replica.close()
        saver.close()
        return saver.step, replica.num_steps, schedule.last_epoch

    assert train(5) == (6, 3, 3)  # one batch is left, and with it half a window
    assert train(None) == (7, 4, 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_compiled_models_are_saved_under_plain_names(world, engines, tmp_path, precision):
    folder = common(world, tmp_path)
    engine = engines["mpi"] if world.size > 1 else "auto"

    def make(compiled):
        torch.manual_seed(4)
        inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model = inner
        if compiled == "whole":
            model = torch.compile(inner, backend="eager")
        elif compiled == "part":
            model = nn.Sequential(torch.compile(inner[0], backend="eager"), inner[1], inner[2])
        optimizer = torch.optim.AdamW(inner.parameters(), 0.1)
        replica = hpc.distribute(world, model, optimizer, engine=engine, precision=precision)
        average = hpc.optim.EMA(model)
        loader = hpc.Loader(world, tuple(t.float() for t in _rows()), global_batch=PART)
        saver = hpc.Saver(world, folder, replica, loader, named={"average": average}, every_s=None)
        return inner, replica, average, saver

    def bits(inner, replica, average):
        masters = replica.state_dict().get("masters", {})
        tensors = [*inner.state_dict().values(), *average.averages.values(), *masters.values()]
        return digest(tensors), sorted(average.averages), sorted(masters)

    saved = None
    for compiled in ("whole", None, "part", "whole"):
        inner, replica, average, saver = make(compiled)
        restored = saver.restore()
        assert (restored is None) == (saved is None)
        assert saved is None or bits(inner, replica, average) == saved
        for x, y in saver._loader():
            loss = (replica(x).float() - y).square().mean()
            replica.backward(loss, num_samples=len(y))
            if replica.step():
                average.update()
            saver.boundary()
            break
        saver.save(wait=True)
        saved = bits(inner, replica, average)
        newest = list_checkpoints(folder)[-1].path
        state = read_checkpoint(newest)
        assert set(state["model"]) == set(inner.state_dict())
        assert not any("_orig_mod" in name for name in _names_in(state))
        saver.close()
        replica.close()


def _names_in(tree):
    for key, value in tree.items():
        yield str(key)
        if isinstance(value, dict):
            yield from _names_in(value)


def test_checkpoints_of_compiled_models_from_before_still_load(world, tmp_path):
    folder = common(world, tmp_path)
    torch.manual_seed(4)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    replica = hpc.distribute(world, model, optimizer)
    average = hpc.optim.EMA(model)
    saver = hpc.Saver(world, folder, replica, named={"average": average}, every_s=None)
    capture = saver._parts.capture

    def with_wrappers(world):  # what hpctrain wrote until now
        common, own = capture(world)
        for tree in (common["model"], common["average"]["averages"]):
            for name in list(tree):
                tree[f"_orig_mod.{name}"] = tree.pop(name)
        return common, own

    saver._parts.capture = with_wrappers
    saver.save(wait=True)
    saver.close()
    path = list_checkpoints(folder)[-1].path
    assert "_orig_mod.weight" in read_checkpoint(path)["model"]
    if world.rank == 0:
        export(path, folder / "old.safetensors")
        export(path, folder / "old.pt", key=None)
        assert set(load_file(folder / "old.safetensors")) == {"weight", "bias"}
        exported = torch.load(folder / "old.pt", weights_only=True)
        assert set(exported["model"]) == {"weight", "bias"} == set(exported["average"]["averages"])
    kept = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    again = hpc.Saver(world, folder, replica, named={"average": average}, every_s=None)
    assert again.restore() is not None
    assert torch.equal(model.weight, kept)
    again.close()
    replica.close()
