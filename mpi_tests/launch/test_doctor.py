"""`hpctrain doctor` for real: this machine, broken machines, and the nodes of a job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.cluster.nodes import Nodes
from mpi_tests.launch.commands import HPCTRAIN, ROOT, run

# Checks that must not be broken wherever these tests run; the others depend on the machine.
MUST_WORK = {"MPI and launcher", "mpi4py ABI", "two-rank allreduce", "MPI threads", "torch"}


def fake_launcher(folder: Path, body: str) -> Path:
    """A folder whose only mpirun is this script."""
    folder.mkdir()
    (folder / "mpirun").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "mpirun").chmod(0o755)
    return folder


def test_this_machine():
    done = run(*HPCTRAIN, "doctor", "--json")
    value = json.loads(done.out)
    found = {check["name"]: check for check in value["checks"]}
    broken = [name for name, check in found.items() if check["status"] == "broken"]
    assert not MUST_WORK & set(broken), done.text
    assert done.code == (1 if broken else 0)
    assert len(found["two-rank allreduce"]["details"]["ranks"]) == 2
    assert found["torch"]["details"]["compute_works"] is True
    for check in found.values():
        assert check["status"] == "ok" or check["cure"], check


def test_a_foreign_mpirun_alone_is_broken(tmp_path):
    """An interpreter whose MPI has no launcher anywhere, on a PATH with another MPI's."""
    if mpi_of_this_python().family != "mpich":
        pytest.skip("the foreign launcher here is one of Open MPI")
    library = _library_of_this_mpi()
    site = tmp_path / "site/deep/lib"
    site.mkdir(parents=True)
    shutil.copy(library, site)
    if (library.parent / "mpich").is_dir():  # what the wheel's library needs lies beside it
        (site / "mpich").symlink_to(library.parent / "mpich")
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True, timeout=60)
    foreign = fake_launcher(tmp_path / "foreign", "echo 'mpirun (Open MPI) 4.1.4'")
    done = run(
        env / "bin/python",
        *("-m", "hpctrain", "doctor"),
        env={
            "PATH": str(foreign),
            "PYTHONPATH": f"{ROOT}:{sysconfig.get_paths()['purelib']}",
            "MPI4PY_MPIABI": "mpich",
            "LD_LIBRARY_PATH": str(site),
        },
    )
    assert done.code == 1, done.text
    lines = [line for line in done.out.splitlines() if line.startswith("broken")]
    assert any("MPI and launcher" in line for line in lines), done.text
    assert "Open MPI 4.1.4" in done.out
    assert "fix:" in done.out


def _library_of_this_mpi() -> Path:
    code = "from hpctrain.install.mpi import loaded_mpi; print(loaded_mpi().library)"
    return Path(run(sys.executable, "-c", code).out.strip())


def test_a_launcher_that_hangs_is_broken_and_bounded(tmp_path):
    mpi = mpi_of_this_python()
    version = run(mpi.mpirun, "--version").text
    (tmp_path / "version").write_text(version)
    body = f'[ "$1" = --version ] && exec cat {tmp_path}/version\nsleep 300'
    hanging = fake_launcher(tmp_path / "hanging", body)
    env = {"PATH": f"{hanging}:{os.environ['PATH']}"}
    done = run(*HPCTRAIN, "doctor", "--json", "--time-limit", "8", env=env)
    found = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert done.code == 1
    assert found["two-rank allreduce"]["status"] == "broken"
    assert "hang" in found["two-rank allreduce"]["text"]
    assert "8 s" in found["two-rank allreduce"]["text"]
    assert found["two-rank allreduce"]["cure"]


def test_all_nodes_needs_a_launcher():
    done = run(*HPCTRAIN, "doctor", "--all-nodes")
    assert done.code == 2
    assert "mpirun -n N hpctrain doctor --all-nodes" in done.err


def test_one_machine_is_not_examined_by_many_ranks():
    done = run(*HPCTRAIN, "doctor", env={"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"})
    assert done.code == 2
    assert "add --all-nodes" in done.err


def test_time_limit_is_checked():
    done = run(*HPCTRAIN, "doctor", "--time-limit", "0")
    assert done.code == 2
    assert "--time-limit" in done.err


def test_all_nodes_on_one_node():
    mpi = mpi_of_this_python()
    here = mpi.command({"localhost": 2}, [*HPCTRAIN, "doctor", "--all-nodes", "--json"])
    done = run(*here)
    assert done.code == 0, done.text
    (node,) = json.loads(done.out)["nodes"]
    assert node["num_ranks"] == 2
    assert node["gflops"] > 0
    assert node["memory"] > 0
    assert json.loads(done.out)["outliers"] == []


@pytest.mark.alone
@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_slow_link_names_its_node(nodes: Nodes):
    nodes.limit_bandwidth("node2", "100mbit")
    mpi = mpi_of_this_python()
    command = [*HPCTRAIN, "doctor", "--all-nodes", "--json"]
    done = nodes.run(
        "node1",
        mpi.command(dict.fromkeys(nodes.hosts, 1), command),
        timeout_s=60,
        cwd=ROOT,
        env=nodes.environment(mpi.family),
        check=False,
    )
    value = json.loads(done.stdout[: done.stdout.rindex("}") + 1])
    slow = [o["hosts"] for o in value["outliers"] if o["quantity"] == "network"]
    assert slow == [["node2"]], done.stdout
    assert done.returncode == 1
    assert len(value["links"]) == 3
    assert {node["host"] for node in value["nodes"]} == set(nodes.hosts)
