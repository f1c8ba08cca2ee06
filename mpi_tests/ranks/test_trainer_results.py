"""What a trainer does with results: schedules by metrics, logs, averages, losses of models."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import signal
import struct
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.checkpoint import list_checkpoints, read_checkpoint
from hpctrain.train.config import Checkpoint, Logging
from hpctrain.train.journal import read_lines
from mpi_tests.ranks.trainer_kit import QUIET, bits, data, held_out, make, same

SAVED = Checkpoint(every_s=None)


@pytest.fixture
def shared(world, tmp_path):
    """One folder for all ranks."""
    return Path(world.comm.bcast(str(tmp_path), root=0))


def fit(trainer, stop_at=None):
    """Train to the end, or until a signal to the last rank at a step."""
    world = trainer.world

    def interrupt(_, facts):
        if facts["step"] == stop_at and world.rank == world.size - 1:
            signal.raise_signal(signal.SIGUSR2)

    trainer.on("step", interrupt)
    if stop_at is None:
        return trainer.fit()
    with pytest.raises(SystemExit) as left:
        trainer.fit()
    assert left.value.code == 75
    return None


def lines_of(directory, kind="step"):
    return [line for line in read_lines(directory / "metrics.jsonl") if line["kind"] == kind]


# Schedules that look at a metric


def trained_on_a_plateau(world, engines, directory, *, by, stop_at=None):
    """The model stays as it is: no evaluation after the first is better."""
    replica, loader, _ = make(world, engines)
    for parameter in replica.model.parameters():
        parameter.register_hook(torch.zeros_like)
    replica.optimizer.param_groups[0]["weight_decay"] = 0.0
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        replica.optimizer, mode="max", factor=0.5, patience=1
    )
    trainer = hpc.Trainer(
        world, replica, loader, loss=mse_loss, epochs=8, evaluation=held_out(world),
        metrics={"error": lambda out, wanted: torch.zeros(len(wanted))}, schedule_metric="error",
        directory=directory, logging=QUIET, checkpoint=SAVED, **{by: {"model": schedule}},
    )  # fmt: skip
    fit(trainer, stop_at)
    found = schedule.state_dict(), replica.optimizer.param_groups[0]["lr"]
    replica.close()
    return found


@pytest.mark.parametrize("by", ["epoch_schedules", "schedules"])
def test_a_plateau_steps_after_evaluations_and_goes_on_after_a_stop(
    world, engines, shared, capsys, by
):
    whole, rate = trained_on_a_plateau(world, engines, shared / by, by=by)
    # One evaluation an epoch; after the first, every second one is one too many.
    assert (whole["last_epoch"], rate) == (8, 1e-2 / 8)
    trained_on_a_plateau(world, engines, shared / "parts", by=by, stop_at=17)
    assert lines_of(shared / "parts")[-1]["step"] <= 18
    capsys.readouterr()
    again, rate_again = trained_on_a_plateau(world, engines, shared / "parts", by=by)
    assert (again, rate_again) == (whole, rate)
    assert "the checkpoint's options are kept" not in capsys.readouterr().err
    rates = [line["lr"] for line in lines_of(shared / "parts")]
    assert rates == [line["lr"] for line in lines_of(shared / by)]
    assert [rates[4 * epoch] for epoch in range(8)] == [
        0.01, 0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025, 0.00125,
    ]  # fmt: skip


# Logs


def test_rates_and_norms_are_in_every_line(world, engines, shared, monkeypatch):
    """The norm is that of the averaged gradients, and only steps that are logged compute it."""
    from hpctrain.precision.gradients import ScaleAndClip

    computed = []
    note = ScaleAndClip._note_norm
    monkeypatch.setattr(
        ScaleAndClip, "_note_norm", lambda *words: (computed.append(1), note(*words))[1]
    )
    x, y = data(24)
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 1)
    wanted, copy = [], torch.nn.Linear(6, 1)
    copy.load_state_dict(model.state_dict())
    slow, fast = {"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.3}
    optimizer = torch.optim.SGD([slow, fast])
    plain = torch.optim.SGD(
        [{"params": [copy.weight], "lr": 0.1}, {"params": [copy.bias], "lr": 0.3}]
    )
    for start in range(0, 24, 6):
        plain.zero_grad()
        mse_loss(copy(x[start : start + 6]), y[start : start + 6]).backward()
        wanted.append(math.sqrt(sum(p.grad.square().sum().item() for p in copy.parameters())))
        plain.step()
    name = "local" if world.size == 1 else "mpi"
    replica = hpc.distribute(world, model, optimizer, engine=engines[name])
    loader = hpc.Loader(world, (x, y), global_batch=6, shuffle=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
    trainer = hpc.Trainer(
        world, replica, loader, loss=mse_loss, schedules={"model": schedule},
        directory=shared / "run", logging=Logging(display="off", every_steps=2, csv=True),
    )  # fmt: skip
    trainer.fit()
    assert len(computed) == 3
    if world.rank == 0:
        lines = lines_of(shared / "run")
        assert [line["step"] for line in lines] == [1, 2, 4]
        assert [(line["lr"], line["lr_1"]) for line in lines] == [(0.1, 0.3)] * 3
        for line in lines:
            assert line["grad_norm"] == pytest.approx(wanted[line["step"] - 1], rel=1e-4)
        with (shared / "run" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row["grad_norm"]) for row in rows if row["kind"] == "step"] == [
            line["grad_norm"] for line in lines
        ]
    replica.close()


@pytest.mark.parametrize("options", [
    {"clip_norm": 1e-3}, {"clip_value": 1e-3}, {"precision": "fp16"}, {"overlap": True},
    {"update": "replicated"}, {"precision": "bf16-pure"},
], ids=str)  # fmt: skip
def test_norms_before_clipping_are_logged_whatever_else_is_done(world, engines, shared, options):
    x, y = data(24)
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 1)
    mse_loss(model(x), y).backward()
    wanted = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    model.zero_grad()
    engine = engines["local" if world.size == 1 else "mpi"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replica = hpc.distribute(world, model, optimizer, engine=engine, accumulate=2, **options)
    loader = hpc.Loader(world, (x, y), global_batch=12, shuffle=False)
    hpc.Trainer(
        world, replica, loader, loss=mse_loss, directory=shared / "run", logging=QUIET
    ).fit()
    if world.rank == 0:
        (line,) = lines_of(shared / "run")
        assert line["grad_norm"] == pytest.approx(wanted, rel=2e-2)
        assert line["lr"] == 0.1
    replica.close()


def logged(world, engines, folder, loggers, *, fails_at=None):
    """Two epochs of four steps, with a checkpoint every three steps."""
    replica, loader, _ = make(world, engines)
    trainer = hpc.Trainer(
        world, replica, loader, loss=mse_loss, epochs=2, evaluation=held_out(world),
        directory=folder / "run", checkpoint=Checkpoint(every_s=None, every_steps=3),
        logging=Logging(display="off", every_steps=1, **loggers),
    )  # fmt: skip

    def fail(_, facts):
        if facts["step"] == fails_at:
            raise OSError("out of luck")

    trainer.on("step", fail)
    if fails_at is None:
        trainer.fit()
    else:
        with pytest.raises(OSError, match="luck"):
            trainer.fit()
    replica.close()


EPOCHS = [("step", 1), ("step", 2), ("step", 3), ("step", 4), ("eval", 4), ("epoch", 4),
          ("step", 5), ("step", 6), ("step", 7), ("step", 8), ("eval", 8),
          ("epoch", 8)]  # fmt: skip


def test_a_csv_file_goes_on_where_the_run_does(world, engines, shared):
    def rows():
        with (shared / "run" / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    logged(world, engines, shared, {"csv": True}, fails_at=5)  # the last checkpoint is of step 3
    if world.rank == 0:
        assert [(row["kind"], int(row["step"])) for row in rows()] == EPOCHS[:6]
    world.comm.Barrier()
    logged(world, engines, shared, {"csv": True})
    if world.rank == 0:
        assert [(row["kind"], int(row["step"])) for row in rows()] == EPOCHS
        lines = [x for x in read_lines(shared / "run" / "metrics.jsonl") if x["kind"] != "event"]
        assert [row["seq"] for row in rows()] == [str(line["seq"]) for line in lines]
        losses = [line["loss"] for line in lines if line["kind"] == "step"]
        assert [float(row["loss"]) for row in rows() if row["kind"] == "step"] == losses
        assert rows()[0]["best"] == ""


def records_of(path):
    """The records of a file of wandb: a log of LevelDB's form, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2 as proto

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<4xHB", content[at : at + 7])
        piece, at = content[at + 7 : at + 7 + length], at + 7 + length
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            record = proto.Record()
            record.ParseFromString(whole)
            yield record


def test_weights_and_biases_get_every_step_once(world, engines, shared):
    wandb = pytest.importorskip("wandb")
    logged(world, engines, shared, {"wandb": "offline"}, fails_at=5)
    logged(world, engines, shared, {"wandb": "offline"})
    wandb.teardown()  # its process, which it leaves running for further runs
    os.environ.pop("WANDB_SERVICE", None)
    if world.rank == 0:
        folder = shared / "run" / "wandb"
        jobs = sorted(folder.glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
        assert len(jobs) == 2
        assert len({path.stem for path in jobs}) == 1  # one run, with one id
        seen = []
        for path in jobs:
            for record in records_of(path):
                items = record.history.item
                row = {(item.key or "/".join(item.nested_key)): item.value_json for item in items}
                if row:
                    kind = "eval" if "evaluation/loss" in row else "step"
                    seen.append((kind, int(row["step"])))
                    assert math.isfinite(float(row["train/grad_norm" if kind == "step" else
                                                   "evaluation/loss"]))  # fmt: skip
        assert seen == [place for place in EPOCHS if place[0] != "epoch"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_step_once(world, engines, shared):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logged(world, engines, shared, {"tensorboard": True}, fails_at=5)
    logged(world, engines, shared, {"tensorboard": True})
    if world.rank == 0:
        seen = events.EventAccumulator(str(shared / "run" / "tensorboard"))
        seen.Reload()
        for name in ("loss", "lr", "grad_norm"):
            assert [event.step for event in seen.Scalars(f"train/{name}")] == list(range(1, 9))
        assert [event.step for event in seen.Scalars("evaluation/loss")] == [4, 8]


# Averages


def with_average(world, engines, directory, *, decay, stop_at=None, **options):
    replica, loader, schedule = make(world, engines)
    ema = hpc.optim.EMA.once_a_node(replica.engine, replica.model, decay, warm_up=True)
    trainer = hpc.Trainer(
        world, replica, loader, loss=mse_loss, epochs=3, schedules={"model": schedule},
        evaluation=held_out(world), ema=ema, directory=directory, logging=QUIET,
        checkpoint=Checkpoint(every_s=None), **options,
    )  # fmt: skip
    summary = fit(trainer, stop_at)
    return replica, ema, summary


@pytest.mark.parametrize("averaged", [True, False])
def test_averages_are_evaluated_saved_and_resumed(world, engines, shared, averaged):
    """With BatchNorm whose statistics, and the averages of them, are each rank's own."""
    whole, ema, summary = with_average(
        world, engines, shared / "whole", decay=0.8, evaluate_ema=averaged
    )
    wanted, average = bits(whole), {name: t.clone() for name, t in ema.averages.items()}
    assert ema.num_updates == 12
    x, y = data(15)
    whole.model.eval()
    with torch.no_grad():
        last = mse_loss(whole.model(x), y).item()
        with ema.swapped_in():
            mean = mse_loss(whole.model(x), y).item()
    assert last != pytest.approx(mean, rel=1e-5)
    assert summary["metrics"]["loss"] == pytest.approx(mean if averaged else last, rel=1e-5)
    assert same(bits(whole), wanted)
    whole.close()
    options = {"decay": 0.8, "evaluate_ema": averaged}
    with_average(world, engines, shared / "parts", stop_at=6, **options)[0].close()
    parts, again, _ = with_average(world, engines, shared / "parts", **options)
    assert same(bits(parts), wanted)
    assert again.num_updates == 12
    for name, tensor in again.averages.items():
        assert torch.equal(tensor, average[name]), name
    saved = read_checkpoint(list_checkpoints(shared / "parts" / "checkpoints")[-1].path)
    assert torch.equal(saved["ema"]["averages"]["0.weight"], average["0.weight"])
    parts.close()


# Models that return their loss


@dataclasses.dataclass
class Output:
    """What a model returns beside its loss."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class OwnLoss(torch.nn.Module):
    """Takes a batch by name and computes its loss, as transformers do."""

    def __init__(self, returns):
        super().__init__()
        torch.manual_seed(5)
        self.inner = torch.nn.Linear(6, 1)
        self.returns = returns

    def forward(self, features, scale=None, labels=None):
        logits = self.inner(features) * scale[:, None]
        loss = None if labels is None else mse_loss(logits, labels.to(logits.dtype))
        return self.returns(loss=loss, logits=logits)


def own_loss():
    """For configurations."""
    return OwnLoss(Output)


def named_data(num=40):
    x, y = data(num)
    return {"labels": y, "scale": torch.linspace(0.5, 1.5, num), "features": x}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-pure"])
@pytest.mark.parametrize("returns", [Output, dict])
def test_a_model_that_returns_its_loss_trains_and_is_evaluated(world, engines, returns, precision):
    engine = engines["local" if world.size == 1 else "mpi"]

    def trained(loss):
        model = OwnLoss(returns)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        replica = hpc.distribute(world, model, optimizer, engine=engine, precision=precision)
        trainer = hpc.Trainer(
            world, replica, hpc.Loader(world, named_data(), global_batch=12), loss=loss, epochs=2,
            evaluation=hpc.Loader(world, named_data(15), global_batch=8, shuffle=False),
            metrics={"error": lambda out, wanted: (_logits(out) - wanted).abs().double()},
            logging=QUIET,
        )  # fmt: skip
        summary = trainer.fit()
        weights = bits(replica)
        replica.close()
        return weights, summary["metrics"]

    def by_function(out, wanted):
        assert not isinstance(out, torch.Tensor)
        return mse_loss(_logits(out), wanted)

    own, measured = trained(None)
    given, measured_too = trained(by_function)
    for ours, theirs in zip(own, given, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)
    assert measured == pytest.approx(measured_too, rel=5e-2)
    with torch.no_grad():
        untrained = OwnLoss(Output)(**named_data(15)).loss.item()
    assert 0 < measured["loss"] < untrained
    if precision == "fp32":
        assert same(own, given)
        assert measured == measured_too


def _logits(out):
    return out["logits"] if isinstance(out, dict) else out.logits


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of CPUs without bf16
def test_a_model_of_transformers_trains_by_itself(world, engines):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=17, n_positions=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tokens = (torch.arange(8) + torch.arange(40)[:, None]) % 17
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    engine = engines["local" if world.size == 1 else "mpi"]
    replica = hpc.distribute(
        world, model, torch.optim.AdamW(model.parameters(), 1e-2), engine=engine, precision="bf16"
    )
    kinds = []

    def right(out, wanted):
        kinds.append((type(out).__name__, out.logits.dtype, out["loss"].dtype))
        return (out.logits[:, :-1].argmax(-1) == wanted[:, 1:]).double().mean(1)

    trainer = hpc.Trainer(
        world, replica, hpc.Loader(world, batch, global_batch=8), epochs=6, logging=QUIET,
        evaluation=hpc.Loader(world, batch, global_batch=20, shuffle=False),
        metrics={"right": right},
    )  # fmt: skip
    summary = trainer.fit()
    assert set(kinds) == {("CausalLMOutputWithCrossAttentions", torch.float32, torch.float32)}
    assert summary["metrics"]["right"] > 0.9
    assert summary["metrics"]["loss"] < 1.0
    replica.close()
