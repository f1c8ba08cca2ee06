"""Whether everything is to run, or what proves the essential in the time that every day has."""

from __future__ import annotations

import os

__all__ = ["FULL"]

FULL = os.environ.get("MPI_TESTS_FULL") == "1"
"""Set by `make test-all`."""
