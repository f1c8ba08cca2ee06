"""The page about divided layers, as a real job."""

from __future__ import annotations

import re

import pytest

from mpi_tests.launch.commands import HPCTRAIN, ROOT, run


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_script_of_the_page(tmp_path, num_ranks):
    page = (ROOT / "docs" / "tensor_parallel.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "divided.py").write_text(script)
    done = run(*HPCTRAIN, "run", "-n", str(num_ranks), "divided.py", cwd=tmp_path, timeout_s=120)
    assert done.code == 0, done.text
    (loss,) = re.findall(r"loss ([\d.]+) with Grid", done.out)
    assert float(loss) < 5.5  # ln 1000 = 6.9 at the start
