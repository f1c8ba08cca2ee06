"""The suites of several ranks on nodes that share no memory: 2 + 2 ranks, and 2 + 1."""

from __future__ import annotations

import re

import pytest

from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.launch.commands import HPCTRAIN, ROOT


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1)])
def test_engines_and_equivalence_between_nodes(nodes, ranks):
    hosts = ",".join(f"{host}:{count}" for host, count in zip(nodes.hosts, ranks, strict=True))
    suites = ["engines", "equivalence", "habits"]
    files = [str(path) for s in suites for path in (ROOT / "mpi_tests/ranks").glob(f"test_{s}.py")]
    pytest_words = ["-m", "pytest", "-q", "-p", "mpi_tests.together", *files]
    done = nodes.run(
        nodes.hosts[0],
        [*HPCTRAIN, "run", "--hosts", hosts, "--quiet", *pytest_words],
        timeout_s=280,
        cwd=ROOT,
        env={**nodes.environment(mpi_of_this_python().family), "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) > 50
