"""What a trainer measures, refuses and guards against."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.errors import ConfigError, DriftError, NonFiniteError
from hpctrain.train.config import Checkpoint, Faults, Logging
from hpctrain.train.directory import Lock
from hpctrain.train.figures import time_steps
from hpctrain.train.journal import read_lines
from hpctrain.train.progress import Monitor
from mpi_tests.ranks.trainer_kit import QUIET, data, held_out, make


@pytest.fixture
def shared(world, tmp_path):
    """One folder for all ranks."""
    return Path(world.comm.bcast(str(tmp_path), root=0))


def test_time_is_split_and_the_slowest_rank_is_named(world, engines, shared):
    timer = time_steps(world)
    try:
        replica, loader, _ = make(world, engines)
        trainer = hpc.Trainer(
            world, replica, loader, loss=mse_loss, steps=4, directory=shared / "timed",
            logging=Logging(display="off", every_steps=2), timer=timer,
        )  # fmt: skip
        trainer.fit()
    finally:
        world.observers.remove(timer)
    replica.close()
    if world.rank == 0:
        lines = [x for x in read_lines(shared / "timed" / "metrics.jsonl") if x["kind"] == "step"]
        assert [line["step"] for line in lines] == [1, 2, 4]
        for line in lines:
            phases = [line[f"{name}_s"] for name in
                      ("input", "forward", "backward", "exchange", "update")]  # fmt: skip
            assert all(seconds > 0 for seconds in phases)
            assert sum(phases) <= line["step_s"] * 1.5
            assert (0 <= line["slowest_rank"] < world.size) if world.size > 1 else True


def test_what_is_wrong_is_refused(world, engines, shared):
    replica, loader, schedule = make(world, engines)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(replica.optimizer)
    for told, options in (
        ("give one of them", {"loss": mse_loss, "epochs": 1, "steps": 1}),
        ("2 replicas need a step function", {"several": True}),
        ("ReduceLROnPlateau steps after evaluations", {"schedules": {"model": plateau}}),
        (
            'mode="max", and of loss the monitor says "min"',
            {
                "schedules": {
                    "model": torch.optim.lr_scheduler.ReduceLROnPlateau(
                        replica.optimizer, mode="max"
                    )
                },
                "evaluation": held_out(world),
            },
        ),
        ("needs a directory", {"loss": mse_loss, "checkpoint": Checkpoint()}),
        ("csv=true needs a directory", {"loss": mse_loss, "logging": Logging(csv=True)}),
        (
            "follows 'acc', and evaluations measure loss",
            {"loss": mse_loss, "evaluation": held_out(world), "monitor": Monitor("max:acc")},
        ),
        ("no replica 'net'", {"loss": mse_loss, "schedules": {"net": schedule}}),
    ):
        several = options.pop("several", False)
        models = {"a": replica, "b": replica} if several else replica
        with pytest.raises(ConfigError, match=told):
            hpc.Trainer(world, models, loader, **options)
    with pytest.raises(ConfigError, match=r"no train\.loss, and the model returned a tensor"):
        hpc.Trainer(world, replica, hpc.Loader(world, (data()[0],), global_batch=12),
                    logging=QUIET).fit()  # fmt: skip
    trainer = hpc.Trainer(world, replica, loader, loss=mse_loss, logging=QUIET)
    with pytest.raises(ConfigError, match="event='steps' is unknown"):
        trainer.on("steps", print)

    def forgets(trainer, batch):
        loss = mse_loss(trainer.replica(batch[0]), batch[1])
        trainer.replica.backward(loss, num_samples=trainer.loader.num_samples)
        trainer.replica.step()
        return loss

    with pytest.raises(ConfigError, match=r"call trainer\.update"):
        hpc.Trainer(world, replica, loader, step=forgets, logging=QUIET).fit()
    replica.close()


def test_nan_and_weights_that_drift_apart_name_the_rank(world, engines):
    def train(spoil):
        replica, loader, _ = make(world, engines)
        trainer = hpc.Trainer(
            world, replica, loader, loss=mse_loss, steps=6, logging=QUIET,
            faults=Faults(sentinel_every_steps=2),
        )  # fmt: skip
        if world.rank == world.size - 1:
            trainer.on("step", spoil)
        try:
            trainer.fit()
        finally:
            replica.close()

    def drift(trainer, facts):
        if facts["step"] == 4:
            with torch.no_grad():
                trainer.replica.model[0].bias[2] += 1e-6

    last = world.size - 1
    if world.size > 1:  # one rank alone has nothing to compare
        with pytest.raises(DriftError, match=rf"0\.bias.* rank {last}\b"):
            train(drift)

    def poison(trainer, facts):
        if facts["step"] == 2:
            trainer.loss = lambda out, wanted: mse_loss(out, wanted) * float("nan")

    with pytest.raises(
        NonFiniteError,
        match=rf"loss was inf or NaN at step 3 on rank {last} of {world.size}",
    ):
        train(poison)


def test_a_directory_in_use_is_refused_on_all_ranks(world, engines, shared):
    replica, loader, _ = make(world, engines)
    held = None
    if world.rank == 0:
        (shared / "busy").mkdir()
        held = Lock(shared / "busy", job_id="41")
    trainer = hpc.Trainer(
        world, replica, loader, loss=mse_loss, directory=shared / "busy", logging=QUIET
    )
    with pytest.raises(ConfigError, match=r"rank 0 of .* in use by process .*, job 41"):
        trainer.fit()
    if held is not None:
        held.release()
    trainer.fit()
    replica.close()
