"""Every example of the page on larger models runs on two ranks."""

from __future__ import annotations

import re

from mpi_tests.launch.commands import HPCTRAIN, ROOT, run

PAGE = (ROOT / "docs" / "larger_models.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_examples_of_the_page_run(tmp_path):
    scripts = [tmp_path / f"example{number}.py" for number in range(len(EXAMPLES))]
    for script, text in zip(scripts, EXAMPLES, strict=True):
        script.write_text(text)
    together = ROOT / "mpi_tests" / "launch" / "examples_together.py"
    logs = tmp_path / "logs"
    done = run(*(*HPCTRAIN, "run", "-n", "2", "--log-dir", logs, together, *scripts), timeout_s=240)
    assert done.code == 0, done.text
    said = re.split(r"^=== (\S+)\n", (logs / "rank-00000.log").read_text(), flags=re.MULTILINE)
    assert said[1::2] == [script.name for script in scripts], done.text
    for text in said[2::2]:
        assert re.search(r"^(?!hpctrain: ).*\S", text, re.MULTILINE), done.text
