"""A changed configuration: what a checkpoint would not let take effect is refused by its key."""

from __future__ import annotations

import pytest

from hpctrain.checkpoint import write_checkpoint
from hpctrain.train.checkpoints import describe_changes, falls_until, saved_config
from hpctrain.train.config import parse_config, to_toml

CONFIG = """
[model]
build = "a:model"
[data]
build = "a:data"
[train]
steps = 400
global_batch = 16
loss = "mse_loss"
[optimizer]
name = "SGD"
lr = 0.1
args = { momentum = 0.9 }
"""
EVALUATED = ("data.evaluation=a:more",)
RECIPE = ("schedule.name=recipe", "schedule.warmup_steps=5")


def changes(*settings, before=()):
    """From a run with the settings `before` to one that has more of them."""
    saved = parse_config(CONFIG, before)
    now = parse_config(CONFIG, (*before, *settings))
    ends = [falls_until(config, config.train.steps) for config in (saved, now)]
    return describe_changes(saved, now, saved_end=ends[0], end=ends[1])


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps=500",
        "train.global_batch=32",
        "train.accumulate=2",
        "train.patience=3",
        "model.args.dropout=0.5",
        "precision.kind=bf16",
        "optimizer.clip_norm=1",
        "checkpoint.keep_last=5",
        "logging.every_steps=3",
        "engine.name=torch",
    ],
)
def test_what_takes_effect_may_change(setting):
    assert changes(setting, before=EVALUATED) == []


@pytest.mark.parametrize(
    ("before", "setting", "told"),
    [
        ((), "optimizer.lr=0.01", "optimizer.lr 0.1 -> 0.01: it is restored from the checkpoint"),
        ((), "optimizer.args.momentum=0.5", "optimizer.args.momentum 0.9 -> 0.5"),
        ((), "optimizer.weight_decay=0.1", "optimizer.weight_decay left out -> 0.1"),
        ((), "schedule.name=recipe", "schedule.name 'none' -> 'recipe'"),
        ((), "ema.decay=0.9", "ema.decay left out -> 0.9: an average must cover the whole run"),
        (
            (*EVALUATED, "schedule.name=ReduceLROnPlateau"),
            "schedule.metric=max:loss",
            "schedule.metric 'min:loss' -> 'max:loss': the best so far was found by the other",
        ),
        (("schedule.name=StepLR",), "schedule.every=epoch", "schedule.every 'step' -> 'epoch'"),
        ((), "train.seed=1", "train.seed 0 -> 1: the order of samples"),
        ((), "train.monitor=max:loss", "the best so far was found by the other"),
        (("precision.kind=fp16",), "precision.init_scale=4", "precision.init_scale 65536.0 -> 4.0"),
        (RECIPE, "schedule.warmup_steps=6", "schedule.warmup_steps 5 -> 6"),
        (RECIPE, "train.global_batch=32", "16 -> 32: the recipe's rate follows from it"),
        (RECIPE, "train.steps=420", "at step 400 it is 0, so longer training needs a new run"),
        (
            (*RECIPE, "schedule.end=0.1"),
            "train.steps=420",
            "train.steps 400 -> 420: the rate was to decay until step 400, and now until 420; "
            "schedule.decay_steps=400 leaves it as it was",
        ),
    ],
)
def test_what_cannot_take_effect_is_named(before, setting, told):
    (line,) = changes(setting, before=before)
    assert told in line


def test_what_was_said_and_what_was_left_out_are_the_same():
    assert changes("schedule.every=step", before=("schedule.name=StepLR",)) == []
    plateau = (*EVALUATED, "schedule.name=ReduceLROnPlateau")
    assert changes("schedule.every=epoch", "schedule.metric=min:loss", before=plateau) == []
    assert changes("ema.decay=0.99", "model.compile=true", before=("ema.decay=0.9",)) == []


def test_a_longer_training_where_the_rate_stays_what_it_was():
    assert changes("train.steps=420", "schedule.decay_steps=400", before=RECIPE) == []
    for decay in (("schedule.decay=none",), ("schedule.decay=step", "schedule.milestones=[9]")):
        assert changes("train.steps=420", before=(*RECIPE, *decay)) == []


def test_the_configuration_of_the_newest_checkpoint_is_found(tmp_path):
    assert saved_config(tmp_path / "nothing") is None
    config = parse_config(CONFIG)
    for note in ({"user": {"config": "[model]"}}, {"user": {"config": to_toml(config)}}):
        path = write_checkpoint(tmp_path, {}, step=1, note=note)
    assert saved_config(tmp_path) == (path, config)
    (path / "manifest.json").write_text("{}")
    assert saved_config(tmp_path) is None  # the one before is of a version that nobody knows
    write_checkpoint(tmp_path, {}, step=3)
    assert saved_config(tmp_path) is None
