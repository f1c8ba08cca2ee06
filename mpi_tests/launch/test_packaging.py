"""Wheel and sdist: built, installed without a compiler, and leaving the site's torch alone."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from importlib.metadata import version

import pytest

from mpi_tests.launch.commands import ROOT, run

NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false", "PYTHONPATH": ""}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel built from an sdist built from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source")
    copy = run("sh", "-c", f"git ls-files -co --exclude-standard | tar cT - | tar x -C {source}")
    assert copy.code == 0, copy.text
    done = run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "-o",
        out,
        source,
        env=NO_COMPILER,
        timeout_s=180,
    )
    assert done.code == 0, done.text
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_is_pure_and_whole(built):
    wheel, sdist = built
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "hpctrain").rglob("*.py")}
    assert sources <= inside
    assert "hpctrain/py.typed" in inside
    assert not any(name.startswith("mpi_tests") for name in inside)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "setup.cfg", "pyproject.toml"} <= names


def test_it_installs_into_a_clean_environment_without_a_compiler(built, tmp_path):
    assert run(sys.executable, "-m", "venv", tmp_path / "v", timeout_s=120).code == 0
    python = tmp_path / "v" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    done = run(*pip, built[0], env=NO_COMPILER, timeout_s=120)
    assert done.code == 0, done.text
    help_text = run(tmp_path / "v" / "bin" / "hpctrain", "--help", env=NO_COMPILER, cwd=tmp_path)
    assert help_text.code == 0, help_text.text  # with neither torch nor mpi4py there
    assert "VERB" in help_text.out


def test_installing_it_replaces_nothing_that_is_there(built):
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--force-reinstall", "--no-deps"]
    assert run(*pip, built[0], env=NO_COMPILER, timeout_s=120).code == 0
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"]
    done = run(*pip, built[0], env=NO_COMPILER, timeout_s=120)
    assert done.code == 0, done.text
    assert f"torch-{version('torch')}" not in done.out
    would = re.findall(r"Would install (.*)", done.out)
    assert all(name.startswith("hpctrain-") for line in would for name in line.split()), done.out
