"""Whether everything is to run, or what proves the essential in the time that every day has."""

from __future__ import annotations

import os

import pytest

__all__ = ["FULL", "slow"]

FULL = os.environ.get("MPI_TESTS_FULL") == "1"
"""Set by `make test-all`."""

slow = pytest.mark.skipif(not FULL, reason="takes long; set MPI_TESTS_FULL=1")
"""For tests that `make test-all` runs and every day has no time for."""
