"""The `--mpi` of srun where nobody gave one: by the MPI that is installed and what srun offers."""

from __future__ import annotations

import pytest

from hpctrain.errors import ConfigError, JobError
from hpctrain.install.mpi import LoadedMpi
from hpctrain.mpi_version import MpiVersion
from hpctrain.programs import Answer
from hpctrain.submit.mpi_choice import choose_srun_mpi
from hpctrain.submit.rendering import render
from mpi_tests.unit.jobs_kit import ask as make_request
from mpi_tests.unit.jobs_kit import site

OLD = "srun: MPI types are...\nsrun: none\nsrun: pmix_v4\nsrun: pmi2\n"
NEW = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions: pmix_v4\n"


def settle(request, *, family: str | None = "mpich", offered: str | None = NEW, where="slurm"):
    told: list[str] = []
    loaded = None
    if family is not None:
        version = MpiVersion(family=family, version="5.0")
        loaded = LoadedMpi(mpi=version, library="", text="", mpi4py="4", extension="MPI.so")
    answer = None if offered is None else Answer(code=0, out=offered, err="")
    asked = []

    def ask(words, stdin):
        asked.append(words)
        return answer

    made = choose_srun_mpi(
        request, site(where), say=told.append, ask=ask, probe=lambda python: loaded
    )
    return made, told, asked


@pytest.mark.parametrize("offered", [OLD, NEW])
@pytest.mark.parametrize(("family", "mpi"), [("mpich", "pmi2"), ("openmpi", "pmix")])
def test_srun_gets_what_the_installed_mpi_needs(family, mpi, offered):
    made, told, _ = settle(make_request(), family=family, offered=offered)
    assert f"--mpi={mpi}" in render(made, site())
    assert f"srun gets --mpi={mpi}, for " in told[0]


def test_an_mpi_that_srun_cannot_start_is_refused_before_the_queue():
    with pytest.raises(ConfigError, match="--template slurm-mpirun"):
        settle(make_request(), offered="MPI plugin types are...\n\tpmix\n\tnone\n")


@pytest.mark.parametrize(
    ("fields", "more", "why"),
    [
        ({}, {"offered": None}, "srun cannot be queried here"),
        ({}, {"offered": ""}, "srun cannot be queried here"),
        ({}, {"family": None}, "loads no MPI here"),
        ({"template": "slurm-apptainer", "image": "x.sif"}, {}, "the MPI in x.sif is unknown"),
    ],
)
def test_where_it_cannot_be_known_that_is_said(fields, more, why):
    made, told, _ = settle(make_request(**fields), **more)
    assert "--mpi=pmix" in render(made, site())
    assert why in told[0]
    assert "MPICH needs --mpi pmi2" in told[0]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"mpi": "pmix"}, "slurm"),
        ({"template": "slurm-mpirun"}, "slurm"),
        ({"account": "p"}, "perlmutter"),
        ({}, "pbs"),
        ({}, "flux"),
    ],
)
def test_what_was_given_stays(fields, where):
    request = make_request(**fields)
    made, told, asked = settle(request, where=where)
    assert (made, told, asked) == (request, [], [])


def test_an_srun_that_hangs_is_not_waited_for():
    def ask(words, stdin):
        raise JobError("srun did not answer within 60 s")

    told: list[str] = []
    request = make_request()
    assert choose_srun_mpi(request, site(), say=told.append, ask=ask) == request
    assert len(told) == 1
