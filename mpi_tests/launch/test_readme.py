"""Every command in the README is run, and its links and its script hold."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.launch.commands import ROOT, clean_environment, run

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
# Bare mpirun, as a user types it: Open MPI refuses root and more ranks than cores unless told.
AS_A_USER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> Path:
    (script,) = [text for kind, text in BLOCKS if kind == "python"]
    path = tmp_path_factory.mktemp("readme") / "train.py"
    path.write_text(script)
    return path


def tools() -> dict[str, str]:
    """PATH as the README assumes it: this environment's tools and its MPI's launcher first."""
    path = clean_environment()["PATH"]
    mpirun = str(Path(mpi_of_this_python().mpirun).parent)
    return {**AS_A_USER, "PATH": os.pathsep.join([str(Path(sys.executable).parent), mpirun, path])}


def trained(text: str, num_ranks: int) -> bool:
    found = re.search(rf"loss ([\d.]+) on {num_ranks} ranks", text)
    return found is not None and float(found.group(1)) < 1e-3


def test_make_demo_trains_digits_with_horovod_on_two_ranks():
    dry = run("make", "-n", "--no-print-directory", "demo")
    command = dry.out.splitlines()[-1]
    assert command.endswith("hpctrain run -n 2 examples/digits.py"), dry.out
    words = shlex.split(command.partition("bin/")[2])
    done = run(sys.executable, "-m", *words, timeout_s=120)
    assert done.code == 0, done.text
    accuracy = re.findall(r"([\d.]+)%", done.out)
    assert float(accuracy[-1]) >= 95.0
    assert "2 ranks on 1 node" in done.out
    assert re.search(r"engine +" + ("horovod" if _has_horovod() else "mpi"), done.out), done.out


def _has_horovod() -> bool:
    return run(sys.executable, "-c", "import horovod.torch").code == 0


@pytest.mark.parametrize(
    ("line", "num_ranks"),
    [
        ("hpctrain run -n 4 train.py", 4),
        ("mpirun -n 4 python train.py", 4),
        ("hpctrain run -n 2 --log-dir logs --quiet train.py", 2),
    ],
)
def test_starting_the_script(train, line, num_ranks):
    assert line in COMMANDS
    done = run(*shlex.split(line), cwd=train.parent, env=tools(), timeout_s=120)
    assert done.code == 0, done.text
    assert trained(done.out, num_ranks), done.text


def test_starting_the_script_on_two_hosts(train, nodes):
    line = "hpctrain run --hosts node1:2,node2:2 train.py"
    assert line in COMMANDS
    family = mpi_of_this_python().family
    env = {**tools(), **nodes.environment(family), "PYTHONPATH": str(ROOT)}
    done = nodes.run("node1", shlex.split(line), cwd=train.parent, timeout_s=120, env=env)
    assert trained(done.stdout, 4), done.stdout + done.stderr


@pytest.mark.parametrize(
    "line", ["srun --mpi=pmix -n 4 python train.py", "srun --mpi=pmix -n 4 hpctrain run train.py"]
)
def test_starting_the_script_with_srun(train, slurm, line):
    assert line in COMMANDS
    (slurm.directory / "train.py").write_text(train.read_text())
    # Two ranks show what four do; the lines above have four.
    line = line.replace("pmix", mpi_of_this_python().srun_plugin).replace("-n 4", "-n 2")
    env = {**tools(), "PYTHONPATH": str(ROOT)}
    done = slurm.run(shlex.split(line), cwd=slurm.directory, timeout_s=120, env=env)
    assert trained(done.stdout, 2), done.stdout + done.stderr


def test_a_job_from_submission_to_its_log(slurm):
    # Training under both templates is in test_jobs_slurm.py.
    submit = (
        "hpctrain job submit --site slurm --mpi pmix --time 10m --nodes 2 --ranks-per-node 2"
        " -- python train.py"
    )
    assert submit in COMMANDS
    folder = slurm.directory / "readme"
    folder.mkdir()
    # One piece, as ranks that share a log must write it (hpctrain.init would see to it).
    write = "import os\nprint('rank ' + os.environ['SLURM_PROCID'] + '\\n', end='')\n"
    (folder / "train.py").write_text(write)
    env = {**tools(), "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder)}
    for line in (submit.replace("pmix", mpi_of_this_python().srun_plugin), "hpctrain job logs -f"):
        done = slurm.run(shlex.split(line), cwd=folder, timeout_s=120, env=env)
    assert sorted(re.findall(r"^rank (\d)$", done.stdout, re.MULTILINE)) == list("0123"), (
        done.stdout
    )


def test_linting_an_example():
    line = "hpctrain job lint jobs/examples/lsf.sh"
    assert line in COMMANDS
    done = run(*shlex.split(line), env=tools())
    assert (done.code, "J09" in done.out) == (1, True), done.text  # there is no folder logs here


def test_a_training_from_a_file(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line, told in (
        ("hpctrain train examples/train/digits_mlp.toml -n 2", "finished after 230 steps"),
        (
            "hpctrain train examples/train/digits_mlp.toml -n 64 --ranks-per-node 8 --dry-run",
            "64 on 8 nodes",
        ),
        ("hpctrain watch runs/digits_mlp", "finished: epoch 10, step 230/230"),
        ("hpctrain config explain optimizer.lr", "must be given"),
    ):
        assert line in COMMANDS
        done = run(*shlex.split(line), cwd=tmp_path, env=tools(), timeout_s=120)
        assert (done.code, told in done.out) == (0, True), done.text


def test_a_run_that_is_saved(tmp_path):
    page = (ROOT / "docs" / "saving.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "saved.py").write_text(script)
    done = run("hpctrain", "run", "-n", "2", "saved.py", cwd=tmp_path, env=tools(), timeout_s=120)
    assert done.code == 0, done.text
    for line, told in (
        ("hpctrain checkpoint list run/checkpoints", "40"),  # eight steps an epoch, five epochs
        ("hpctrain checkpoint verify run/checkpoints", "2 checkpoints, 0 damaged"),
    ):
        assert line in COMMANDS
        done = run(*shlex.split(line), cwd=tmp_path, env=tools(), timeout_s=60)
        assert (done.code, told in done.out) == (0, True), done.text


def test_the_doctor_lines():
    lines = ["hpctrain doctor", "hpctrain doctor --json", "hpctrain horovod check"]
    assert set(lines) <= set(COMMANDS)
    plain = run(*shlex.split(lines[0]), env=tools(), timeout_s=120)
    assert plain.code in (0, 1), plain.text
    assert "MPI" in plain.out
    # The second is run and read in test_doctor.py.
    if _has_horovod():
        check = run(*shlex.split(lines[2]), env=tools(), timeout_s=120)
        assert check.code == 0, check.text
        assert "linked to: " in check.out
        assert f"torch {torch.__version__}" in check.out


def test_the_doctor_of_all_nodes():
    line = "mpirun -n 4 hpctrain doctor --all-nodes"
    assert line in COMMANDS
    # Four ranks that measure two cores take three times as long as two.
    done = run(*shlex.split(line.replace("-n 4", "-n 2")), env=tools(), timeout_s=180)
    assert done.code in (0, 1), done.text
    assert os.uname().nodename in done.out


def test_no_command_is_left_out():
    source = Path(__file__).read_text()
    joined = source.replace('"\n        "', "")  # lines that are too long for one
    left = [line for line in COMMANDS if f'"{line}"' not in joined and not line.startswith("make ")]
    assert left == []
    for line in COMMANDS:
        if line.startswith("make "):
            done = subprocess.run(
                [*shlex.split(line), "-n"], cwd=ROOT, capture_output=True, timeout=30
            )
            assert done.returncode == 0, line


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert not target.startswith("http"), "the docs stand alone"
        assert ((ROOT / page).parent / target).exists(), target
