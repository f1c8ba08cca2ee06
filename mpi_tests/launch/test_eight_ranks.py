"""Grids of eight ranks, two to a core or more: minutes, so `make test-all` has them."""

from __future__ import annotations

import re

from mpi_tests.full import slow
from mpi_tests.launch.commands import HPCTRAIN, run


@slow
def test_every_kind_of_grid_equals_one_process():
    pytest = ["-m", "pytest", "mpi_tests/ranks/test_eight_ranks.py", "-q"]
    done = run(
        *HPCTRAIN, "run", "-n", "8", "--quiet", *pytest, "-p", "mpi_tests.together", timeout_s=600
    )
    assert done.code == 0, done.text
    assert re.search(r"\d+ passed", done.out), done.text
    assert "skipped" not in done.out, done.text
