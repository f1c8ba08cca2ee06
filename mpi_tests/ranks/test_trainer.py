"""The trainer: the same as a loop of one's own, evaluated, stopped, resumed bit for bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.train.config import Checkpoint
from hpctrain.train.directory import read_summary
from hpctrain.train.journal import read_lines
from hpctrain.train.progress import Monitor
from mpi_tests.ranks.trainer_kit import QUIET, bits, data, held_out, make, same


@pytest.fixture
def shared(world, tmp_path):
    """One folder for all ranks."""
    return Path(world.comm.bcast(str(tmp_path), root=0))


def test_a_trainer_does_what_a_loop_of_ones_own_does(world, engines, shared):
    replica, loader, schedule = make(world, engines)
    for _ in range(2):
        for x, y in loader:
            loss = mse_loss(replica(x), y)
            replica.backward(loss, num_samples=loader.num_samples)
            if replica.step():
                schedule.step()
        if world.size > 1:
            hpc.optim.average_batchnorm(world, replica.model)  # as before every evaluation
    wanted, rate = bits(replica), replica.optimizer.param_groups[0]["lr"]
    replica.close()

    replica, loader, schedule = make(world, engines)
    happened = []
    trainer = hpc.Trainer(
        world, replica, loader, loss=mse_loss, epochs=2, schedules={"model": schedule},
        evaluation=held_out(world), metrics={"error": lambda o, y: (o - y).abs()},
        directory=shared / "run", logging=QUIET,
    )  # fmt: skip
    for event in ("start", "step", "epoch", "evaluated", "end"):
        trainer.on(event, lambda _, facts, event=event: happened.append((event, facts["step"]))
                   if event != "end" else happened.append(("end", facts["steps"])))  # fmt: skip
    summary = trainer.fit()
    assert same(bits(replica), wanted)
    assert replica.optimizer.param_groups[0]["lr"] == rate
    # 40 samples by 12: the last two of four batches are made equal
    epoch = ["step", "step", "step", "step", "evaluated", "epoch"]
    assert [event for event, _ in happened] == ["start", *epoch, *epoch, "end"]
    assert [step for event, step in happened if event == "step"] == list(range(1, 9))
    assert [step for event, step in happened if event == "epoch"] == [4, 8]
    assert (summary["state"], summary["steps"], summary["samples"]) == ("finished", 8, 80)
    x, y = data(15)
    with torch.no_grad():
        replica.model.eval()
        expected = mse_loss(replica.model(x), y).item()
    assert summary["metrics"]["loss"] == pytest.approx(expected, rel=1e-5)
    used = summary["used"]
    assert used["busy_cores"] > 0
    assert used["cores"] == len(set().union(*world.comm.allgather(os.sched_getaffinity(0))))
    assert 0 < used["used_memory_bytes"] < used["memory_bytes"]
    if world.rank == 0:
        assert read_summary(shared / "run") == json.loads(json.dumps(summary))
        lines = list(read_lines(shared / "run" / "metrics.jsonl"))
        one_epoch = ["step", "step", "step", "step", "eval", "epoch"]
        assert [line["kind"] for line in lines] == [*one_epoch, *one_epoch]
        ranks = json.loads((shared / "run" / "environment.json").read_text())["ranks"]
        assert len(ranks) == world.size
        assert not (shared / "run" / "run.lock").exists()
    replica.close()


def test_accumulation_windows_end_with_the_epoch(world, engines):
    replica, loader, _ = make(world, engines, accumulate=2, batch=24)
    trainer = hpc.Trainer(world, replica, loader, loss=mse_loss, epochs=3, logging=QUIET)
    # 40 samples in parts of 12: four parts, the last two of eight, so two steps an epoch
    assert trainer.num_steps == 6
    trainer.fit()
    assert trainer.step == replica.num_steps == 6
    assert not replica.is_mid_step
    replica.close()


def test_a_window_that_is_open_when_the_epoch_ends_is_stepped(world, engines):
    replica, loader, _ = make(world, engines, accumulate=3, batch=36)
    steps = []
    trainer = hpc.Trainer(world, replica, loader, loss=mse_loss, epochs=2, logging=QUIET)
    trainer.on("step", lambda trainer, facts: steps.append(trainer.loader.consumed))
    assert trainer.num_steps == 4
    trainer.fit()
    assert steps == [32, 40, 32, 40]  # of 12, 12, 8 and 8 samples
    replica.close()


class Numbers(torch.utils.data.IterableDataset):
    """A stream: nobody knows where it ends."""

    def __iter__(self):
        x, y = data(30)
        yield from zip(x, y, strict=True)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_step_function_sees_the_step_that_ends_an_epoch(world, engines, is_stream):
    replica, loader, schedule = make(world, engines, accumulate=2, batch=24)
    if is_stream:
        loader = hpc.Loader(world, Numbers(), global_batch=10)
    else:
        loader = hpc.Loader(world, data(), global_batch=8)
    num_batches, seen = (3 if is_stream else 5), []

    def step(trainer, batch):
        x, y = batch
        loss = mse_loss(replica(x), y)
        replica.backward(loss, num_samples=len(y))
        seen.append(bool(trainer.update()))
        return loss

    schedules = {"model": schedule}
    trainer = hpc.Trainer(
        world, replica, loader, step=step, epochs=2, schedules=schedules, logging=QUIET
    )
    trainer.fit()
    windows = -(-num_batches // 2)
    assert seen == [*[False, True] * (windows - 1), True] * 2
    assert trainer.step == replica.num_steps == schedule.last_epoch == 2 * windows
    replica.close()


def test_a_stream_has_epochs_too(world, engines):
    replica, _, _ = make(world, engines)
    happened = []
    loader = hpc.Loader(world, Numbers(), global_batch=10)
    trainer = hpc.Trainer(
        world, replica, loader, loss=mse_loss, epochs=2, evaluation=held_out(world), logging=QUIET
    )
    assert trainer.num_steps is None
    trainer.on("step", lambda _, facts: happened.append(facts["step"]))
    trainer.on("evaluated", lambda *_: happened.append("evaluated"))
    summary = trainer.fit()
    assert happened == [1, 2, 3, "evaluated", 4, 5, 6, "evaluated"]
    assert summary["samples"] == 60
    replica.close()


def test_a_run_that_was_stopped_goes_on_bit_for_bit(world, engines, shared):
    def trained(directory, stop_at=None, **options):
        replica, loader, schedule = make(world, engines)
        trainer = hpc.Trainer(
            world, replica, loader, loss=mse_loss, epochs=3, schedules={"model": schedule},
            evaluation=held_out(world), monitor=Monitor("min:loss"),
            directory=shared / directory, logging=QUIET,
            checkpoint=Checkpoint(every_s=None, keep_best="min:loss"), **options,
        )  # fmt: skip

        def interrupt(_, facts):
            if facts["step"] == stop_at and world.rank == world.size - 1:
                signal.raise_signal(signal.SIGUSR2)

        trainer.on("step", interrupt)
        try:
            if stop_at is None:
                summary = trainer.fit()
            else:
                with pytest.raises(SystemExit) as left:
                    trainer.fit()
                assert left.value.code == 75
                summary = None
            return bits(replica), summary, trainer
        finally:
            trainer._saver.close()
            replica.close()

    wanted, whole, _ = trained("whole")
    _, _, stopped = trained("cut", stop_at=4)
    assert 4 <= stopped.step <= 6
    first = world.comm.bcast(read_summary(shared / "cut") if world.rank == 0 else None)
    assert first["state"] == "stopped"
    world.comm.Barrier()
    got, summary, _ = trained("cut")
    assert same(got, wanted)
    # What is divided by what: steps and seconds of the run, or steps and seconds of this job.
    assert (first["job_steps"], first["seconds"]) == (first["steps"], first["job_seconds"])
    assert summary["job_steps"] == summary["steps"] - first["steps"]
    assert summary["job_samples"] == summary["samples"] - first["samples"]
    assert 0 < summary["job_seconds"] < summary["seconds"]
    assert summary["seconds"] - summary["job_seconds"] >= 0.5 * first["seconds"]
    rate = summary["job_samples"] / summary["job_seconds"]
    assert summary["samples_per_s"] == pytest.approx(rate)
    for name in ("metrics", "monitor", "steps", "epochs", "samples"):
        assert summary[name] == whole[name], name
    if world.rank == 0:
        kinds = ("step", "eval", "epoch")
        cut, one = (
            [
                {k: v for k, v in line.items() if k in ("kind", "step", "epoch", "seq", "loss")}
                for line in read_lines(shared / name / "metrics.jsonl")
                if line["kind"] in kinds
            ]
            for name in ("cut", "whole")
        )
        assert cut == one  # no line twice, none missing
        events = [
            line["event"]
            for line in read_lines(shared / "cut" / "metrics.jsonl")
            if line["kind"] == "event"
        ]
        assert "resumed" in events
    # Run again, it has nothing left to do, and says the same.
    again, last, _ = trained("cut")
    assert same(again, wanted)
    assert last["metrics"] == whole["metrics"]


def test_patience_ends_a_run_on_all_ranks(world, engines):
    replica, loader, _ = make(world, engines)
    trainer = hpc.Trainer(
        world, replica, loader, loss=mse_loss, steps=100, evaluate_every_steps=2,
        evaluation=held_out(world), metrics={"flat": lambda o, y: torch.ones(len(y))},
        monitor=Monitor("max:flat", patience=3), logging=QUIET,
    )  # fmt: skip
    summary = trainer.fit()
    assert summary["steps"] == 8  # the first is the best, three more are not
    assert summary["stop_reason"] == "3 evaluations without a better flat"
    assert summary["state"] == "finished"
    replica.close()


def gan_step(trainer, batch):
    """Two optimizers, and a penalty on the gradient of a gradient."""
    real, _ = batch
    n = trainer.loader.num_samples
    maker, critic = trainer.replicas["maker"], trainer.replicas["critic"]
    made = maker(torch.ones(len(real), 3))
    mixed = (real + made.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    judged = critic(made.detach()).mean() - critic(real).mean()
    critic_loss = judged + 10 * (slope.norm(dim=1) - 1).square().mean()
    critic.backward(critic_loss, num_samples=n)
    trainer.update("critic")
    maker_loss = -critic(maker(torch.ones(len(real), 3))).mean()
    maker.backward(maker_loss, num_samples=n)
    critic.zero_grad()  # the maker's loss went through it
    trainer.update("maker")
    return {"maker": maker_loss.detach(), "critic": critic_loss.detach()}


def test_several_optimizers_and_gradients_of_gradients(world, engines, shared):
    def train(ranks):
        torch.manual_seed(1)
        models = {"maker": torch.nn.Linear(3, 6), "critic": torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))}  # fmt: skip
        name = "local" if world.size == 1 else "mpi"
        replicas = {
            name_: hpc.distribute(
                ranks, model, torch.optim.Adam(model.parameters(), 1e-2), engine=engines[name]
            )
            for name_, model in models.items()
        }
        loader = hpc.Loader(ranks, data(), global_batch=10)
        trainer = hpc.Trainer(
            ranks, replicas, loader, step=gan_step, epochs=2, directory=shared / "gan",
            logging=QUIET,
        )  # fmt: skip
        trainer.fit()
        return [p for replica in replicas.values() for p in bits(replica)]

    def alone():
        """The same on one process, in plain torch."""
        torch.manual_seed(1)
        maker = torch.nn.Linear(3, 6)
        critic = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        adams = [torch.optim.Adam(m.parameters(), 1e-2) for m in (maker, critic)]
        loader = hpc.Loader(world, data(), global_batch=10)
        for _ in range(2):
            for mine in loader:
                pieces = world.comm.allgather((loader.num_samples, mine[0]))
                real = torch.cat([x for _, x in pieces])
                ones = torch.ones(len(real), 3)
                made = maker(ones)
                mixed = (real + made.detach()).requires_grad_()
                (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
                loss = critic(made.detach()).mean() - critic(real).mean()
                loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
                critic.zero_grad()
                loss.backward()
                adams[1].step()
                maker.zero_grad()
                (-critic(maker(ones)).mean()).backward()
                adams[0].step()
        return [p.detach() for model in (maker, critic) for p in model.parameters()]

    for ours, theirs in zip(train(world), alone(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
    if world.rank == 0:
        lines = list(read_lines(shared / "gan" / "metrics.jsonl"))
        assert {"maker", "critic"} <= lines[0].keys()
