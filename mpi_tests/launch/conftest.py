"""Which tests may run beside which: see `python -m mpi_tests`."""

from __future__ import annotations

import pytest

CLUSTER = {"nodes", "slurm", "slurm_of_session", "small_node"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what makes nodes of its own: those tests run in one process, one after the other."""
    for item in items:
        if CLUSTER & set(getattr(item, "fixturenames", ())) or "cluster" in item.path.stem:
            item.add_marker("cluster")
