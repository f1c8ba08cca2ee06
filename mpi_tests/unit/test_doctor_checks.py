"""Every check's judgement, from made-up facts; and doctor's own robustness."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from hpctrain.doctor import batch, clock, frameworks, machine, mpi
from hpctrain.doctor.asking import Answer, ask
from hpctrain.doctor.examination import CHECKS, examine
from hpctrain.doctor.facts import Facts, Match, without_launcher
from hpctrain.doctor.torch_facts import parse_config
from hpctrain.doctor.verdict import Check, as_json, exit_code, render, summarise
from hpctrain.install.horovod.check import HorovodCheck
from hpctrain.install.mpi import LoadedMpi, MpiVersion
from hpctrain.world.cores import CoreMap

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


# --- MPI ---------------------------------------------------------------------------------------


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
        (probe(), "ok", "sum is right"),
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
            "0.28.1, built with mpi, bound to torch 2.13.0",
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
            "bound to torch 2.11.0, but torch 2.13.0 is here",
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
            "bound to torch 2.11.0 and openmpi: import fails",
        ),
    ],
)
def test_horovod(found, gpus, built_for, status, words) -> None:
    check = frameworks.judge_horovod(found, num_gpus=gpus, built_for=built_for, torch="2.13.0")
    assert check.status == status
    assert words in check.text
    assert bool(check.cure) == (status != "ok")


# --- the machine -------------------------------------------------------------------------------

FOUR = CoreMap(core_of={i: i % 4 for i in range(8)}, domain_of={i: i % 2 for i in range(8)})


@pytest.mark.parametrize(
    ("cpus", "quota", "omp", "status", "words"),
    [
        (range(8), None, None, "ok", "4 of 4 cores (CPUs 0-7), 2 NUMA domains"),
        (range(2), None, "2", "ok", "2 of 4 cores"),
        (range(2), None, "4,2", "warning", "more threads than CPUs"),
        (range(8), None, "many", "warning", "not a positive number"),
        (range(8), 1.5, None, "warning", "1.5 cores' worth"),
        (range(8), 4.0, None, "ok", ""),
        ([0, 4], None, None, "warning", "bound to one core"),
    ],
)
def test_cores(cpus, quota, omp, status, words) -> None:
    check = machine.judge_cores(frozenset(cpus), FOUR, quota=quota, omp_num_threads=omp)
    assert check.status == status
    assert words in check.text


def test_quota_is_read() -> None:
    assert machine.parse_quota("max 100000\n") is None
    assert machine.parse_quota("-1 100000") is None
    assert machine.parse_quota("150000 100000\n") == 1.5


@pytest.mark.parametrize(
    ("size", "status"),
    [
        (None, "broken"),
        ((64 << 20, 1 << 20), "broken"),
        ((64 << 20, 64 << 20), "warning"),
        ((8 << 30, 100 << 20), "warning"),
        ((8 << 30, 8 << 30), "ok"),
    ],
)
def test_shm(size, status) -> None:
    assert machine.judge_shm(size).status == status


def test_memlock_matters_only_with_infiniband() -> None:
    assert machine.judge_memlock(64 << 10, ()).status == "ok"
    assert machine.judge_memlock(None, ("mlx5_0",)).status == "ok"
    low = machine.judge_memlock(64 << 10, ("mlx5_0",))
    assert low.status == "warning"
    assert "64 KiB" in low.text


def test_cpu_flags() -> None:
    assert machine.parse_cpu_flags("processor : 0\nflags\t\t: fpu avx2\n") == {"fpu", "avx2"}
    assert machine.parse_cpu_flags("Features\t: fp asimd sve\n") == {"fp", "asimd", "sve"}
    assert machine.parse_cpu_flags("") == frozenset()


CHRONYC = "A9FEA97B,169.254.169.123,4,1700000000.1,0.0,0.0,0.0,-1.4,0.0,0.0,0.0,0.0,64.3,{}\n"


def test_clock_parsers() -> None:
    assert clock.parse_timedatectl("NTPSynchronized=yes\n") is True
    assert clock.parse_timedatectl("NTPSynchronized=no\n") is False
    assert clock.parse_timedatectl("") is None
    assert clock.parse_chronyc(CHRONYC.format("Normal")) is True
    assert clock.parse_chronyc(CHRONYC.format("Not synchronised")) is False
    assert clock.parse_chronyc("506 Cannot talk to daemon") is None


def test_clock_asks_the_next_when_one_cannot_tell() -> None:
    def answer(tool: str, *words: str, limit_s: float) -> Answer:
        if tool.endswith("timedatectl"):
            return Answer(code=1, err="System has not been booted with systemd")
        return Answer(code=0, out=CHRONYC.format("Normal"))

    state = clock.read_clock(lambda tool: Path("/usr/bin") / tool, answer)
    assert state == clock.ClockState(synchronised=True, source="chronyc")
    kernel = clock.read_clock(lambda tool: None, answer)
    assert kernel.source == "the kernel"


def test_clock() -> None:
    for known, status in ((True, "ok"), (None, "ok"), (False, "warning")):
        state = clock.ClockState(synchronised=known, source="chronyc")
        assert clock.judge_clock(state).status == status


# --- batch systems -----------------------------------------------------------------------------

OLD_LIST = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\n"
NEW_LIST = """MPI plugin types are...
\tnone
\tcray_shasta
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v4,pmix_v5
"""


def test_srun_lists() -> None:
    assert batch.parse_plugins(OLD_LIST) == {"none", "pmi2", "pmix_v3"}
    assert batch.parse_plugins(NEW_LIST) == {
        "none",
        "cray_shasta",
        "pmi2",
        "pmix",
        "pmix_v4",
        "pmix_v5",
    }


@pytest.mark.parametrize(
    ("version", "listing", "status", "words"),
    [
        (MPICH, OLD_LIST, "ok", "srun --mpi=pmi2"),
        (OPENMPI, OLD_LIST, "ok", "srun --mpi=pmix_v3"),
        (OPENMPI, NEW_LIST, "ok", "srun --mpi=pmix`"),
        (CRAY, NEW_LIST, "ok", "srun --mpi=cray_shasta"),
        (OPENMPI, "srun: none\nsrun: pmi2\n", "warning", "needs srun --mpi=pmix"),
        (None, NEW_LIST, "ok", "Slurm (sbatch, srun)"),
    ],
)
def test_srun_and_this_mpi(version, listing, status, words) -> None:
    tools = {"sbatch": Path("/usr/bin/sbatch"), "srun": Path("/usr/bin/srun")}
    check = batch.judge_batch(tools, Answer(code=0, err=listing), version)
    assert check.status == status
    assert words in check.text


def test_other_batch_systems() -> None:
    assert "no batch system" in batch.judge_batch({}, None, MPICH).text
    check = batch.judge_batch({"qsub": Path("/x/qsub"), "bsub": Path("/x/bsub")}, None, MPICH)
    assert check.text == "PBS or Grid Engine (qsub) and LSF (bsub)"
    tools = {"srun": Path("/usr/bin/srun")}
    silent = batch.judge_batch(tools, Answer(code=1, err="srun: fatal: no config"), MPICH)
    assert silent.status == "warning"
    assert "no config" in silent.text


# --- doctor itself -----------------------------------------------------------------------------


def facts(limit_s: float = 5.0) -> Facts:
    return Facts(
        {"PATH": "/nowhere"}, python=Path("/no/python"), prefix=Path("/no"), limit_s=limit_s
    )


def test_a_check_that_raises_is_a_broken_line() -> None:
    def bad(facts: Facts) -> Check:
        raise KeyError("version")

    (check,) = examine(facts(), [("torch", bad)])
    assert (check.name, check.status) == ("torch", "broken")
    assert "KeyError: 'version'" in check.text


def test_a_check_that_never_returns_is_a_broken_line() -> None:
    release = threading.Event()

    def stuck(facts: Facts) -> Check:
        release.wait(30)
        return Check(name="slow", status="ok", text="")

    (check,) = examine(facts(limit_s=0.01), [("slow", stuck)])
    release.set()
    assert check.status == "broken"
    assert "did not end within" in check.text


def test_a_machine_with_nothing_on_it_breaks_no_check() -> None:
    verdicts = list(examine(facts()))
    assert [check.name for check in verdicts] == [name for name, _ in CHECKS]
    assert {c.name: c.status for c in verdicts}["MPI and launcher"] == "broken"
    own_fault = [check.text for check in verdicts if "the check itself" in check.text]
    assert [text for text in own_fault if "/no/python" not in text] == []
    assert exit_code(verdicts) == 1
    json.dumps(as_json(verdicts))


def test_ask_bounds_children_that_hold_the_output() -> None:
    answer = ask(["/bin/sh", "-c", "sleep 30 & sleep 30"], environ={"PATH": "/bin"}, limit_s=0.2)
    assert answer.hung
    assert "0.2 s" in answer.reason
    assert ask(["/no/such"], environ={}, limit_s=1).code is None


def test_the_launchers_variables_do_not_reach_our_ranks() -> None:
    environ = {"PMI_RANK": "0", "SLURM_JOB_ID": "7", "OMPI_MCA_btl": "tcp", "PATH": "/bin"}
    assert without_launcher(environ) == {"OMPI_MCA_btl": "tcp", "PATH": "/bin"}


def test_lines() -> None:
    check = Check(name="x", status="broken", text="word " * 30, cure="mend it")
    lines = render(check, name_width=4).splitlines()
    assert lines[0].startswith("broken   x     word word")
    assert lines[-1].strip() == "cure: mend it"
    assert max(map(len, lines)) <= 100
    fine = Check(name="y", status="ok", text="fine", cure="ignored")
    assert render(fine, name_width=1) == "ok       y  fine"
    assert summarise([fine]) == "all 1 checks are ok"
    assert summarise([fine, check]) == "2 checks: 1 broken, 0 warnings"
    assert (exit_code([fine]), exit_code([fine, check])) == (0, 1)
