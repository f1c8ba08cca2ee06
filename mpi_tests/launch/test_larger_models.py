"""Every example of the page on larger models runs on two ranks."""

from __future__ import annotations

import re
import sys

import pytest

from mpi_tests.launch.commands import ROOT, run

PAGE = (ROOT / "docs" / "larger_models.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_page_run(tmp_path, number):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number])
    done = run(sys.executable, "-m", "hpctrain", "run", "-n", "2", str(script), timeout_s=120)
    assert done.code == 0, done.text
    assert done.out.strip(), done.text
