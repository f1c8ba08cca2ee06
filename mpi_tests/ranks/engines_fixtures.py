"""One world and one engine of each kind for all suites of a session: Horovod starts only once."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from mpi4py import MPI

import hpctrain as hpc
from hpctrain.engines import Engine
from mpi_tests.built import BUILT, OUTSIDE

sys.path.append(str(OUTSIDE))  # as installing that package would do

# `local` is for one rank; MPI is up already when this is imported.
ALL = [*(["local"] if MPI.COMM_WORLD.Get_size() == 1 else []), *BUILT, "outside"]


@pytest.fixture(scope="session")
def world() -> Iterator[hpc.World]:
    """All ranks, for the whole session."""
    with hpc.init(seed=7, device="cpu", num_threads=1) as made:
        yield made


class Engines(dict[str, Engine]):
    """Every engine that is built here, by name, under the watchdog, from its first use on."""

    def __init__(self, world: hpc.World) -> None:
        self.world = world

    def __missing__(self, name: str) -> Engine:
        self[name] = hpc.connect(self.world, name, timeout_s=100).engine
        return self[name]


@pytest.fixture(scope="session")
def engines(world: hpc.World) -> Engines:
    """Every engine that is built here, by name."""
    return Engines(world)


@pytest.fixture(params=ALL)
def engine(request: pytest.FixtureRequest, engines: Engines) -> Engine:
    """Every engine that is built, in turn."""
    return engines[request.param]
