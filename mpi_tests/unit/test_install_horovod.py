"""The decisions of a Horovod build: what the wheel is bound to, the recipe, the diagnosis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import InstallError
from hpctrain.install.horovod import cuda
from hpctrain.install.horovod.build import BuildOptions, percent
from hpctrain.install.horovod.cache import (
    RECORD_NAME,
    bindings,
    cache_home,
    cache_key,
    differences,
    library_place,
)
from hpctrain.install.horovod.check import check_horovod
from hpctrain.install.horovod.diagnosis import diagnose
from hpctrain.install.horovod.facts import BuildFacts, MpiFacts, PythonFacts, TorchFacts
from hpctrain.install.horovod.recipe import (
    build_environment,
    compiler_wrapper,
    header_folders,
    jobs_for,
    relative_rpath,
)
from hpctrain.mpi_version import MpiVersion

PYTHON = PythonFacts(
    executable=Path("/env/bin/python"),
    prefix=Path("/env"),
    private=True,
    site_packages=Path("/env/lib/python3.11/site-packages"),
    paths=(Path("/env/lib/python3.11/site-packages"),),
    soabi="cpython-311-x86_64-linux-gnu",
    tag="cp311",
    include=Path("/usr/include/python3.11"),
    machine="x86_64",
    libc="glibc 2.36",
    packages={},
    torch=None,
)
TORCH = TorchFacts(version="2.13.0+cpu", build="abc", cxx11_abi=True, cuda=None, hip=None)
MPI = MpiFacts(
    version=MpiVersion(family="mpich", version="5.0.2"),
    library=Path("/env/lib/libmpi.so.12"),
    mpicxx=Path("/env/bin/mpicxx"),
    mpirun=Path("/env/bin/mpirun"),
)
NCCL = cuda.NcclFacts(include=Path("/n/include"), library=Path("/n/libnccl.so.2"), version="2.28.9")
CUDA = cuda.CudaFacts(home=Path("/cuda"), version="13.0", nccl=NCCL)
FACTS = BuildFacts(
    python=PYTHON,
    torch=TORCH,
    mpi=MPI,
    cuda=None,
    why_no_cuda="torch is a CPU build",
    compiler=Path("/usr/bin/g++"),
    compiler_version="12.2.0",
)

CHANGED = {
    "torch": replace(FACTS, torch=replace(TORCH, version="2.11.0+cpu")),
    "torch_build": replace(FACTS, torch=replace(TORCH, build="def")),
    "torch_cxx11_abi": replace(FACTS, torch=replace(TORCH, cxx11_abi=False)),
    "python_abi": replace(FACTS, python=replace(PYTHON, soabi="cpython-312-x86_64-linux-gnu")),
    "mpi_family": replace(FACTS, mpi=replace(MPI, version=replace(MPI.version, family="intel"))),
    "mpi_version": replace(FACTS, mpi=replace(MPI, version=replace(MPI.version, version="4.3"))),
    "mpi_library": replace(FACTS, mpi=replace(MPI, library=Path("/opt/mpich/lib/libmpi.so.12"))),
    "cuda": replace(FACTS, cuda=CUDA),
    "machine": replace(FACTS, python=replace(PYTHON, machine="aarch64")),
    "libc": replace(FACTS, python=replace(PYTHON, libc="glibc 2.39")),
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_key_changes_with_everything_the_wheel_is_bound_to(name: str) -> None:
    assert cache_key(CHANGED[name]) != cache_key(FACTS)
    assert bindings(CHANGED[name])[name] != bindings(FACTS)[name]


def test_the_key_changes_with_nccl_and_the_toolkit() -> None:
    built = replace(FACTS, cuda=CUDA)
    nccl = replace(FACTS, cuda=replace(CUDA, nccl=replace(NCCL, version="2.29.0")))
    toolkit = replace(FACTS, cuda=replace(CUDA, version="13.1"))
    assert len({cache_key(facts) for facts in (built, nccl, toolkit)}) == 3


def test_the_key_does_not_change_with_what_the_wheel_is_not_bound_to() -> None:
    assert cache_key(replace(FACTS, compiler=Path("/usr/bin/clang++"))) == cache_key(FACTS)


def test_an_mpi_inside_the_venv_moves_along_with_it() -> None:
    elsewhere = replace(
        PYTHON,
        prefix=Path("/other"),
        executable=Path("/other/bin/python"),
        site_packages=Path("/other/lib/python3.11/site-packages"),
    )
    moved = replace(
        FACTS, python=elsewhere, mpi=replace(MPI, library=Path("/other/lib/libmpi.so.12"))
    )
    assert cache_key(moved) == cache_key(FACTS)
    assert relative_rpath(moved) == relative_rpath(FACTS)
    assert relative_rpath(FACTS) == "$ORIGIN/../../../..:$ORIGIN/../../torch/lib"


def test_a_site_mpi_stays_where_it_is() -> None:
    site = CHANGED["mpi_library"]
    assert library_place(site.python, site.mpi) == "/opt/mpich/lib/libmpi.so.12"
    assert relative_rpath(site) is None


def test_the_key_is_readable_and_fit_for_a_folder_name() -> None:
    key = cache_key(replace(FACTS, cuda=CUDA))
    for part in ("horovod0.28.1", "torch2.13.0+cpu", "cp311", "mpich5.0.2", "cuda13.0-nccl2.28.9"):
        assert part in key
    assert "/" not in key
    assert len(key) < 200


@pytest.mark.parametrize(
    ("environ", "home"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/hpctrain/horovod"),
        ({"HOME": "/h"}, "/h/.cache/hpctrain/horovod"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/hpctrain/horovod"),
    ],
)
def test_where_the_cache_is(environ: dict[str, str], home: str) -> None:
    assert cache_home(environ) == Path(home)


def test_a_changed_torch_is_named_and_a_changed_patch_level_of_mpi_is_not() -> None:
    built = bindings(FACTS)
    (said,) = differences(built, bindings(CHANGED["torch"]))
    assert "2.13.0+cpu" in said
    assert "2.11.0+cpu" in said
    assert differences(built, bindings(CHANGED["mpi_version"])) == []
    assert differences({}, built) == []


def test_the_build_environment_is_ours_where_it_matters() -> None:
    user = {"HOROVOD_WITH_GLOO": "1", "PATH": "/usr/bin", "KEEP": "me", "CMAKE_GENERATOR": "Ninja"}
    env = build_environment(FACTS, jobs=3, work=Path("/w"), includes=[Path("/i")], environ=user)
    assert "HOROVOD_WITH_GLOO" not in env
    assert env["KEEP"] == "me"
    assert env["MAKEFLAGS"] == "-j3"
    assert env["PATH"].split(":")[0] == "/w/bin"
    assert env["CXX"] == "/w/bin/cxx"
    assert env["CMAKE_GENERATOR"] == "Unix Makefiles"
    assert env["CPATH"] == "/i"
    assert not any(name.startswith("HOROVOD_GPU") for name in env)


def test_the_build_environment_with_cuda() -> None:
    facts = replace(FACTS, cuda=CUDA)
    env = build_environment(facts, jobs=1, work=Path("/w"), includes=[], environ={})
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert env["HOROVOD_CUDA_HOME"] == "/cuda"
    assert env["HOROVOD_NCCL_HOME"] == "/w/nccl"


def test_the_wrapper_appends_the_standard_last_and_replaces_run_paths(tmp_path: Path) -> None:
    compiler = tmp_path / "a compiler"
    compiler.write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\n')
    compiler.chmod(0o755)
    wrapper = tmp_path / "cxx"
    wrapper.write_text(compiler_wrapper(compiler, "$ORIGIN/../x"))
    wrapper.chmod(0o755)
    given_words = ["-std=c++14", "-DX=a b", "-Wl,-rpath,/old:/older", "-c", "it's.cc"]
    done = subprocess.run(
        [str(wrapper), *given_words], capture_output=True, text=True, timeout=30, check=True
    )
    words = [line[1:-1] for line in done.stdout.splitlines()]
    assert words[:5] == ["-std=c++14", "-DX=a b", "-Wl,-rpath,$ORIGIN/../x", "-c", "it's.cc"]
    assert words[5] == "-std=gnu++17"
    assert "stdexcept" in words


@given(cores=st.integers(1, 512), gib=st.integers(0, 4096))
def test_jobs_fit_cores_and_memory(cores: int, gib: int) -> None:
    jobs = jobs_for(cores, gib * 1024**3)
    assert 1 <= jobs <= cores
    assert jobs == 1 or jobs * 2 <= gib


def test_headers_of_an_unpacked_package_come_after_the_interpreters_own() -> None:
    first, second, third = header_folders(PYTHON, Path("/w/headers"))
    assert first == Path("/usr/include/python3.11")
    assert second == Path("/w/headers/usr/include/python3.11")
    assert third == Path("/w/headers/usr/include")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("  [ 45%] Building CXX object a.o", 45),
        ("[100%] Linking", 100),
        ("[  6%] Building", 6),
        ("g++ -c [45%]", None),
        ("", None),
    ],
)
def test_percent(line: str, value: int | None) -> None:
    assert percent(line) == value


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("/usr/bin/python: No module named pip", "no pip"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "out of memory"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("Temporary failure in name resolution'))", "cannot be reached"),
        ("x.h:1:10: fatal error: Python.h: No such file or directory", "headers of Python"),
        ("FileNotFoundError: No such file or directory: 'cmake'", "CMake"),
        ("CMake Error: Could NOT find MPI (missing: MPI_CXX_FOUND)", "mpicxx"),
        ('target "MPI::MPI_CXX" includes non-existent path', "its headers are not"),
        ("-- The CXX compiler identification is unknown", "compiler does not work"),
        ("Could NOT find NCCL (missing: NCCL_LIBRARY)", "NCCL"),
        ("fine\n/a/b.cc:3:7: error: 'x' was not declared\nERROR: later", "'x' was not declared"),
        ("ERROR: Failed building wheel", "Failed building wheel"),
        ("CMake Error at CMakeLists.txt:3:\n  broken", "CMakeLists.txt:3: broken"),
        ("error: subprocess-exited-with-error", "names no error"),
        ("all well", "names no error"),
    ],
)
def test_the_cause_is_read_from_the_log(log: str, why: str) -> None:
    found = diagnose(log)
    assert why in found.why
    assert found.cure


def test_nccl_version_comes_from_the_header() -> None:
    header = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"
    assert cuda.nccl_version(header) == "2.28.9"


def _toolkit(folder: Path, version: str) -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V{version}'\n")
    nvcc.chmod(0o755)
    return folder


def _pip_nccl(folder: Path) -> Path:
    (folder / "nvidia/nccl/include").mkdir(parents=True)
    (folder / "nvidia/nccl/lib").mkdir()
    (folder / "nvidia/nccl/include/nccl.h").write_text("#define NCCL_MAJOR 2\n")
    (folder / "nvidia/nccl/lib/libnccl.so.2").touch()
    return folder


def test_cuda_is_found_with_pips_nccl(tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda", "13.0.88")
    packages = _pip_nccl(tmp_path / "site-packages")
    found, why = cuda.find(
        "13.0", packages=[packages], environ={"CUDA_HOME": str(home)}, wanted=None
    )
    assert found is not None
    assert found.version == "13.0.88"
    assert found.nccl.library.name == "libnccl.so.2"
    assert why == ""


@pytest.mark.parametrize("torch_cuda", [None, "12.6"])
def test_cuda_that_does_not_fit_is_left_with_a_reason_or_refused(
    tmp_path: Path, torch_cuda: str | None
) -> None:
    environ = {"CUDA_HOME": str(_toolkit(tmp_path, "13.0.88"))}
    found, why = cuda.find(torch_cuda, packages=[], environ=environ, wanted=None)
    assert found is None
    assert "torch" in why
    with pytest.raises(InstallError, match="--no-cuda"):
        cuda.find(torch_cuda, packages=[], environ=environ, wanted=True)
    assert cuda.find("13.0", packages=[], environ=environ, wanted=False)[0] is None


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="no such file"):
        BuildOptions(cache_dir=tmp_path, sdist=tmp_path / "horovod.tar.gz")
    with pytest.raises(InstallError, match="--jobs 0"):
        BuildOptions(cache_dir=tmp_path, jobs=0)


def test_check_reads_what_an_installed_horovod_is_bound_to(tmp_path):
    folder = tmp_path / "horovod-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 9.9\n")
    bound = {"torch": "0.1", "mpi_family": "mpich", "nccl": None}
    (folder / RECORD_NAME).write_text(json.dumps(bound, indent=2))
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('no such symbol')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = check_horovod(Path(sys.executable), environ=environ, run=False)
    assert (found.status, found.version, found.bound) == ("broken", "9.9", bound)
    assert found.here["torch"] == torch.__version__
    assert any("0.1" in problem for problem in found.problems), found.problems
    assert any("no such symbol" in problem for problem in found.problems), found.problems
