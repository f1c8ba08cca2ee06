"""One example for each way to divide a model: each says itself that it equals one process."""

from __future__ import annotations

import re

import pytest

from mpi_tests.launch.commands import HPCTRAIN, ROOT, run

FOLDER = ROOT / "examples" / "larger"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.name != "task.py")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_example_equals_one_process(num_ranks):
    together = ROOT / "mpi_tests" / "launch" / "examples_together.py"
    done = run(*HPCTRAIN, "run", "-n", str(num_ranks), together, *SCRIPTS, timeout_s=240)
    assert done.code == 0, done.text
    for script in SCRIPTS:
        assert done.out.count(f"=== {script.name}") == num_ranks
    said = re.findall(r"loss 0\.111 -> 0\.00\d; predictions within \de-1[5-7] of one", done.out)
    assert len(said) == len(SCRIPTS), done.text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_page_names_every_example(script):
    page = (ROOT / "docs" / "larger_models.md").read_text()
    assert f"examples/larger/{script.name}" in page
    assert f"examples/larger/{script.name}`" in script.read_text()  # how it is started
