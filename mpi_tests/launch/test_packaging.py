"""Wheel and sdist: built, installed without a compiler, and leaving the site's torch alone."""

from __future__ import annotations

import re
import sys
import sysconfig
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
    return wheel, sdist, source


def test_the_wheel_is_pure_and_whole(built):
    wheel, sdist, _ = built
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "hpctrain").rglob("*.py")}
    assert sources <= inside
    assert "hpctrain/py.typed" in inside
    jobs = {f"hpctrain/submit/{path.relative_to(ROOT)}" for path in (ROOT / "jobs").rglob("*.*")}
    assert len(jobs) > 30
    assert jobs <= inside
    machines = {str(p.relative_to(ROOT)) for p in (ROOT / "hpctrain/predict/machines").iterdir()}
    assert len(machines) == 10
    assert machines <= inside
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


RENDER = ["job", "render", "--site", "pbs", "--time", "1h", "--", "python", "x.py"]


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_jobs_are_rendered_from_the_wheel_and_from_an_editable_install(built, tmp_path, kind):
    here = run(sys.executable, "-m", "hpctrain", *RENDER)
    assert here.code == 0, here.text
    assert run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "v").code == 0
    python = tmp_path / "v" / "bin" / "python"
    site = next((tmp_path / "v" / "lib").glob("python*")) / "site-packages"
    # Jinja2 and the build tools of this environment, last on the path.
    (site / "shared.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    given = [built[0]] if kind == "wheel" else ["--no-build-isolation", "-e", built[2]]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    done = run(*pip, "--ignore-installed", *given, env=NO_COMPILER, timeout_s=120)
    assert done.code == 0, done.text
    code = "import sys; from hpctrain.cli import main; from hpctrain.submit.places import JOBS; "
    code += "print(JOBS, file=sys.stderr); sys.exit(main(sys.argv[1:]))"
    rendered = run(python, "-c", code, *RENDER, env={"PYTHONPATH": ""}, cwd=tmp_path)
    assert rendered.out == here.out, rendered.text
    assert str(site if kind == "wheel" else built[2]) in rendered.err


def test_installing_it_replaces_nothing_that_is_there(built):
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--force-reinstall", "--no-deps"]
    assert run(*pip, built[0], env=NO_COMPILER, timeout_s=120).code == 0
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"]
    done = run(*pip, built[0], env=NO_COMPILER, timeout_s=120)
    assert done.code == 0, done.text
    assert f"torch-{version('torch')}" not in done.out
    would = re.findall(r"Would install (.*)", done.out)
    assert all(name.startswith("hpctrain-") for line in would for name in line.split()), done.out
