"""What training adds to a collective, and predictions of measurements that were kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.predict import ROOT, predict_again
from hpctrain.predict import Costs, Link, RankLayout
from hpctrain.predict.costs import allreduce_s, slowest_of
from hpctrain.predict.fit import TrainingSample, fit_training

LINK = Link(latency_s=1e-5, bytes_per_s=1e9)


def test_what_training_adds_to_a_collective_is_found():
    costs = Costs(topology="hierarchical", intra=LINK, inter=LINK, crowding=0.3)
    true = replace(costs, reduce_s_per_byte=2e-10)
    samples = [
        TrainingSample(
            engine="mpi",
            num_ranks=count,
            ranks_per_node=count,
            gradient_bytes=size,
            compute_s=0.05,
            seconds=0.05 * slowest_of(count, 0.02)
            + allreduce_s(size, RankLayout(num_ranks=count, ranks_per_node=count), true),
        )
        for count in (2, 4)
        for size in (1 << 20, 1 << 24)
    ]
    assert fit_training(costs, samples, 0.02).reduce_s_per_byte == pytest.approx(2e-10)
    assert fit_training(costs, [], 0.02) == costs
    quick = [replace(sample, seconds=0.01) for sample in samples]
    assert fit_training(costs, quick, 0.02) == costs, "nothing is negative"


@pytest.mark.parametrize("width", [256, 512])
def test_kept_measurements_give_the_predictions_of_the_docs(width):
    name = f"ranks-mlp-{width}-2026-11-15-x86_64-16cores.json"
    result = json.loads((ROOT / "benchmarks" / "results" / "plan" / name).read_text())
    rows = predict_again(result)
    assert rows == result["rows"]
    (eight,) = [row for row in rows if row["ranks"] == 8]
    assert not eight["fitted"]
    assert abs(eight["error_percent"]) <= 10
