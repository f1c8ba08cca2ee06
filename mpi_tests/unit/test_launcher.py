"""Launcher detection: one fixture per row of the table, and the traps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpctrain
from hpctrain.batch_systems import known_launchers
from hpctrain.batch_systems.slurm import parse_task_counts
from hpctrain.errors import LaunchError
from hpctrain.mpi_version import MpiVersion, identify
from hpctrain.world.launcher import detect
from hpctrain.world.mismatch import explain_mismatch, foresee_trouble

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
ROWS = {
    "openmpi": OPENMPI,
    "openmpi 5": {**OPENMPI, "PRTE_LAUNCHED": "1", "PMIX_NAMESPACE": "prterun-1"},
    "mvapich": {
        "MV2_COMM_WORLD_RANK": "3",
        "MV2_COMM_WORLD_SIZE": "8",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "pals": {
        "PALS_RANKID": "3",
        "PMI_RANK": "3",
        "PMI_SIZE": "8",
        "PALS_LOCAL_RANKID": "1",
        "PALS_LOCAL_SIZE": "2",
        "PALS_NODEID": "1",
    },
    "hydra": HYDRA,
    "jsrun": {
        "JSM_NAMESPACE_RANK": "3",
        "JSM_NAMESPACE_SIZE": "8",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
        "LSB_JOBID": "77",
    },
    "flux": {
        "FLUX_TASK_RANK": "3",
        "FLUX_JOB_SIZE": "8",
        "FLUX_TASK_LOCAL_ID": "1",
        "FLUX_JOB_ID": "ƒ77",
    },
    "torchrun": {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",
    },
    "srun": SRUN,
}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_read(name):
    launch = detect(ROWS[name])
    assert launch.row is not None
    assert launch.row.name == name.split()[0]
    assert (launch.rank, launch.size, launch.local_rank) == (3, 8, 1)
    assert launch.local_size == (None if name == "flux" else 2)


def test_every_row_of_the_table_has_a_fixture():
    assert {row.name for row in known_launchers()} == {name.split()[0] for name in ROWS}


def test_nothing_is_nothing():
    launch = detect({"PATH": "/bin"})
    assert (launch.row, launch.rank, launch.size, launch.batch_system) == (None, 0, 1, None)
    assert launch.title == "no launcher"


def test_the_batch_shell_is_not_a_step():
    shell = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    launch = detect(shell)
    assert launch.row is None
    assert (launch.batch_system, launch.job_id) == ("Slurm", "77")


@pytest.mark.parametrize("inner", [OPENMPI, HYDRA])
def test_mpirun_inside_a_step_wins_over_the_leaking_step(inner):
    launch = detect({**SRUN, "SLURM_PROCID": "0", **inner})
    assert (launch.rank, launch.size) == (3, 8)
    assert launch.batch_system == "Slurm"


@pytest.mark.parametrize("outer", [SRUN, ROWS["jsrun"]])
def test_flux_inside_another_batch_systems_job_is_flux(outer):
    launch = detect({**outer, **ROWS["flux"]})
    assert launch.row is not None
    assert (launch.row.name, launch.rank, launch.size) == ("flux", 3, 8)
    assert launch.batch_system in ("Slurm", "LSF")


def test_torchrun_inside_a_step_is_torchrun():
    for outer in (SRUN, ROWS["jsrun"], ROWS["flux"]):
        assert detect({**outer, **ROWS["torchrun"]}).title == "torchrun"


@pytest.mark.parametrize(
    ("environ", "system", "job"),
    [
        ({"SLURM_JOB_ID": "1"}, "Slurm", "1"),
        ({"PBS_JOBID": "2.host"}, "PBS", "2.host"),
        ({"LSB_JOBID": "3"}, "LSF", "3"),
        ({"FLUX_JOB_ID": "ƒ4"}, "Flux", "ƒ4"),
        ({"JOB_ID": "5", "PE_HOSTFILE": "/x"}, "Grid Engine", "5"),
        ({"JOB_ID": "5"}, None, None),
    ],
)
def test_batch_systems(environ, system, job):
    launch = detect(environ)
    assert (launch.batch_system, launch.job_id) == (system, job)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2,1", [2, 1]), ("4(x2)", [4, 4]), ("2(x3),1", [2, 2, 2, 1])],
)
def test_slurms_lists_of_tasks(text, counts):
    assert parse_task_counts(text) == counts


@given(st.lists(st.integers(1, 128), min_size=1, max_size=40))
def test_slurms_lists_round_trip(counts):
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(str(c) if n == 1 else f"{c}(x{n})" for c, n in runs)
    assert parse_task_counts(text) == counts


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({**HYDRA, "PMI_RANK": "three"}, "PMI_RANK='three'"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "many"}, "'many'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({"OMP_NUM_THREADS": "zero"}, "OMP_NUM_THREADS='zero'"),
    ],
)
def test_broken_variables_are_named(environ, word):
    with pytest.raises(LaunchError, match=word):
        detect(environ)


def test_a_node_is_named_by_its_address_on_the_fast_network():
    assert detect({}).network_name("jwb0001.juwels") == "jwb0001.juwels"
    fast = detect({"HPCTRAIN_HOST_SUFFIX": "i"})
    assert fast.network_name("jwb0001.juwels") == fast.network_name("jwb0001") == "jwb0001i"


def test_threads_are_the_first_of_openmps_levels():
    assert detect({"OMP_NUM_THREADS": "4,2"}).num_threads == 4
    assert detect({}).num_threads is None


def mpi(family, **more):
    return MpiVersion(family=family, version="5.0", **more)


def mismatch(environ, *, rank, size, family, offered=(), **more):
    return explain_mismatch(
        detect(environ),
        rank=rank,
        size=size,
        mpi=mpi(family, **more),
        script="train.py",
        offered=offered,
    )


def test_agreement_is_silent():
    assert mismatch(OPENMPI, rank=3, size=8, family="openmpi") is None
    assert mismatch({}, rank=5, size=9, family="openmpi") is None


def test_silent_jobs_of_one_under_srun_name_the_plugin():
    text = mismatch(SRUN, rank=0, size=1, family="mpich")
    assert "8 separate jobs" in text
    assert "srun --mpi=pmi2" in text
    assert "srun --mpi=list" in text
    assert "--mpi=pmix" in mismatch(SRUN, rank=0, size=1, family="openmpi")


def test_srun_is_advised_by_what_slurm_and_the_mpi_both_have():
    def advice(offered, configure=""):
        return mismatch(
            SRUN, rank=0, size=1, family="mpich", configure=configure, offered=offered.split()
        )

    usual = "none pmi2 pmix pmix_v4"
    assert "`srun --mpi=pmi2 ...`, which this Slurm and MPICH 5.0 both have" in advice(usual)
    built = "--with-device=ch4:ofi --with-pmix=/opt/pmix"
    assert "srun --mpi=pmix ..." in advice(usual, built)
    assert "srun --mpi=pmix_v4 ..." in advice("none pmi2 pmix_v4", built)
    assert "--with-pmix" not in advice("", built)
    assert "srun --mpi=pmix ..." in advice("", built)
    assert "srun --mpi=pmi2 ..." in advice(usual, "--with-pmix=no")
    only = advice("none pmix")
    assert "this Slurm has only none, pmix" in only
    assert "hpctrain run" in only


def test_an_mpich_tells_what_it_was_built_with():
    text = (
        "MPICH Version:      5.0.2\nMPICH Device:       ch4:ofi\n"
        "MPICH configure:    --with-device=ch4:ofi --with-pmix=/usr\nMPICH CC:           cc\n"
    )
    assert identify(text).configure == "--with-device=ch4:ofi --with-pmix=/usr"
    assert identify(text).srun_plugins == ("pmix",)
    assert identify(text.replace(" --with-pmix=/usr", "")).srun_plugins == ("pmi2",)
    assert identify(text.replace("/usr", "/usr --with-pmilib=mpich")).srun_plugins == (
        "pmix",
        "pmi2",
    )


def test_a_foreign_mpirun_is_named():
    text = mismatch(OPENMPI, rank=0, size=1, family="mpich")
    assert "belongs to a different MPI" in text
    assert "hpctrain run -n 8 train.py" in text
    assert "belongs to a different MPI" in mismatch(HYDRA, rank=0, size=1, family="openmpi")


def test_a_leaking_rank_is_named():
    text = mismatch({**SRUN, "SLURM_PROCID": "0"}, rank=3, size=8, family="openmpi")
    assert "numbered differently" in text


def test_trouble_in_mpi_init_is_foreseen():
    assert "srun --mpi=pmix" in foresee_trouble(detect(SRUN), mpi("openmpi"))
    assert foresee_trouble(detect({**SRUN, "PMIX_NAMESPACE": "x"}), mpi("openmpi")) is None
    assert foresee_trouble(detect({**SRUN, "PMI_FD": "4"}), mpi("mpich")) is None
    assert foresee_trouble(detect(OPENMPI), mpi("openmpi")) is None
    assert "belongs to a different MPI" in foresee_trouble(detect(OPENMPI), mpi("mpich"))
    assert foresee_trouble(detect(HYDRA), mpi("intel")) is None
    assert foresee_trouble(detect(SRUN), mpi("cray")) is None


def test_own_variables_are_handed_on_and_empty_ones_are_not():
    launch = detect({"HPCTRAIN_BENCH": "x", "HPCTRAIN_CHAOS": "", "PATH": "/bin"})
    assert launch.settings == {"HPCTRAIN_BENCH": "x"}


def test_running_ranks_read_the_environment_in_one_place():
    package = Path(hpctrain.__file__).parent
    starting = {"bench", "chaos", "cli", "doctor", "install", "launch", "submit"}
    # These set a variable around a call and put the old value back.
    setting = {"engines/horovod.py", "data/workers.py"}
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in starting
        and re.search(r"os\.(environ|getenv)\b", path.read_text())
    }
    assert readers - setting == {"world/launcher.py"}
