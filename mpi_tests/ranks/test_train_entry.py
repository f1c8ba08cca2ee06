"""From a configuration to a trainer, on ranks: data by files and functions, several models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hpctrain as hpc
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
    with pytest.raises(
        hpc.ConfigError, match=r'data\.files names several files; add join = "rows"'
    ):
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
    with pytest.raises(hpc.ConfigError, match=r"lengths has 4 numbers, and there are 40 samples"):
        train(world, CONFIG, folder, "data.lengths=mpi_tests.ranks.test_train_entry:four")
    with pytest.raises(hpc.ConfigError, match=r"must be a \.npy file or MODULE:FUNCTION"):
        train(world, CONFIG, folder, "data.lengths=lengths")
    with pytest.raises(hpc.ConfigError, match=r"nosuch\.npy is missing"):
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
    with pytest.raises(hpc.ConfigError, match=r"2 models; several need train\.step"):
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
        with pytest.raises(hpc.ConfigError, match=told):
            train(world, CONFIG, folder, *settings)
