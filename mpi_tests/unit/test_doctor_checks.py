"""What doctor judges of MPI, torch and Horovod, from made-up facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.doctor import frameworks, mpi
from hpctrain.doctor.facts import Match
from hpctrain.doctor.torch_facts import parse_config
from hpctrain.install.horovod.check import HorovodCheck
from hpctrain.install.mpi import LoadedMpi
from hpctrain.mpi_version import MpiVersion
from hpctrain.programs import Answer

MPICH = MpiVersion(family="mpich", version="5.0.2")
OPENMPI = MpiVersion(family="openmpi", version="4.1.4")
CRAY = MpiVersion(family="cray", version="8.1.28")
FOREIGN = [(Path("/usr/bin/mpirun"), OPENMPI)]
OWN = [(Path("/env/bin/mpirun"), MPICH)]
MATCH = Match(mpirun=Path("/env/bin/mpirun"), version=MPICH)


def loaded(version: MpiVersion = MPICH, library: str = "/env/lib/libmpi.so.12") -> LoadedMpi:
    return LoadedMpi(
        mpi=version,
        library=library,
        text="",
        mpi4py="4.1.2",
        extension="/env/lib/mpi4py/MPI.mpich.cpython-311.so",
    )


def probe(*, size: int = 2, right: bool = True, threads: str = "multiple", cuda=None, code=0):
    lines = [
        json.dumps(
            {
                "rank": rank,
                "size": size,
                "right": right,
                "threads": threads,
                "allreduce_s": 0.001,
                "cuda_aware": cuda,
            }
        )
        for rank in range(2)
    ]
    return Answer(code=code, out="\n".join(lines))


def test_launcher_matches() -> None:
    check = mpi.judge_launcher(loaded(), "", MATCH, OWN)
    assert (check.status, check.cure) == ("ok", "")
    assert "MPICH 5.0.2" in check.text
    assert "/env/bin/mpirun" in check.text


def test_only_a_foreign_launcher_is_broken() -> None:
    check = mpi.judge_launcher(loaded(), "", Match(trouble="x"), FOREIGN)
    assert check.status == "broken"
    assert "/usr/bin/mpirun (Open MPI 4.1.4)" in check.text
    assert "MPI4PY_MPIABI" in check.cure


def test_a_foreign_launcher_first_on_path_is_a_warning() -> None:
    check = mpi.judge_launcher(loaded(), "", MATCH, FOREIGN + OWN)
    assert check.status == "warning"
    assert "/usr/bin/mpirun" in check.text
    assert "hpctrain run" in check.cure


def test_no_mpi_at_all() -> None:
    check = mpi.judge_launcher(None, "cannot load MPI library", Match(trouble="x"), [])
    assert check.status == "broken"
    assert "cannot load MPI library" in check.text


def test_abi_inside_the_environment_shadows_the_sites_mpi() -> None:
    check = mpi.judge_abi(loaded(), {}, Path("/env"), FOREIGN + OWN)
    assert check.status == "warning"
    assert "shadows Open MPI 4.1.4 (/usr/bin)" in check.text


@pytest.mark.parametrize(
    ("library", "environ", "others"),
    [
        ("/env/lib/libmpi.so.12", {}, OWN),
        ("/opt/mpich/lib/libmpi.so.12", {}, FOREIGN),
        ("/env/lib/libmpi.so.12", {"MPI4PY_MPIABI": "mpich"}, FOREIGN),  # the user chose
    ],
)
def test_abi_that_shadows_nothing_or_was_chosen(library, environ, others) -> None:
    check = mpi.judge_abi(loaded(library=library), environ, Path("/env"), others)
    assert check.status == "ok"
    assert all(f"{key}={value}" in check.text for key, value in environ.items())


def test_abi_that_mpi4py_did_not_follow() -> None:
    environ = {"MPI4PY_LIBMPI": "/opt/lib/libmpi.so.12", "MPI4PY_MPIABI": "mpich"}
    check = mpi.judge_abi(loaded(), environ, Path("/env"), [])
    assert check.status == "warning"
    assert "/env/lib/libmpi.so.12 is loaded" in check.text
    assert check.cure.startswith("unset MPI4PY_MPIABI")


def test_abi_that_the_user_chose_wrongly() -> None:
    check = mpi.judge_abi(None, {"MPI4PY_LIBMPI": "/no/libmpi.so"}, Path("/env"), [])
    assert check.status == "broken"
    assert check.cure == "unset MPI4PY_LIBMPI"


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (probe(), "ok", "sum is correct"),
        (probe(size=1), "broken", "jobs of size 1, 1"),
        (probe(right=False, code=1), "broken", "sum is wrong"),
        (Answer(code=None, err="no answer within 9 s", hung=True), "broken", "hang"),
        (Answer(code=1, err="PMI version mismatch\n-----\n"), "broken", "PMI version mismatch"),
        (Answer(code=-11), "broken", "signal 11"),
        (None, "broken", "no matching launcher"),
    ],
)
def test_allreduce(answer, status, words) -> None:
    check = mpi.judge_allreduce(answer, MATCH)
    assert check.status == status
    assert words in check.text
    assert bool(check.cure) == (status != "ok")


def test_threads() -> None:
    assert mpi.judge_threads(probe()).status == "ok"
    assert mpi.judge_threads(None).status == "ok"
    low = mpi.judge_threads(probe(threads="funneled"))
    assert low.status == "warning"
    assert "funneled" in low.text


@pytest.mark.parametrize(
    ("version", "cuda", "built", "environ", "gpus", "status"),
    [
        (MPICH, False, None, {}, 0, "ok"),
        (MPICH, False, None, {}, 4, "warning"),
        (OPENMPI, None, True, {}, 4, "ok"),
        (OPENMPI, None, None, {}, 4, "warning"),
        (OPENMPI, True, False, {}, 4, "ok"),  # the library knows better than its tool
        (CRAY, None, None, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, 4, "ok"),
        (CRAY, True, None, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, 4, "warning"),
    ],
)
def test_gpu_aware(version, cuda, built, environ, gpus, status) -> None:
    check = mpi.judge_gpu_aware(
        probe(cuda=cuda), loaded(version), environ, num_gpus=gpus, built_with_cuda=built
    )
    assert check.status == status


# --- torch and Horovod -------------------------------------------------------------------------

TORCH = {
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "gpus": [],
    "nccl": None,
    "cpu_capability": "AVX2",
    "mkldnn": True,
    "lapack": True,
    "compute_works": True,
    "gpu_computes": None,
    "blas": "mkl",
    "onednn": "3.12.0",
    "acl": None,
    "mkl": "2025.0",
}
GPU = TORCH | {"cuda": "13.0", "gpus": ["H200"] * 2, "nccl": "2.28.9", "gpu_computes": True}
FINE = Answer(code=0)


@pytest.mark.parametrize(
    ("torch", "has_device", "status", "words"),
    [
        (TORCH, False, "ok", "built for CPUs only, sees no GPU"),
        (GPU, True, "ok", "built for CUDA 13.0, sees 2 x H200"),
        (TORCH, True, "warning", "NVIDIA driver"),
        (TORCH | {"compute_works": False}, False, "broken", "wrong result"),
        (GPU | {"gpu_computes": False}, True, "broken", "wrong result"),
        ({}, False, "broken", "libc10.so"),
    ],
)
def test_torch(torch, has_device, status, words) -> None:
    answer = FINE if torch else Answer(code=1, err="ImportError: libc10.so: no such file")
    check = frameworks.judge_torch(answer, torch, has_nvidia_device=has_device)
    assert check.status == status
    assert words in check.text


def test_nccl() -> None:
    assert "2.28.9" in frameworks.judge_nccl(GPU, num_gpus=2).text
    assert frameworks.judge_nccl(TORCH, num_gpus=0).status == "ok"
    assert frameworks.judge_nccl(GPU | {"nccl": None}, num_gpus=2).status == "warning"
    assert frameworks.judge_nccl({}, num_gpus=0).status == "ok"


def test_math() -> None:
    flags = frozenset({"avx2", "fma"})
    assert frameworks.judge_math(TORCH, flags).text.startswith("MKL 2025.0, oneDNN 3.12.0")
    assert frameworks.judge_math(TORCH | {"cpu_capability": "DEFAULT"}, flags).status == "warning"
    arm = TORCH | {"cpu_capability": "DEFAULT", "blas": "open", "mkl": None, "acl": "yes"}
    check = frameworks.judge_math(arm, frozenset({"asimd"}))
    assert check.status == "ok"
    assert check.text.startswith("OpenBLAS, oneDNN 3.12.0 with the Arm Compute Library")
    bare = TORCH | {"blas": None, "mkl": None}
    assert frameworks.judge_math(bare, flags).status == "warning"


def test_torch_config_is_read() -> None:
    text = """PyTorch built with:
  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605
  - Intel(R) MKL-DNN v3.7.1 (Git Hash 8d263e6)
  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release, USE_MKLDNN=ON,"""
    assert parse_config(text) == {"blas": "mkl", "onednn": "3.7.1", "acl": None, "mkl": "2024.2"}
    assert set(parse_config("").values()) == {None}


@pytest.mark.parametrize(
    ("found", "gpus", "built_for", "status", "words"),
    [
        (HorovodCheck(status="missing", cure="build"), 0, None, "warning", "not installed"),
        (
            HorovodCheck(status="ok", version="0.28.1", built={"mpi": True, "nccl": False}),
            0,
            "2.13.0",
            "ok",
            "0.28.1, built with mpi, linked to torch 2.13.0",
        ),
        (
            HorovodCheck(status="ok", version="0.28.1", built={"mpi": True, "nccl": False}),
            2,
            None,
            "warning",
            "without NCCL",
        ),
        (
            HorovodCheck(status="ok", version="0.28.1", built={"mpi": True}),
            0,
            "2.11.0",
            "warning",
            "linked to torch 2.11.0, but torch 2.13.0 is installed",
        ),
        (
            HorovodCheck(
                status="broken",
                version="0.28.1",
                bound={"torch": "2.11.0", "mpi_family": "openmpi"},
                problems=("import fails",),
                cure="build",
            ),
            0,
            None,
            "broken",
            "linked to torch 2.11.0 and openmpi: import fails",
        ),
    ],
)
def test_horovod(found, gpus, built_for, status, words) -> None:
    check = frameworks.judge_horovod(found, num_gpus=gpus, built_for=built_for, torch="2.13.0")
    assert check.status == status
    assert words in check.text
    assert bool(check.cure) == (status != "ok")
