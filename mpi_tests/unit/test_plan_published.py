"""Horovod's published curves from one of their points, and that nothing simpler does it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.architectures import MODELS
from benchmarks.published.horovod import CALIBRATION, PUBLISHED, calibrate, exchange, predictions
from hpctrain.predict import find_machine

POINTS = 5.0
MACHINE = find_machine("pascal-roce25")


def errors(machine, way) -> list[float]:
    rows = predictions(calibrate(machine, way), way)
    assert sum(bool(row["calibrated"]) for row in rows) == 1
    return [abs(float(row["error_points"])) for row in rows if not row["calibrated"]]


def test_the_networks_have_as_many_weights_as_everybody_says():
    counts = {name: sum(part.num_weights for part in make()) for name, make in MODELS.items()}
    assert counts == {"Inception V3": 23_834_568, "ResNet-101": 44_549_160, "VGG-16": 138_357_544}


def test_every_other_point_is_predicted_within_five():
    found = errors(MACHINE, exchange())
    assert len(found) == 8
    assert max(found) <= POINTS


@pytest.mark.parametrize("per_rank_s", [10e-6, 40e-6])
def test_what_was_assumed_of_agreeing_does_not_decide(per_rank_s):
    assert max(errors(MACHINE, exchange(per_rank_s))) <= POINTS


@pytest.mark.parametrize("jitter", [0.02, 0.04])
def test_what_was_assumed_of_jitter_does_not_decide(jitter):
    assert max(errors(replace(MACHINE, jitter=jitter), exchange())) <= POINTS


def test_a_constant_answer_fails():
    model, count = CALIBRATION
    values = [value for by_model in PUBLISHED.values() for value in by_model.values()]
    best = min(max(100 * abs(guess / 1000 - v) for v in values) for guess in range(600, 1000))
    assert best > POINTS
    assert max(100 * abs(PUBLISHED[count][model] - value) for value in values) > POINTS


def test_each_part_of_the_model_is_needed():
    calm = replace(MACHINE, jitter=0.0)
    assert max(errors(calm, exchange())) > POINTS
    free = replace(MACHINE.costs.inter, latency_s=0.0), replace(MACHINE.costs.intra, latency_s=0.0)
    costs = replace(MACHINE.costs, inter=free[0], intra=free[1])
    assert max(errors(replace(MACHINE, costs=costs), exchange())) > POINTS
    late = replace(exchange(), overlap=False)
    assert max(errors(MACHINE, late)) > POINTS
