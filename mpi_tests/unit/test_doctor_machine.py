"""What doctor judges of the machine and its batch system, from made-up facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.batch_systems import parse_plugins
from hpctrain.doctor import machine
from hpctrain.mpi_version import MpiVersion
from hpctrain.programs import Answer
from hpctrain.world.cores import CoreMap

MPICH = MpiVersion(family="mpich", version="5.0.2")
MPICH_PMIX = MpiVersion(family="mpich", version="5.0.2", configure="--with-pmix=/usr")
MPICH_BOTH = MpiVersion(
    family="mpich", version="5.0.2", configure="'--with-pmix' '--with-pmilib=mpich'"
)
OPENMPI = MpiVersion(family="openmpi", version="4.1.4")
CRAY = MpiVersion(family="cray", version="8.1.28")


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
    assert "64.0 KiB" in low.text


def test_cpu_flags() -> None:
    assert machine.parse_cpu_flags("processor : 0\nflags\t\t: fpu avx2\n") == {"fpu", "avx2"}
    assert machine.parse_cpu_flags("Features\t: fp asimd sve\n") == {"fp", "asimd", "sve"}
    assert machine.parse_cpu_flags("") == frozenset()


CHRONYC = "A9FEA97B,169.254.169.123,4,1700000000.1,0.0,0.0,0.0,-1.4,0.0,0.0,0.0,0.0,64.3,{}\n"


def test_clock_parsers() -> None:
    assert machine.parse_timedatectl("NTPSynchronized=yes\n") is True
    assert machine.parse_timedatectl("NTPSynchronized=no\n") is False
    assert machine.parse_timedatectl("") is None
    assert machine.parse_chronyc(CHRONYC.format("Normal")) is True
    assert machine.parse_chronyc(CHRONYC.format("Not synchronised")) is False
    assert machine.parse_chronyc("506 Cannot talk to daemon") is None


def test_clock_asks_the_next_when_one_cannot_tell() -> None:
    def answer(tool: str, *words: str, limit_s: float) -> Answer:
        if tool.endswith("timedatectl"):
            return Answer(code=1, err="System has not been booted with systemd")
        return Answer(code=0, out=CHRONYC.format("Normal"))

    state = machine.read_clock(lambda tool: Path("/usr/bin") / tool, answer)
    assert state == machine.ClockState(synchronised=True, source="chronyc")
    kernel = machine.read_clock(lambda tool: None, answer)
    assert kernel.source == "the kernel"


def test_clock() -> None:
    for known, status in ((True, "ok"), (None, "ok"), (False, "warning")):
        state = machine.ClockState(synchronised=known, source="chronyc")
        assert machine.judge_clock(state).status == status


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
    assert parse_plugins(OLD_LIST) == {"none", "pmi2", "pmix_v3"}
    assert parse_plugins(NEW_LIST) == {
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
        (MPICH_PMIX, OLD_LIST, "ok", "srun --mpi=pmix_v3"),
        (MPICH_PMIX, NEW_LIST, "ok", "srun --mpi=pmix`"),
        (MPICH_PMIX, "srun: none\nsrun: pmi2\n", "warning", "needs srun --mpi=pmix"),
        (MPICH_BOTH, "srun: none\nsrun: pmi2\n", "ok", "srun --mpi=pmi2"),
        (OPENMPI, OLD_LIST, "ok", "srun --mpi=pmix_v3"),
        (OPENMPI, NEW_LIST, "ok", "srun --mpi=pmix`"),
        (CRAY, NEW_LIST, "ok", "srun --mpi=cray_shasta"),
        (OPENMPI, "srun: none\nsrun: pmi2\n", "warning", "needs srun --mpi=pmix"),
        (None, NEW_LIST, "ok", "Slurm (sbatch, srun)"),
    ],
)
def test_srun_and_this_mpi(version, listing, status, words) -> None:
    tools = {"sbatch": Path("/usr/bin/sbatch"), "srun": Path("/usr/bin/srun")}
    check = machine.judge_batch(tools, Answer(code=0, err=listing), version)
    assert check.status == status
    assert words in check.text


def test_other_batch_systems() -> None:
    assert "no batch system" in machine.judge_batch({}, None, MPICH).text
    check = machine.judge_batch({"qsub": Path("/x/qsub"), "bsub": Path("/x/bsub")}, None, MPICH)
    assert check.text == "PBS or Grid Engine (qsub) and LSF (bsub)"
    tools = {"srun": Path("/usr/bin/srun")}
    silent = machine.judge_batch(tools, Answer(code=1, err="srun: fatal: no config"), MPICH)
    assert silent.status == "warning"
    assert "no config" in silent.text
