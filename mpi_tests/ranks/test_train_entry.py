"""From a configuration to a trainer, on ranks: data by files and functions, several models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.errors import ConfigError
from hpctrain.train.config import parse_config
from hpctrain.train.entry import make_trainer
from mpi_tests.ranks.trainer_kit import bits, data, same

CONFIG = """
[model]
build = "mpi_tests.ranks.trainer_kit:line"
[data]
files = ["x.npy", "y.npy"]
join = "columns"
[train]
global_batch = 12
epochs = 2
loss = "mse_loss"
num_threads = 1
[optimizer]
lr = 0.01
[schedule]
name = "recipe"
warmup_steps = 2
[logging]
display = "off"
"""
FUNCTION = CONFIG.replace(
    'files = ["x.npy", "y.npy"]\njoin = "columns"',
    'build = "mpi_tests.ranks.trainer_kit:shared_data"',
)


@pytest.fixture
def shared(world, tmp_path):
    """One folder for all ranks."""
    return Path(world.comm.bcast(str(tmp_path), root=0))


@pytest.fixture
def folder(world, shared):
    if world.rank == 0:
        for name, array in zip("xy", data(), strict=True):
            np.save(shared / f"{name}.npy", array.numpy())
    world.comm.Barrier()
    return shared


def train(world, text, folder, *settings):
    world.streams.bind_equal()
    torch.manual_seed(9)
    trainer = make_trainer(world, parse_config(text, settings), folder, None)
    for observer in list(world.observers):
        world.observers.remove(observer)
    summary = trainer.fit()
    weights = [value for replica in trainer.replicas.values() for value in bits(replica)]
    for replica in trainer.replicas.values():
        replica.close()
    return weights, summary, trainer


def test_data_by_files_and_functions_train_the_same(world, folder):
    wanted, summary, trainer = train(world, CONFIG, folder)
    assert (summary["steps"], summary["samples"]) == (8, 80)
    rate = trainer.replica.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(0.0, abs=1e-12)  # the recipe's cosine has come to its end
    assert same(train(world, CONFIG, folder, "data.access=share")[0], wanted)
    assert same(train(world, FUNCTION, folder)[0], wanted)
    _, scattered, _ = train(world, CONFIG, folder, "data.access=scatter")
    assert scattered["samples"] == 80


def test_data_in_parts_and_shards_train_the_same(world, folder):
    """Rows in several files and folders, and chosen columns, by every access."""
    wanted, _, _ = train(world, CONFIG, folder)
    if world.rank == 0:
        x, y = data()
        for number, part in enumerate(np.array_split(np.arange(len(x)), 11)):
            for kind in ("npz", "pt"):
                (folder / kind).mkdir(exist_ok=True)
            rows = {"x": x[part], "y": y[part], "unused": x[part]}
            arrays = {name: value.numpy() for name, value in rows.items()}
            np.savez(folder / "npz" / f"part-{number}.npz", **arrays)
            torch.save(rows, folder / "pt" / f"part-{number}.pt")
    world.comm.Barrier()
    columns = "data.columns=['x', 'y']"
    plain = CONFIG.replace('join = "columns"\n', "")
    listed = [f"npz/part-{number}.npz" for number in range(11)]
    for settings in (
        ("data.files=['npz']", columns),
        ("data.files=['pt']", columns),
        ("data.files=['pt']", columns, "data.access=share"),
        (f"data.files={listed}", "data.join=rows", columns),
        (f"data.files={listed}", "data.join=rows", columns, "data.access=share"),
    ):
        assert same(train(world, plain, folder, *settings)[0], wanted), settings
    settings = ("data.files=['npz']", columns, "data.access=scatter")
    assert train(world, plain, folder, *settings)[1]["samples"] == 80
    with pytest.raises(ConfigError, match=r'data\.files names several files; add join = "rows"'):
        train(world, plain, folder)


def weigh(data):
    """Only the first four samples count."""
    return (np.arange(len(data)) < 4).astype(float)


def test_samplers_by_keys_of_the_file(world, folder):
    if world.rank == 0:
        np.save(folder / "w.npy", (np.arange(40) < 4).astype("f4"))
        np.save(folder / "lengths.npy", np.arange(40)[::-1].copy())
    world.comm.Barrier()
    by_file, told, _ = train(world, CONFIG, folder, "data.sample_weights=w.npy")
    assert told["samples"] == 80
    name = "mpi_tests.ranks.test_train_entry:weigh"
    assert same(train(world, CONFIG, folder, f"data.sample_weights={name}")[0], by_file)
    longer = ("data.sample_weights=w.npy", "data.num_draws=100")
    assert train(world, CONFIG, folder, *longer)[1]["samples"] == 200
    _, told, trainer = train(world, CONFIG, folder, "data.lengths=lengths.npy")
    assert told["samples"] == 80
    assert trainer.loader.state_dict()["order"] == "lengths"
    with pytest.raises(ConfigError, match=r"lengths has 4 numbers, and there are 40 samples"):
        train(world, CONFIG, folder, "data.lengths=mpi_tests.ranks.test_train_entry:four")
    with pytest.raises(ConfigError, match=r"must be a \.npy file or MODULE:FUNCTION"):
        train(world, CONFIG, folder, "data.lengths=lengths")
    with pytest.raises(ConfigError, match=r"nosuch\.npy is missing"):
        train(world, CONFIG, folder, "data.lengths=nosuch.npy")


def four(data):
    return [1, 2, 3, 4]


def test_parts_of_a_step_train_the_same_where_they_divide_the_epoch(world, folder):
    whole, one, _ = train(world, CONFIG, folder, "train.global_batch=20", "optimizer.name=SGD")
    settings = ("train.global_batch=20", "optimizer.name=SGD", "train.accumulate=2")
    parts, two, _ = train(world, CONFIG, folder, *settings)
    assert one["steps"] == two["steps"] == 4
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_several_models_from_one_file(world, folder):
    text = CONFIG.replace(":line", ":pair").replace('loss = "mse_loss"', "")
    weights, summary, trainer = train(
        world, text, folder, "train.step=mpi_tests.ranks.trainer_kit:pair_step"
    )
    assert summary["steps"] == 8
    assert list(trainer.schedules) == ["first", "second"]
    told = world.comm.allgather([weight.numpy().tobytes() for weight in weights])
    assert all(other == told[0] for other in told)
    with pytest.raises(ConfigError, match=r"2 models; several models need train\.step"):
        train(world, text, folder, "train.loss=mse_loss")


def test_what_cannot_be_opened_or_built_is_refused_on_all_ranks(world, folder):
    for settings, told in (
        (("data.files=['nosuch.npy', 'y.npy']",), "nosuch.npy"),
        (("data.files=['nosuch.npy', 'y.npy']", "data.access=scatter"), "nosuch.npy"),
        (("optimizer.name=AdmW",), "did you mean AdamW"),
        (("optimizer.args.beta=1",), "has no argument 'beta'; did you mean betas"),
        (("train.loss=mseloss",), "did you mean mse_loss"),
        (("data.drop_last=true", "train.global_batch=1000"), "an epoch of these data has no batch"),
        (("schedule.warmup_steps=0", "schedule.name=StepLR"), "missing a required argument"),
    ):
        with pytest.raises(ConfigError, match=told):
            train(world, CONFIG, folder, *settings)


EVALUATED = FUNCTION.replace(
    "[train]", 'evaluation = "mpi_tests.ranks.trainer_kit:shared_data"\n[train]'
).replace('name = "recipe"\nwarmup_steps = 2', "")


def test_a_plateau_from_a_file_has_the_direction_of_its_metric(world, folder):
    plateau = ("schedule.name=ReduceLROnPlateau", "schedule.args.patience=0", "train.epochs=3")
    by_error = ("schedule.metric=max:mae", "train.metrics=['mae']")
    for more in ((), ("schedule.every=epoch",), by_error):
        _, _, trainer = train(world, EVALUATED, folder, *plateau, *more)
        (schedule,) = (trainer.schedules | trainer.epoch_schedules).values()
        assert schedule.last_epoch == 3  # one evaluation an epoch
        assert schedule.mode == ("max" if more == by_error else "min")
        rate = trainer.replica.optimizer.param_groups[0]["lr"]
        # The error falls in every epoch: taken for a score, every epoch after the first is worse.
        assert rate == pytest.approx(1e-4 if schedule.mode == "max" else 1e-2)


def test_an_average_from_a_file_is_what_is_evaluated(world, folder):
    plain, by_last, _ = train(world, EVALUATED, folder)
    _, by_average, trainer = train(world, EVALUATED, folder, "ema.decay=0.9")
    assert trainer.emas["model"].decay == 0.9
    assert trainer.emas["model"].num_updates == trainer.step == 8
    assert by_average["metrics"]["loss"] > by_last["metrics"]["loss"]  # it lags behind
    same_weights, also_last, _ = train(
        world, EVALUATED, folder, "ema.decay=0.9", "ema.evaluate=false"
    )
    assert same(same_weights, plain)
    assert also_last["metrics"] == by_last["metrics"]


def test_a_compiled_model_trains_the_same_and_keeps_its_names(world, folder):
    """By a backend that only traces: the code that inductor makes is torch's own affair."""
    wanted, summary, _ = train(world, EVALUATED, folder)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    words = ("model.compile=true", "model.compile_backend=eager")
    compiled, told, trainer = train(world, EVALUATED, folder, *words)
    counted = dict(torch._dynamo.utils.counters["stats"])
    torch._dynamo.reset()
    assert counted["unique_graphs"] >= 2  # for training, and for evaluation
    assert list(trainer.replica.model.state_dict()) == [
        "0.weight", "0.bias", "2.weight", "2.bias",
    ]  # fmt: skip
    for ours, theirs in zip(compiled, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert told["metrics"]["loss"] == pytest.approx(summary["metrics"]["loss"], rel=1e-4)


def test_named_batches_and_a_model_with_its_own_loss_need_no_further_key(world, folder):
    text = EVALUATED.replace("trainer_kit:line", "test_trainer_results:own_loss")
    text = text.replace("trainer_kit:shared_data", "test_trainer_results:named_data")
    text = text.replace('loss = "mse_loss"', 'metrics = ["mse", "mae"]')
    weights, summary, _ = train(world, text, folder, "train.epochs=4")
    assert summary["metrics"]["mse"] == pytest.approx(summary["metrics"]["loss"], rel=1e-5)
    by_name, told, _ = train(world, text, folder, "train.epochs=4", "train.loss=mse_loss")
    assert same(weights, by_name)  # a loss by name looks at the logits
    assert told["metrics"] == summary["metrics"]
    with pytest.raises(ConfigError, match=r"forward takes .*features"):
        train(world, text, folder, "model.build=mpi_tests.ranks.test_train_entry:wrong_names")


def wrong_names():
    """For configurations: a model whose forward has other names than the data."""
    from mpi_tests.ranks.test_trainer_results import Output, OwnLoss

    class Renamed(OwnLoss):
        def forward(self, features, labels=None):
            return super().forward(features, torch.ones(len(features)), labels)

    return Renamed(Output)
