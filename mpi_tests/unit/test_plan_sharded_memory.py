"""Predicted memory of a rank against torch's own count of FSDP2's, on a fake group of many ranks.

`python -m benchmarks.grid_memory` does the same with 805 million parameters, and with real memory.
"""

from __future__ import annotations

import pytest

from benchmarks.grid_memory import footprint_of, row
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
