"""Pytest fixtures that give tests a cluster, or skip them with the reason why there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from mpi_tests.cluster.nodes import Nodes
from mpi_tests.cluster.slurm import Slurm

__all__ = ["nodes", "slurm", "slurm_of_session"]


def do_without(reason: str) -> NoReturn:
    """Skip with the reason, or fail where whoever started the tests said that it must be there."""
    if os.environ.get("MPI_TESTS_REQUIRE_CLUSTER"):
        pytest.fail(f"MPI_TESTS_REQUIRE_CLUSTER is set, but {reason}")
    pytest.skip(reason)


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Two fresh nodes; `pytest.mark.parametrize("nodes", [3], indirect=True)` asks for three."""
    if reason := Nodes.why_not():
        do_without(reason)
    with Nodes(getattr(request, "param", 2)) as made:
        yield made


@pytest.fixture(scope="session")
def slurm_of_session() -> Iterator[Slurm]:
    """One Slurm of three nodes for all tests."""
    if reason := Slurm.why_not():
        do_without(reason)
    with Slurm(3) as made:
        yield made


@pytest.fixture
def slurm(slurm_of_session: Slurm) -> Iterator[Slurm]:
    """The Slurm of the session, with no jobs; those that a test leaves are cancelled."""
    yield slurm_of_session
    slurm_of_session.clear()
