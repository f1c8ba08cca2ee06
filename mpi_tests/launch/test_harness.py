"""The harness itself, on suites that fail on purpose: who failed is named, in bounded time."""

from __future__ import annotations

import sys

import pytest
from _pytest.mark.expression import Expression

from mpi_tests.__main__ import LAUNCH, PARTS, QUICK_PARTS, commands, groups_of
from mpi_tests.launch.commands import HPCTRAIN, run
from mpi_tests.outcomes import merge

HEAD = """
import os, signal, time, pytest
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
"""
QUICK = {"MPI_TESTS_GRACE_S": "2", "MPI_TESTS_LIMIT_S": "6"}


@pytest.fixture
def suite(tmp_path):
    def go(body: str, *options: str, n: int = 3):
        (tmp_path / "test_it.py").write_text(HEAD + body)
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\nfaulthandler_timeout = 8\nfaulthandler_exit_on_timeout = true\n"
        )
        pytest_words = ["-m", "pytest", "-p", "mpi_tests.together", str(tmp_path), *options]
        command = [*HPCTRAIN, "run", "-n", str(n), "--quiet", *pytest_words]
        return run(*command, env=QUICK, timeout_s=50, cwd=tmp_path)

    return go


def failures_in(done) -> str:
    """The part with the tracebacks; pytest repeats their last lines in a summary on CI machines."""
    return done.out.partition("short test summary")[0]


def test_a_suite_that_passes(suite):
    done = suite("def test_a(): assert 0 <= rank < size\n")
    assert done.code == 0
    assert done.out.count("1 passed") == 1, done.text


def test_a_failure_on_one_rank_is_named_once(suite):
    done = suite("def test_a(): assert rank != 2\ndef test_b(): pass\n")
    assert done.code == 1
    assert "rank 2 of 3:" in done.out
    assert failures_in(done).count("test_it.py:5: AssertionError") == 1
    assert "1 failed, 1 passed" in done.out


def test_the_same_failure_on_all_ranks_is_told_once(suite):
    done = suite("def test_a(): assert size == 99\n")
    assert "ranks 0, 1, 2 of 3:" in done.out
    assert failures_in(done).count("test_it.py:5: AssertionError") == 1


def test_ranks_must_skip_together(suite):
    body = "def test_a():\n    if rank == 1: pytest.skip('not me')\n"
    body += "def test_b(): pytest.skip('nobody')\n"
    done = suite(body)
    assert done.code == 1
    assert "skipped on ranks [1] of 3 only" in done.out
    assert "1 failed, 1 skipped" in done.out


def test_a_rank_that_leaves_a_collective_names_those_who_wait_in_it(suite):
    body = "def test_a():\n    if rank == 1: raise ValueError('left early')\n"
    done = suite(body + "    MPI.COMM_WORLD.Barrier()\n")
    assert done.code != 0
    assert done.elapsed_s < 20
    assert "ValueError: left early" in done.text
    assert "rank 1 of 3 gives up" in done.text, done.text
    assert "timed out after" in done.text


def test_a_killed_rank_is_named(suite):
    body = "def test_a():\n    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    done = suite(body + "    MPI.COMM_WORLD.Barrier()\n")
    assert done.code == 137
    assert "rank 1 on" in done.err
    assert done.elapsed_s < 20


def test_a_rank_that_hangs_is_named(suite):
    done = suite("def test_a():\n    if rank == 1: time.sleep(100)\n")
    assert done.code != 0
    assert done.elapsed_s < 30
    assert "waiting for rank 1 of 3;" in done.text


def test_a_true_deadlock_ends_with_stacks(suite):
    body = "def test_a():\n    MPI.COMM_WORLD.Recv(bytearray(1), source=(rank + 1) % size)\n"
    done = suite(body)
    assert done.code != 0
    assert done.elapsed_s < 30
    assert "Timeout" in done.text
    assert "test_it.py" in done.text


def test_ranks_that_collect_different_tests_are_refused(suite):
    done = suite("if rank == 1:\n    def test_b(): pass\ndef test_a(): pass\n")
    assert done.code != 0
    assert "ranks [1] collected other tests than rank 0" in done.text


def test_the_runner_counts_and_ends_badly_when_a_part_fails(tmp_path):
    done = run(sys.executable, "-m", "mpi_tests", "nodes", "--", "-k", "no_such_test_anywhere")
    assert done.code == 1  # pytest found no test: that is a failure, not a success
    assert done.out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("marks", [set(), {"cluster"}, {"alone"}, {"cluster", "alone"}])
def test_every_launch_test_is_in_one_piece(marks):
    def in_it(text: str) -> bool:
        return Expression.compile(text).evaluate(lambda name, **_: name in marks)

    assert [in_it(text) for text in LAUNCH.values()].count(True) == 1


def test_parts_that_share_the_machine():
    todo = commands(list(PARTS), [1, 2], [])
    groups = [[name for name, _ in group] for group in groups_of(todo)]
    first = ["unit-1", "unit-2", "ranks n=1"]
    two = ["launch cluster", "launch others"]
    assert groups == [first, ["ranks n=2"], two, ["launch alone"]]
    quick = commands(list(QUICK_PARTS), [2], [])
    groups = [[name for name, _ in group] for group in groups_of(quick)]
    assert groups == [["unit-1", "unit-2", "launch-quick"], ["ranks-quick n=2"]]
    chosen = commands(["launch"], [1], ["-k", "x"])  # a piece without tests would be a failure
    assert [name for name, _ in chosen] == ["launch"]


@pytest.mark.parametrize(
    ("outcomes", "kind", "words"),
    [
        ([("passed", "")] * 3, "passed", ""),
        ([("skipped", "why")] * 2, "skipped", "why"),
        ([("passed", ""), ("failed", "E1")], "failed", "rank 1 of 2:\nE1"),
        ([("failed", "E"), ("failed", "E"), ("passed", "")], "failed", "ranks 0, 1 of 3:\nE"),
        ([("passed", ""), ("skipped", "x")], "failed", "skipped on ranks [1] of 2 only"),
    ],
)
def test_outcomes_are_merged(outcomes, kind, words):
    merged = merge(outcomes)
    assert merged[0] == kind
    assert words in merged[1]
