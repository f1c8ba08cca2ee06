"""The command line and the templates against a real Slurm, from submission to the log.

All jobs are submitted at once and run side by side; the tests look at what became of them, first
at those that wait for something to be done to them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.cluster.slurm import Slurm
from mpi_tests.launch.commands import HPCTRAIN, run
from mpi_tests.launch.desk import LIMIT_S, Desk

TRAIN = """
from importlib.util import find_spec
import torch
import hpctrain as hpc

with hpc.init(seed=1) as world:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = "horovod" if find_spec("horovod") else "auto"
    replica = hpc.distribute(world, model, optimizer, engine=engine)
    for _ in range(40):
        x = torch.randn(16, 4)
        loss = (replica(x) - x.sum(1, keepdim=True)).square().mean()
        replica.backward(loss, num_samples=len(x))
        replica.step()
    if world.rank == 0:
        print("trained on", world.num_nodes, "nodes", world.size, "ranks", loss.item() < 0.1)
"""
CRASH = """
import time
import hpctrain as hpc

with hpc.init() as world:
    if world.rank == 1:
        raise RuntimeError("rank one had enough")
    time.sleep(60)
"""
# Ranks that share a log without hpctrain write a line in one piece: mpirun mixes the pieces.
SAY = """
import sys

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
"""
AGAIN = f"""{SAY}
import os
say("start", os.environ.get("SLURM_RESTART_COUNT", "0"))
sys.exit(75)
"""
WARNED = f"""{SAY}
import os, signal, time
got = []
for name in ("SIGUSR2", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(number))
if os.environ.get("SLURM_RESTART_COUNT", "0") == "1":
    say("restarted")
    sys.exit(0)
say("ready")
deadline = time.monotonic() + 60
while not got and time.monotonic() < deadline:
    time.sleep(0.05)
say("warned", len(got))
sys.exit(75)
"""
# Each node of the fixture has a /dev/shm of its own, and nothing else of its own.
SITE = 'inherits = "slurm"\ntitle = "the fixture"\nnode_local = "/dev/shm"\n'
STAGED = f"""{SAY}
import os, socket
stage = os.environ["HPCTRAIN_STAGE"]
say("on", socket.gethostname(), sys.prefix == stage + "/env", open(stage + "/data.txt").read())
say([name for name in os.listdir("/dev/shm") if name.startswith("hpctrain-")])
"""


@pytest.fixture(scope="module")
def desk(slurm_of_session: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = slurm_of_session.directory / "desk"
    folder.mkdir()
    files = {"train.py": TRAIN, "crash.py": CRASH, "again.py": AGAIN, "warned.py": WARNED}
    files |= {"fixture.toml": SITE, "staged.py": STAGED, "data.txt": "some data"}
    for name, text in files.items():
        (folder / name).write_text(text)
    made = Desk(slurm_of_session, folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    made.hpctrain("pack", "--prefix", "env")
    yield made
    slurm_of_session.clear()


@pytest.fixture(scope="module")
def jobs(desk: Desk) -> dict[str, list[str]]:
    """Everything, submitted; the slow ones first."""
    mpi = mpi_of_this_python()
    script = ["--", *HPCTRAIN, "run"]
    two = ["--nodes", "2", "--ranks-per-node", "2", "--cpus-per-rank", "1"]
    plain = ["--mpi", "none", "--cpus-per-rank", "1"]
    mpirun = ["--template", "slurm-mpirun", "--mpi", mpi.family, *two]
    as_root = ["--env", "OMPI_ALLOW_RUN_AS_ROOT=1", "--env", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    told = "lambda *_: (print('asked to end', flush=True), sys.exit(0))"
    waiting = f"import signal, sys, time; signal.signal(15, {told}); print('waits', flush=True); "
    waiting += "time.sleep(500)"
    five = (
        "import os, sys, time; sys.exit(5) if os.environ['SLURM_PROCID'] == '1' else time.sleep(60)"
    )
    index = "import os; print('task', os.environ['HPCTRAIN_ARRAY_INDEX'], 'end')"
    python = ["--", sys.executable]
    warning = ["--requeue", "1", "--signal-lead", "1m"]
    local = ["--stage", "data.txt", "--pack", "env.tar", "--prologue", "echo prologue here"]
    made = {
        "requeue": [*plain, "--requeue", "1", "--array", "2", *python, "again.py"],
        "warned-srun": [*plain, *two, *warning, *python, "warned.py"],
        "warned-mpirun": [*mpirun, *as_root, *warning, *python, "warned.py"],
        "srun": [*two, *script, "train.py"],  # --mpi is chosen for the MPI that is here
        "mpirun": [*mpirun, *as_root, *script, "train.py"],
        "cancel": [*plain, *python, "-c", waiting],
        "staged": [
            "--site",
            "./fixture.toml",
            *plain,
            "--nodes",
            "2",
            *local,
            "--",
            "python",
            "staged.py",
        ],
        "code": [*plain, "--ranks-per-node", "2", *python, "-c", five],
        "array": [*plain, "--array", "3", *python, "-c", index],
        "crash": ["--mpi", mpi.srun_plugin, "--ranks-per-node", "2", *script, "crash.py"],
        "wrong": ["--mpi", "none", "--ranks-per-node", "2", *script, "train.py"],
    }
    submitted = {name: desk.submit("--name", name, *words) for name, words in made.items()}
    chained = ["--chain", "2", "--after", submitted["array"][0]]
    words = [*plain, *chained, *python, "-c", "print('linked')"]
    submitted["chain"] = desk.submit("--name", "chain", *words)
    words = [
        "-c",
        "import json; json.dump({'loss': float({x})}, open('{run_dir}/result.json', 'w'))",
    ]
    grid = ["sweep", "submit", "--grid", "x=3,1,2", "--time", "5m", *plain, "--name", "sweep"]
    submitted["sweep"] = desk.hpctrain(*grid, *python, *words)[1].split()
    return submitted


def test_a_warning_reaches_the_ranks_and_the_job_is_requeued(
    desk: Desk, jobs: dict[str, list[str]]
) -> None:
    warned = jobs["warned-srun"] + jobs["warned-mpirun"]
    for job in warned:
        desk.wait_for(job, "ready", 4)
        # As the directive --signal would, which Slurm looks at only once a minute.
        desk.slurm.run(["scancel", "--batch", "--signal=USR2", job], timeout_s=LIMIT_S)
    for job in warned:
        desk.wait_for(job, "restarted", 4)
        (row,) = desk.ended(job)
        log = desk.log(job)
        assert (row["state"], row["exit_code"], row["restarts"]) == ("COMPLETED", 0, 1), log
        assert log.count("warned 1") == 4, log
        assert "hpctrain job: signal USR2 after" in log


def test_a_cancelled_job_ends(desk: Desk, jobs: dict[str, list[str]]) -> None:
    (job,) = jobs["cancel"]
    desk.wait_for(job, "\nwaits\n", 1)
    assert "cancelled" in desk.hpctrain("job", "cancel", job)[1]
    assert desk.ended(job)[0]["state"] == "CANCELLED"
    assert "\nasked to end\n" in desk.log(job), desk.log(job)


@pytest.mark.parametrize("template", ["srun", "mpirun"])
def test_two_nodes_of_two_ranks_train(
    desk: Desk, jobs: dict[str, list[str]], template: str
) -> None:
    (job,) = jobs[template]
    (row,) = desk.ended(job)
    log = desk.log(job)
    assert (row["state"], row["exit_code"]) == ("COMPLETED", 0), log
    assert "trained on 2 nodes 4 ranks True" in log
    assert "hpctrain job: 2 nodes, 4 ranks" in log


def test_following_a_log_ends_with_the_job(desk: Desk, jobs: dict[str, list[str]]) -> None:
    out = desk.hpctrain("job", "logs", "-f", jobs["srun"][0])[1]
    assert out == desk.log(jobs["srun"][0])
    assert out.rstrip().endswith("s")
    assert desk.log(jobs["srun"][0], "-n", "1") == out.splitlines(keepends=True)[-1]


def test_nodes_get_data_and_an_environment_of_their_own(
    desk: Desk, jobs: dict[str, list[str]]
) -> None:
    (job,) = jobs["staged"]
    (row,) = desk.ended(job)
    log = desk.log(job)
    assert row["state"] == "COMPLETED", log
    hosts = {line.split()[1] for line in log.splitlines() if line.startswith("on ")}
    assert len(hosts) == 2, log
    assert log.count(" True some data") == log.count("prologue here\n") == 2, log
    assert log.count(f"['hpctrain-{job}']") == 2, log
    for host in hosts:
        left = desk.slurm.nodes.run(host, ["ls", "/dev/shm"], timeout_s=LIMIT_S).stdout
        assert f"hpctrain-{job}" not in left


def test_the_code_of_the_rank_that_failed_is_the_jobs(
    desk: Desk, jobs: dict[str, list[str]]
) -> None:
    (row,) = desk.ended(jobs["code"][0])
    assert (row["state"], row["exit_code"]) == ("FAILED", 5), desk.log(jobs["code"][0])


def test_an_exception_fails_the_job_with_its_traceback(
    desk: Desk, jobs: dict[str, list[str]]
) -> None:
    (row,) = desk.ended(jobs["crash"][0])
    log = desk.log(jobs["crash"][0])
    assert (row["state"], row["exit_code"]) == ("FAILED", 1), log
    assert "Traceback" in log
    assert "RuntimeError: rank one had enough" in log


def test_the_wrong_mpi_gets_the_cure(desk: Desk, jobs: dict[str, list[str]]) -> None:
    (row,) = desk.ended(jobs["wrong"][0])
    log = desk.log(jobs["wrong"][0])
    assert row["state"] == "FAILED", log
    assert f"srun --mpi={mpi_of_this_python().srun_plugin}" in log
    assert "trained" not in log


def test_an_array_has_a_log_for_each_task(desk: Desk, jobs: dict[str, list[str]]) -> None:
    (job,) = jobs["array"]
    assert [row["state"] for row in desk.ended(job)] == ["COMPLETED"] * 3
    for task in range(3):
        assert f"task {task} end" in desk.log(job, "--task", str(task))
    assert desk.log(job).count("==> ") == 3


def test_a_chain_runs_in_order(desk: Desk, jobs: dict[str, list[str]]) -> None:
    first, second = jobs["chain"]
    assert [row["state"] for row in desk.ended(second)] == ["COMPLETED"]
    since = [desk.slurm.job(job)["StartTime"] for job in (first, second)]
    assert desk.slurm.job(first)["EndTime"] <= since[1]
    assert "linked" in desk.log(second)


def test_a_sweep_has_a_table(desk: Desk, jobs: dict[str, list[str]]) -> None:
    desk.ended(jobs["sweep"][0])
    rows = json.loads(desk.hpctrain("sweep", "table", "--json")[1])
    assert [(row["index"], row["x"], row["loss"]) for row in rows] == [
        (1, "1", 1.0),
        (2, "2", 2.0),
        (0, "3", 3.0),
    ]


def test_exit_code_75_is_requeued_once_and_no_more(desk: Desk, jobs: dict[str, list[str]]) -> None:
    """Each task of an array by itself: the last has the id of the whole array."""
    (job,) = jobs["requeue"]
    desk.wait_for(job, "hpctrain job: not run again", 2)  # between its runs it may look over
    rows = desk.ended(job)
    for task, row in enumerate(sorted(rows, key=lambda row: str(row["job"]))):
        log = desk.log(f"{job}_{task}")
        starts = [line for line in log.splitlines() if line.startswith("start")]
        assert starts == ["start 0", "start 1"], log
        assert (row["state"], row["exit_code"], row["restarts"]) == ("FAILED", 1, 1), log
    assert len(rows) == 2


def test_the_list_of_jobs_and_one_that_is_not_ours(desk: Desk, jobs: dict[str, list[str]]) -> None:
    out = desk.hpctrain("job", "status")[1]
    assert jobs["chain"][0] in out
    code, _, err = desk.hpctrain("job", "status", "999999", check=False)
    assert code == 1
    assert "has no record of job 999999" in err
