"""Runs a benchmark in quick mode and looks at its result."""

from __future__ import annotations

import json
import os
import sys

from hpctrain.bench.results import validate
from mpi_tests.launch.commands import ROOT, run

__all__ = ["LIMIT_S", "PYTHON", "result_of"]

LIMIT_S = 280.0  # seconds on a quiet machine
PYTHON = [sys.executable, "-m"]


def result_of(benchmark: str, path, *words: str) -> dict:
    done = run(
        *PYTHON, f"benchmarks.{benchmark}", "--quick", "--json", path, *words, timeout_s=LIMIT_S
    )
    assert done.code == 0, done.text
    result = json.loads(path.read_text())
    assert validate(result) == []
    assert os.uname().nodename not in path.read_text()
    assert str(ROOT) not in path.read_text()
    return result
