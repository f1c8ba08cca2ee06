from __future__ import annotations

pytest_plugins = ["mpi_tests.together"]
