"""`hpctrain train` with a [grid]: the weights and results of ranks that hold the whole model."""

from __future__ import annotations

import pytest
import torch

from hpctrain.errors import ConfigError
from hpctrain.train.config import parse_config
from hpctrain.train.entry import make_trainer
from mpi_tests.ranks.test_train_entry import FUNCTION, folder, shared

__all__ = ["folder", "shared"]

TEXT = FUNCTION.replace(
    'shared_data"', 'shared_data"\nevaluation = "mpi_tests.ranks.trainer_kit:shared_data"'
).replace("epochs = 2", 'epochs = 2\nmetrics = ["mae"]')
AVERAGED = ("ema.decay=0.9", "faults.sentinel_every_steps=2")


def fit(world, folder, directory, *settings):
    """Weights by name, as far as this rank has them, and the last results."""
    world.streams.bind_equal()
    torch.manual_seed(9)
    trainer = make_trainer(world, parse_config(TEXT, settings), folder, directory)
    for observer in list(world.observers):
        world.observers.remove(observer)
    summary = trainer.fit()
    assert (summary["steps"], summary["samples"]) == (8, 80)
    weights = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        for name, tensor in trainer.replica.model.state_dict().items()
    }
    trainer.replica.close()
    if trainer.grid is not None:
        trainer.grid.close()
    return weights, trainer.progress.results


def divisions(world):
    other = 2 if world.size % 2 == 0 else world.size
    data = world.size // other
    yield "state", ["grid.shard=state", "engine.bucket_bytes=256"]
    yield "parameters", ["grid.shard=parameters"]
    if other == 2:  # the model has two layers with weights
        yield "stages", [f"grid.data={data}", "grid.pipeline=2", "grid.micro_batches=2"]
        layers = ["grid.layers.0=column", "grid.layers.2=row"]
        yield "layers", [f"grid.data={data}", "grid.tensor=2", *layers]


@pytest.mark.parametrize("name", ["state", "parameters", "stages", "layers"])
def test_every_division_gives_the_same(world, folder, name):
    settings = dict(divisions(world)).get(name)
    if settings is None:
        pytest.skip("these ranks cannot be laid out so")
    wanted, results = fit(world, folder, None, *AVERAGED)
    weights, found = fit(world, folder, None, *AVERAGED, *settings)
    assert weights
    for key, tensor in weights.items():
        assert (tensor - wanted[key]).abs().max().item() <= 1e-4, key
    assert found.keys() == results.keys()
    assert all(abs(found[key] - results[key]) <= 1e-4 for key in results)


def test_a_run_resumes_with_another_grid(world, folder):
    wanted, _ = fit(world, folder, None, *AVERAGED)
    directory = folder / "run"
    last = ["grid.shard=state", "engine.bucket_bytes=256"]
    for settings in ([*AVERAGED, "train.steps=4", "grid.shard=parameters"], [*AVERAGED, *last]):
        world.streams.bind_equal()
        torch.manual_seed(9)
        text = TEXT.replace("epochs = 2", "epochs = 2" if settings[2:] == last else "")
        text = text.replace("warmup_steps = 2", "warmup_steps = 2\ndecay_steps = 8")
        trainer = make_trainer(world, parse_config(text, settings), folder, directory)
        for observer in list(world.observers):
            world.observers.remove(observer)
        trainer.fit()
        weights = trainer.replica.model.state_dict()
        trainer.replica.close()
        trainer.grid.close()
    assert trainer.step == 8
    assert all((weights[name] - wanted[name]).abs().max().item() <= 1e-4 for name in wanted)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["grid.pipeline=2"], "needs grid.micro_batches; take at least 8"),
        (["grid.micro_batches=2"], "belongs to grid.pipeline, which is 1"),
        (["grid.tensor=2"], "give both or neither"),
        (["grid.units=['a.*']", "grid.shard=state"], "grid.units belongs to grid.shard="),
        (["grid.shard=state", "model.compile=true"], r"model.compile does not go with \[grid\]"),
        (["grid.shard=state", "engine.update=sharded"], r'engine.update="sharded" does not go'),
    ],
)
def test_what_does_not_go_together_is_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        parse_config(TEXT, settings)


def test_several_models_are_refused(world, folder):
    text = TEXT.replace(":line", ":pair")
    with pytest.raises(ConfigError, match="returned 2 models"):
        make_trainer(world, parse_config(text, ["grid.shard=state"]), folder, None)
