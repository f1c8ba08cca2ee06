"""Set-up and builds as real processes: locks, limits, interrupts, broken venvs, no compiler."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from hpctrain.errors import InstallError
from hpctrain.install import bootstrap
from hpctrain.install.horovod.recipe import compiler_wrapper
from hpctrain.install.lock import held
from hpctrain.install.mpi import lacks_headers
from hpctrain.install.process import TooLongError, run_logged
from hpctrain.install.setup import sequence, stamp, venv
from hpctrain.install.setup.cleaning import clean
from hpctrain.install.setup.steps import Steps

CHECKOUT = Path(bootstrap.__file__).parents[2]
BOOTSTRAP = [sys.executable, "-m", "hpctrain.install.bootstrap"]

# A build with facts made up here, so that neither torch nor MPI is needed; only pip is real.
DRIVER = """
import os, sys, sysconfig
from pathlib import Path
from hpctrain.errors import InstallError
from hpctrain.install.horovod.build import BuildOptions, build_wheel
from hpctrain.install.horovod.facts import (
    BUILD_NEEDS, RUNTIME_NEEDS, BuildFacts, MpiFacts, PythonFacts, TorchFacts)
from hpctrain.mpi_version import MpiVersion
cache, sdist, limit_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
python = PythonFacts(
    executable=Path(sys.executable), prefix=Path(sys.prefix), private=False,
    site_packages=Path(sysconfig.get_path("platlib")), paths=(), soabi="soabi", tag="cp3",
    include=Path(sysconfig.get_path("include")), machine="here", libc="glibc",
    packages=dict.fromkeys((*BUILD_NEEDS, *RUNTIME_NEEDS), "1"), torch=None)
torch = TorchFacts(version="2.13.0", build="b", cxx11_abi=True, cuda=None, hip=None)
mpi = MpiFacts(version=MpiVersion(family="mpich", version="5"), library=Path("/lib/libmpi.so"),
               mpicxx=Path("/bin/true"), mpirun=None)
facts = BuildFacts(python=python, torch=torch, mpi=mpi, cuda=None, why_no_cuda="a test",
                   compiler=Path("/bin/true"), compiler_version="")
options = BuildOptions(cache_dir=cache, sdist=sdist, jobs=1, limit_s=limit_s)
try:
    print(build_wheel(facts, options, os.environ))
except InstallError as error:
    sys.exit(str(error))
"""
SETUP_PY = """
import sys, time
from setuptools import setup
if "bdist_wheel" in sys.argv or "build_wheel" in str(sys.argv) or "bdist" in str(sys.argv):
    print("[ 45%] Building CXX object", flush=True)
    {action}
setup(name="horovod", version="0.28.1", py_modules=[])
"""


def sdist_that(folder: Path, action: str) -> Path:
    """A source archive by the name of Horovod whose build does `action`."""
    source = folder / "horovod-0.28.1"
    source.mkdir()
    (source / "setup.py").write_text(SETUP_PY.format(action=action))
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    archive = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        out.add(source, arcname=source.name)
    return archive


def start_build(tmp_path: Path, sdist: Path, *, limit_s: float = 60.0) -> subprocess.Popen[str]:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "cache"), str(sdist), str(limit_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        env={**os.environ, "TMPDIR": str(scratch)},
    )


def left_in(folder: Path) -> list[str]:
    """Everything below the folder that is a wheel or a temporary folder."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix == ".whl" or "staging-" in path.name or "hpctrain-horovod-" in path.name
    ]


def test_a_build_is_cached_and_reused(tmp_path: Path) -> None:
    sdist = sdist_that(tmp_path, "pass")
    first = start_build(tmp_path, sdist)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert "compiling Horovod 0.28.1" in err
    assert Path(out.strip()).is_file()
    second = start_build(tmp_path, sdist)
    again, err = second.communicate(timeout=60)
    assert again == out
    assert "using the cached wheel" in err
    assert left_in(tmp_path) == [str(Path(out.strip()).relative_to(tmp_path))]


def test_a_failed_build_is_one_paragraph_with_log_and_cure(tmp_path: Path) -> None:
    action = "sys.exit('a.cc:1:2: error: no such thing')"
    build = start_build(tmp_path, sdist_that(tmp_path, action))
    _, err = build.communicate(timeout=60)
    assert build.returncode == 1
    paragraph = err.strip().splitlines()[-1]
    assert "could not be built" in paragraph
    assert "error: no such thing" in paragraph
    assert "build.log" in paragraph
    assert "hpctrain horovod build" in paragraph
    assert left_in(tmp_path) == []


def test_an_interrupted_build_leaves_nothing_half_done(tmp_path: Path) -> None:
    build = start_build(tmp_path, sdist_that(tmp_path, "time.sleep(300)"))
    assert build.stderr is not None
    line = ""
    while "40 %" not in line and "45 %" not in line:
        line = build.stderr.readline()
        assert line, "the build ended by itself"
    build.send_signal(signal.SIGTERM)
    _, err = build.communicate(timeout=20)
    assert build.returncode == 128 + signal.SIGTERM, err
    assert left_in(tmp_path) == []
    assert list((tmp_path / "scratch").iterdir()) == []


def test_leftovers_of_a_killed_build_go_with_the_next(tmp_path: Path) -> None:
    done = start_build(tmp_path, sdist_that(tmp_path, "pass"))
    wheel = Path(done.communicate(timeout=60)[0].strip())
    digest = wheel.parent.name.rsplit("_", 1)[-1]
    wheel.unlink()
    (wheel.parent / "staging-1").mkdir()
    (tmp_path / "scratch" / f"hpctrain-horovod-{digest}-old").mkdir()
    again = start_build(tmp_path, tmp_path / "horovod-0.28.1.tar.gz")
    assert Path(again.communicate(timeout=60)[0].strip()) == wheel
    assert left_in(tmp_path) == [str(wheel.relative_to(tmp_path))]


def test_a_build_past_its_limit_is_ended_and_says_so(tmp_path: Path) -> None:
    build = start_build(tmp_path, sdist_that(tmp_path, "time.sleep(300)"), limit_s=4)
    _, err = build.communicate(timeout=40)
    assert build.returncode == 1
    assert "it exceeded 4 s" in err
    assert left_in(tmp_path) == []


def test_a_command_past_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(TooLongError):
        run_logged(
            ["sh", "-c", "sleep 300 & sleep 300"],
            log_file=tmp_path / "log",
            env=os.environ,
            limit_s=0.5,
        )
    assert time.monotonic() - started < 10


def test_a_lock_held_by_another_process_is_named_within_its_bound(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    code = (
        "import sys; from pathlib import Path; from hpctrain.install.lock import held\n"
        "with held(Path(sys.argv[1]), what='x', wait_s=5):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    started = time.monotonic()
    with (
        pytest.raises(InstallError, match=rf"process {holder.pid} on "),
        held(lock, what="building", wait_s=1),
    ):
        pass
    assert 0.9 < time.monotonic() - started < 5
    holder.communicate(timeout=20)
    with held(lock, what="building", wait_s=1):
        pass


def test_a_lock_outlives_a_killed_holder_until_its_command_ends(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from hpctrain.install.lock import held; from hpctrain.install.process import run_logged\n"
        "with held(Path(sys.argv[1]), what='x', wait_s=5):\n"
        "    run_logged(['sh', '-c', 'echo $$; exec sleep 60'], log_file=Path(sys.argv[2]),\n"
        "        env=os.environ, limit_s=60, on_line=lambda line: print(line, flush=True))\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(lock), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
    )
    assert holder.stdout is not None
    command = int(holder.stdout.readline())
    holder.kill()
    holder.communicate(timeout=20)
    with pytest.raises(InstallError), held(lock, what="building", wait_s=0.5):
        pass
    os.kill(command, signal.SIGKILL)
    with held(lock, what="building", wait_s=10):
        pass


@pytest.mark.parametrize(
    ("script", "lacks"),
    [
        ('exec cc -nostdinc "$@"', True),
        ("cat; exit 0", False),
        ("echo no compiler >&2; exit 1", False),
    ],
)
def test_a_wrapper_without_mpi_headers_is_told_from_one_without_a_compiler(
    tmp_path: Path, script: str, lacks: bool
) -> None:
    if "cc" in script and shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    wrapper = tmp_path / "mpicc"
    wrapper.write_text(f"#!/bin/sh\n{script}\n")
    wrapper.chmod(0o755)
    assert lacks_headers(wrapper, os.environ) is lacks


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_wrapper_makes_old_sources_compile(tmp_path: Path) -> None:
    source = tmp_path / "old.cc"
    source.write_text(
        "std::uint32_t f(std::vector<int> v) {\n"
        '  if constexpr (sizeof(int) > 8) throw std::runtime_error("no");\n'
        "  return v.size();\n}\n"
    )
    wrapper = tmp_path / "cxx"
    wrapper.write_text(compiler_wrapper(Path(shutil.which("g++") or "")))
    wrapper.chmod(0o755)
    command = ["-std=c++14", "-Werror", "-c", str(source), "-o", str(tmp_path / "old.o")]
    assert subprocess.run(["g++", *command], capture_output=True, timeout=60).returncode != 0
    done = subprocess.run([str(wrapper), *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_the_verb_says_so_in_one_paragraph(tmp_path: Path) -> None:
    code = "import sys; from hpctrain.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "horovod", "build", "--cache-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=CHECKOUT,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "no C++ compiler" in line
    assert "apt install g++" in line
    assert left_in(tmp_path) == []


def test_a_half_made_venv_is_made_anew_and_a_whole_one_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/nowhere/python3")
    (folder / venv.MARKER_NAME).touch()
    steps = Steps(folder / venv.LOG_NAME, os.environ)
    venv.ensure_venv(folder, steps)
    assert venv.is_healthy(folder, os.environ)
    made = (folder / "pyvenv.cfg").stat().st_ino
    venv.ensure_venv(folder, steps)
    assert (folder / "pyvenv.cfg").stat().st_ino == made


def test_a_folder_that_is_no_venv_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = subprocess.run(
        [*BOOTSTRAP, "--venv", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=CHECKOUT,
    )
    assert done.returncode == 1
    assert "not a virtual environment" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_up_to_date_set_up_takes_no_time(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    arguments = ["--venv", str(tmp_path), "--mpi", "mpich"]
    inputs = sequence.inputs_of(sequence.parse(arguments), CHECKOUT, tmp_path, os.environ)
    made = stamp.Stamp(
        digest=stamp.digest_of(inputs),
        packages=(),
        mpi="MPICH",
        horovod="built",
        tools="",
        asked={},
    )
    (tmp_path / venv.MARKER_NAME).touch()
    stamp.write(tmp_path, made)
    started = time.monotonic()
    done = subprocess.run(
        [*BOOTSTRAP, *arguments], capture_output=True, text=True, timeout=60, cwd=CHECKOUT
    )
    assert done.returncode == 0, done.stderr
    assert "is up to date" in done.stderr
    assert time.monotonic() - started < 5


def test_clean_removes_the_venv_and_leftovers_and_nothing_else(tmp_path: Path) -> None:
    kept = [tmp_path / "hpctrain" / "a.py", tmp_path / "docs" / "build.md"]
    gone = [
        tmp_path / "hpctrain" / "__pycache__" / "a.pyc",
        tmp_path / "build" / "x",
        tmp_path / ".venv" / "pyvenv.cfg",
    ]
    for path in (*kept, *gone):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert clean(tmp_path / ".venv", tmp_path) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == kept
    assert clean(tmp_path / "docs", tmp_path) == 1
    assert kept[1].exists()


@pytest.mark.parametrize(
    "name", ["__init__.py", "errors.py", "install/__init__.py", "install/bootstrap.py"]
)
def test_an_old_python_gets_a_sentence_and_no_syntax_error(name: str) -> None:
    ast.parse((CHECKOUT / "hpctrain" / name).read_text(), feature_version=(3, 8))
