"""Fixtures of all suites here; `mpi_tests.together` itself serves suites that need no torch."""

from __future__ import annotations

from mpi_tests.ranks.engines_fixtures import engine, engines, world
from mpi_tests.ranks.pair import pair

__all__ = ["engine", "engines", "pair", "world"]
