"""Predicted memory of a rank against torch's own count of FSDP2's, on a fake group of many ranks.

`python -m benchmarks.grid_memory` does the same with 805 million parameters, and with real memory.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.grid_memory import ROOT, footprint_of, row
from benchmarks.grid_memory_subjects import tracked

MODEL, BATCH = "9M", 1


@pytest.fixture(scope="module")
def footprint():
    return footprint_of(MODEL, BATCH)


@pytest.mark.parametrize(("num_ranks", "shard"), [(8, "parameters"), (64, "gradients")])
def test_held_bytes_and_the_peak_are_predicted(footprint, num_ranks, shard):
    found = row(footprint, num_ranks, shard, tracked(MODEL, num_ranks, BATCH, shard))
    assert 0.9 <= found["held_over_16N/n"] <= 1.1
    assert abs(found["held_error_percent"]) <= 1
    assert 0 <= found["peak_error_percent"] <= 10, "never too little"


def test_the_page_has_the_figures_of_the_result():
    page = (ROOT / "docs" / "plan.md").read_text()
    path = "benchmarks/results/plan/grid_memory-2026-11-16-aarch64-2cores.json"
    assert path in page
    names = ("16N/n", "held_predicted", "held_measured", "peak_predicted", "peak_measured")
    for found in json.loads((ROOT / path).read_text())["tracked"]:
        ideal, held, measured, peak, most = (f"{found[name] / 2**20:,.0f}" for name in names)
        line = f"| {found['ranks']} | {found['shard']} | {ideal} MiB | {held} and {measured} MiB | "
        line += f"{peak} MiB | {most} MiB | {found['peak_error_percent']} % |"
        assert line in page
