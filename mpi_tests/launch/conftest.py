"""Which tests may run beside which: see `python -m mpi_tests`."""

from __future__ import annotations

import pytest

CLUSTER = {"nodes", "slurm", "slurm_of_session", "small_node"}
BESIDE_THEM = {
    "test_bench", "test_data_cli", "test_loader_workers", "test_plan", "test_report_browser",
    "test_trace", "test_train",
}  # fmt: skip
"""Run in the same process, so that both take about as long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what makes nodes of its own: those tests run in one process, one after the other."""
    for item in items:
        makes_nodes = CLUSTER & set(getattr(item, "fixturenames", ()))
        if makes_nodes or "cluster" in item.path.stem or item.path.stem in BESIDE_THEM:
            item.add_marker("cluster")
