"""A pytest plugin for suites that run on several ranks at once.

After every test the ranks exchange outcomes: rank 0 reports one test, failed if it failed anywhere,
with each failing rank's traceback once. A failing rank whose peers stay silent past a grace period
(they wait in a collective that this rank left) prints its traceback, names them, and aborts.
"""

from __future__ import annotations

import faulthandler
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.errors import CollectiveError
from hpctrain.world import roll_call
from hpctrain.world.guard import report_exit
from hpctrain.world.launcher import current_launch
from mpi_tests.full import FULL
from mpi_tests.outcomes import Outcome, merge

GRACE_S = float(os.environ.get("MPI_TESTS_GRACE_S", "20"))
"""How long a failing rank waits for its peers to come out of the test."""
_PAIRWISE = (
    *("batchnorm", "clipping", "clocks", "evaluation", "habits", "learn", "masters", "node_ema"),
    *("nonfinite", "observing", "plain_loops", "plan", "precision", "refusals"),
    *("several_optimizers", "train_entry", "trainer", "trainer_guards", "trainer_results"),
    "travel",
)
_ON_GRIDS = (
    *("auto_grid", "comparing", "grid_refusals", "pipeline_memory", "save_memory", "staging"),
    "trainer_grid",
)
LEFT_OUT = {
    3: (
        *(*_PAIRWISE, *_ON_GRIDS, "checkpoint_stores", "grid_ema", "horovod_mode"),
        *("pipeline_checkpoints", "pipeline_failures", "saver", "sentinel", "sentinel_grid"),
        *("share_parameters", "sharded_habits", "split_checkpoints", "taking", "tensor_train"),
    ),
    4: (
        *(*_PAIRWISE, *_ON_GRIDS, "share_parameters", "sharded_habits", "split_state", "taking"),
        *("tensor_train", "uneven"),
    ),
}
"""Suites in which so many ranks show nothing that two do not: for MPI_TESTS_FULL=1."""
_NO_HOROVOD_FROM = 4
"""From so many ranks on Horovod is left out as well: three ranks show what two do not."""
TEST_LIMIT_S = float(os.environ.get("MPI_TESTS_LIMIT_S", "120"))
"""How long a rank that is done waits for the others."""


class Together:
    """The plugin, one per rank."""

    def __init__(self, config: pytest.Config) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = [item.nodeid for item in items]
        roll_call(self.comm, "collecting tests", timeout_s=TEST_LIMIT_S)
        first = self.comm.bcast(names, root=0)
        same = self.comm.allgather(first == names)
        if not all(same):
            others = [rank for rank, equal in enumerate(same) if not equal]
            raise pytest.UsageError(f"ranks {others} collected other tests than rank 0")
        if not FULL and not self.config.option.keyword:  # whoever names tests gets them
            size = self.comm.Get_size()
            names = {f"test_{name}.py" for name in LEFT_OUT.get(size, ())}
            spins = size >= _NO_HOROVOD_FROM  # more of Horovod's threads than cores
            left_out = [
                item
                for item in items
                if item.path.name in names or (spins and "horovod" in item.nodeid)
            ]
            self.config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]
        # Once started, Horovod's threads spin beside every later test: those that start it go last.
        items.sort(key=lambda item: "horovod" in item.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, None, None]:
        result = yield
        report = result.get_result()  # type: ignore[attr-defined]
        kind, text = self.exchange(item, report)
        report.outcome = kind
        if kind == "failed":
            report.longrepr = text
        elif kind == "skipped":
            path, line, _ = item.location
            report.longrepr = (path, line or 0, text)
        else:
            report.longrepr = None

    def exchange(self, item: pytest.Item, report: pytest.TestReport) -> Outcome:
        """Collective: meet after a phase of a test and merge what happened."""
        text = report.longreprtext
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        where = f"{item.nodeid} ({report.when})"
        failed = report.outcome == "failed"
        try:
            roll_call(self.comm, where, timeout_s=GRACE_S if failed else TEST_LIMIT_S)
        except CollectiveError as error:
            self.give_up(where, str(error), text if failed else "")
        return merge(self.comm.allgather((report.outcome, text)))

    def give_up(self, where: str, why: str, text: str) -> None:
        """Print what this rank knows and end all ranks."""
        rank, size = self.comm.Get_rank(), self.comm.Get_size()
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        print(f"\nrank {rank} of {size} gives up at {where}\n{why}\n{text}", flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        report_exit(current_launch(), 70, why)
        MPI.COMM_WORLD.Abort(70)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Join the ranks; all but rank 0 report to nobody, and each has a temporary folder."""
    folder = tempfile.mkdtemp(prefix=f"mpi-tests-{MPI.COMM_WORLD.Get_rank()}-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.option.basetemp = str(Path(folder) / "base")
    config.pluginmanager.register(Together(config), "together")
    if MPI.COMM_WORLD.Get_rank() != 0:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = io.StringIO()


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    """All ranks, on a communicator of the tests' own."""
    return MPI.COMM_WORLD.Dup()
