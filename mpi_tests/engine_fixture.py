"""Engines for tests on several ranks: each made once per session, over one world."""

from __future__ import annotations

import importlib.util

import pytest

import hpctrain as hpc

BUILT = ["mpi", "torch"] + (["horovod"] if importlib.util.find_spec("horovod") else [])


@pytest.fixture(scope="session")
def world():
    """All ranks, for the whole session."""
    with hpc.init(seed=7, num_threads=1) as made:
        yield made


@pytest.fixture(scope="session")
def engines(world):
    """Every engine that is built here, by name."""
    return {name: hpc.connect(world, name, timeout_s=60).engine for name in BUILT}
