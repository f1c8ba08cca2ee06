"""The suites of several ranks on nodes that share no memory: 2 + 2 ranks, and 2 + 1."""

from __future__ import annotations

import re

import pytest

from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.full import FULL, slow
from mpi_tests.launch.commands import HPCTRAIN, ROOT

# What can differ between nodes, with the engine of our own; `make test-all` adds the other engines
# and the habits, and moves data.
MORE = ["habits", "uneven", "travel", "sharded", "checkpoint"]
MORE += ["data_feeding", "data_files", "data_gather", "loader"]
SUITES = ["engines", "equivalence", "data_movement", *(MORE if FULL else [])]
CHOICE = [] if FULL else ["-k", "not torch and not horovod"]


# Unequal nodes are the harder case.
@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((2, 2), marks=slow)])
def test_engines_and_equivalence_between_nodes(nodes, ranks):
    hosts = ",".join(f"{host}:{count}" for host, count in zip(nodes.hosts, ranks, strict=True))
    files = [str(ROOT / f"mpi_tests/ranks/test_{suite}.py") for suite in SUITES]
    pytest_words = ["-m", "pytest", "-q", "-p", "mpi_tests.together", *CHOICE, *files]
    done = nodes.run(
        nodes.hosts[0],
        [
            *HPCTRAIN,
            "run",
            "--hosts",
            hosts,
            "--quiet",
            "-x",
            f"MPI_TESTS_FULL={FULL:d}",
            *pytest_words,
        ],
        timeout_s=800 if FULL else 280,
        cwd=ROOT,
        env={**nodes.environment(mpi_of_this_python().family), "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= 30
