"""The large-batch benchmark, as far as it is arithmetic."""

from __future__ import annotations

import pytest
import sklearn.datasets  # noqa: F401  # importing it sets variables, which a test must not
import torch

from benchmarks import large_batch, large_batch_training
from benchmarks.large_batch_training import SETTINGS, batches, load_digits, num_steps


def test_every_sample_comes_once_an_epoch_and_batches_are_full():
    seen = torch.cat(list(batches(10, 6, 4, seed=1)))
    assert len(seen) == 60 == 4 * num_steps(10, 6, 4)
    for epoch in range(6):
        assert sorted(seen[10 * epoch : 10 * epoch + 10].tolist()) == list(range(10))
    assert not torch.equal(seen[:10], seen[10:20])
    assert num_steps(10, 6, 32) == 1  # what does not fill a batch is left out


def test_settings_differ_in_what_they_compare():
    assert tuple(SETTINGS) == large_batch.VARIANTS
    assert large_batch_training.EPOCHS == large_batch.EPOCHS
    small, plain = SETTINGS["sgd 32"], SETTINGS["sgd 1024 plain"]
    assert plain.base_rate == small.base_rate
    assert plain.recipe(100).peak == pytest.approx(32 * small.recipe(100).peak)
    assert plain.recipe(100).warmup_steps == 0
    assert SETTINGS["lamb 1024"].recipe(100).warmup_steps > 0


def test_choosing_rates_never_sees_the_test_digits():
    whole, part = load_digits(), load_digits(validation=True)
    assert (len(whole.train_x), len(whole.test_x)) == (1437, 360)
    assert len(part.train_x) + len(part.test_x) == 1437
    chosen = {tuple(row) for row in torch.cat([part.train_x, part.test_x]).tolist()}
    assert chosen == {tuple(row) for row in whole.train_x.tolist()}


def test_accuracies_become_metrics():
    series = [
        {"case": "c", "variant": "sgd 32", "outcome": {"accuracies": [0.98, 0.96]}},
        {"case": "c", "variant": "lars 1024", "outcome": {"accuracies": [0.965, 0.955]}},
    ]
    result = {"series": series}
    large_batch.add_accuracies(result)
    assert series[1]["metrics"] == {
        "test accuracy %": 96.0,
        "least": 95.5,
        "most": 96.5,
        "points from sgd 32": -1.0,
    }


def test_curves_are_drawn(tmp_path):
    series = [{"variant": "sgd 32", "outcome": {"curve": [0.5, 0.9]}}]
    large_batch.plot({"series": series}, tmp_path / "curves.svg")
    assert "sgd 32" in (tmp_path / "curves.svg").read_text()
