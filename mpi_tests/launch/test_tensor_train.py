"""The example and the page about tensor-train layers, as real jobs."""

from __future__ import annotations

import re

from mpi_tests.launch.commands import HPCTRAIN, ROOT, run

PAGE = (ROOT / "docs" / "tensor_train.md").read_text()


def test_an_embedding_a_hundred_times_smaller():
    done = run(*HPCTRAIN, "run", "-n", "2", "examples/tensor_train.py", timeout_s=240)
    assert done.code == 0, done.text
    dense, small = (float(found) for found in re.findall(r"([\d.]+)%", done.out))
    ratio, lost = re.search(
        r"(\d+) times fewer parameters cost (-?[\d.]+) points", done.out
    ).groups()
    assert int(ratio) >= 100
    assert dense > 99
    assert small > 90
    assert abs(dense - small - float(lost)) < 0.02
    # What the page shows is what the example prints, up to a point.
    shown = [float(found) for found in re.findall(r"(\d\d\.\d\d)%", PAGE)]
    assert abs(shown[0] - dense) < 1
    assert abs(shown[1] - small) < 2


def test_the_scripts_of_the_page(tmp_path):
    scripts = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    paths = [tmp_path / f"script{number}.py" for number in range(len(scripts))]
    for path, script in zip(paths, scripts, strict=True):
        path.write_text(script)
    together = ROOT / "mpi_tests" / "launch" / "examples_together.py"
    done = run(*HPCTRAIN, "run", "-n", "2", together, *paths, cwd=tmp_path, timeout_s=120)
    assert done.code == 0, done.text
    assert re.search(r"the model: [\d,]+ parameters instead of", done.out), done.text
    assert done.out.count("the model:") == 1
    assert re.search(r"loss [\d.]+, divided over 2 ranks", done.out), done.text
