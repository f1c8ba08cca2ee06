"""Runs that outlive their jobs, on a real Slurm: stopped in five ways, and nothing is lost.

Each job is a training that is stopped once; the ranks write down which samples they trained on.
Looked at afterwards: the last run of each step is what the final weights come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.cluster.slurm import Slurm
from mpi_tests.full import slow
from mpi_tests.launch.commands import HPCTRAIN
from mpi_tests.launch.desk import LIMIT_S, Desk

SAMPLES, BATCH, EPOCHS = 64, 8, 8
STEPS = SAMPLES // BATCH * EPOCHS
NAP_S = 1.5
TRAIN = f"""
import os, sys, time
from pathlib import Path
import torch
import hpctrain as hpc

folder, lead_s = Path(sys.argv[1]), float(sys.argv[2])
with hpc.init(seed=1) as world:
    x = torch.randn({SAMPLES}, 4, generator=torch.Generator().manual_seed(1))
    loader = hpc.Loader(world, (torch.arange({SAMPLES}), x), global_batch={BATCH})
    model = torch.nn.Linear(4, 1)
    replica = hpc.distribute(world, model, torch.optim.AdamW(model.parameters(), 0.01))
    saver = hpc.Saver(world, folder / "checkpoints", replica, loader, every_steps=4, lead_s=lead_s)
    seen = open(folder / f"seen-{{world.rank}}", "a")
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    first = saver.restore() is None
    for ids, inputs in saver.resume(num_epochs={EPOCHS}):
        loss = (replica(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        replica.backward(loss, num_samples=len(inputs))
        replica.step()
        numbers = " ".join(map(str, ids.tolist()))
        seen.write(f"{{time.time()}} {{saver.step}} {{loader.epoch}} {{numbers}}\\n")
        seen.flush()
        if saver.step == 6 and world.rank == 0:
            print(f"under way {{restart}}", flush=True)
        if first and saver.step >= 6:
            time.sleep({NAP_S})  # until somebody stops it
    if world.rank == 0:
        print(f"finished at step {{saver.step}}: {{model.weight.sum().item():.9f}}", flush=True)
"""
# The same for `hpctrain train`: what a file names.
PARTS = f"""
import os, time
import torch

def model():
    return torch.nn.Linear(4, 1)

def data():
    x = torch.randn({SAMPLES}, 4, generator=torch.Generator().manual_seed(1))
    return torch.arange({SAMPLES}), x

def step(trainer, batch):
    ids, inputs = batch
    loss = (trainer.replica(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    trainer.replica.backward(loss, num_samples=trainer.loader.num_samples)
    trainer.update("model")
    done, rank = trainer.progress.step, trainer.world.rank
    with open(f"signal/seen-{{rank}}", "a") as seen:
        numbers = " ".join(map(str, ids.tolist()))
        seen.write(f"{{time.time()}} {{done}} {{trainer.loader.epoch}} {{numbers}}\\n")
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    if done == 6 and rank == 0:
        print("under way", restart, flush=True)
    if done >= 6 and restart == "0":
        time.sleep({NAP_S})  # until somebody stops it
    return loss.detach()
"""
FILE = f"""
model.build = "parts:model"
data.build = "parts:data"
train = {{ global_batch = {BATCH}, epochs = {EPOCHS}, step = "parts:step", seed = 1 }}
optimizer.lr = 0.01
checkpoint.every_steps = 4
logging.directory = "signal"
"""


@pytest.fixture(scope="module")
def desk(slurm_of_session: Slurm) -> Iterator[Desk]:
    folder = slurm_of_session.directory / "resuming"
    folder.mkdir()
    for name, text in {"train.py": TRAIN, "parts.py": PARTS, "file.toml": FILE}.items():
        (folder / name).write_text(text)
    yield Desk(slurm_of_session, folder)
    slurm_of_session.clear()


def words_for(name: str, *, template: str, lead_s: float, time: str) -> list[str]:
    """One job on one node of two ranks, which fill it."""
    mpi = mpi_of_this_python()
    how = ["--mpi", mpi.srun_plugin]
    if template == "slurm-mpirun":
        how = ["--template", template, "--mpi", mpi.family]
        how += ["--env", "OMPI_ALLOW_RUN_AS_ROOT=1", "--env", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    size = ["--nodes", "1", "--ranks-per-node", "2", "--cpus-per-rank", "2"]
    again = ["--requeue", "3", "--time", time]
    script = ["run", "train.py", name, str(lead_s)]
    if name == "signal":
        script = ["train", "file.toml"]
    return ["--name", name, *how, *size, *again, "--", *HPCTRAIN, *script]


def submit(
    desk: Desk, name: str, *, template: str = "slurm-srun", lead_s: float = 1.0, time: str = "10m"
) -> str:
    (desk.folder / name).mkdir(exist_ok=True)
    (job,) = desk.submit(*words_for(name, template=template, lead_s=lead_s, time=time))
    return job


@pytest.fixture(scope="module")
def jobs(desk: Desk) -> dict[str, str]:
    """Those that run side by side; they fill the cluster."""
    return {
        # Half a minute before the end of its time a training leaves; no signal is sent.
        "walltime": submit(desk, "walltime", lead_s=30.0, time="1m"),
        "signal": submit(desk, "signal"),
        "node": submit(desk, "node", template="slurm-mpirun"),
    }


def lineage(folder: Path) -> list[tuple[int, int, list[int]]]:
    """Step, epoch and samples of all ranks, of the last run of each step."""
    runs: dict[int, dict[int, tuple[float, int, list[int]]]] = {}
    for rank in range(2):
        for line in (folder / f"seen-{rank}").read_text().splitlines():
            when, step, epoch, *ids = line.split()
            runs.setdefault(int(step), {})[rank] = (float(when), int(epoch), [*map(int, ids)])
    return [
        (step, ranks[0][1], sorted(ranks[0][2] + ranks[1][2]))
        for step, ranks in sorted(runs.items())
    ]


def check_whole(desk: Desk, name: str) -> None:
    steps = lineage(desk.folder / name)
    assert [step for step, _, _ in steps] == list(range(STEPS))
    for epoch in range(EPOCHS):
        ids = sorted(i for _, at, part in steps for i in part if at == epoch)
        assert ids == list(range(SAMPLES)), (name, epoch)


def finished(desk: Desk, name: str, job: str, last: str = f"finished at step {STEPS}") -> str:
    """The log of a job that was run again and came to its end; the weights are those of all."""
    desk.wait_for(job, last, 1)
    (row,) = desk.ended(job)
    log = desk.log(job)
    assert (row["state"], row["exit_code"]) == ("COMPLETED", 0), log
    assert row["restarts"] >= 1, log
    assert "resuming from step" in log
    check_whole(desk, name)
    return log


def test_a_training_from_a_file_is_signalled_saved_requeued_and_resumed(
    desk: Desk, jobs: dict[str, str]
) -> None:
    desk.wait_for(jobs["signal"], "under way 0", 1)
    slurm = desk.slurm
    slurm.run(["scancel", "--batch", "--signal=USR2", jobs["signal"]], timeout_s=LIMIT_S)
    log = finished(desk, "signal", jobs["signal"], "restart 1 of at most")
    assert "got SIGUSR2; saved step" in log, log
    assert "requeued for restart 1 of 3" in log
    summary = json.loads((desk.folder / "signal" / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["ranks"]) == ("finished", STEPS, 2)


def test_a_node_that_goes_down_costs_a_few_steps(desk: Desk, jobs: dict[str, str]) -> None:
    desk.wait_for(jobs["node"], "under way 0", 1)
    node = desk.slurm.job(jobs["node"])["NodeList"]
    desk.slurm.power_off(node)
    try:
        finished(desk, "node", jobs["node"])
    finally:
        desk.slurm.power_on(node)


def test_a_cancelled_job_has_saved_and_can_be_submitted_again(desk: Desk) -> None:
    job = submit(desk, "cancel")
    desk.wait_for(job, "under way 0", 1)
    assert "cancelled" in desk.hpctrain("job", "cancel", job)[1]
    row, log = desk.ended(job)[0], desk.log(job)
    assert (row["state"], row["restarts"]) == ("CANCELLED", 0), log
    assert "got SIGTERM; saved step" in log
    again = submit(desk, "cancel")
    desk.wait_for(again, f"finished at step {STEPS}", 1)
    assert desk.ended(again)[0]["state"] == "COMPLETED"
    assert "resuming from step" in desk.log(again)
    check_whole(desk, "cancel")


@slow
def test_a_preempted_job_comes_back(desk: Desk) -> None:
    job = submit(desk, "preempted")
    desk.wait_for(job, "under way 0", 1)
    high = ["--mpi", "none", "--nodes", "3", "--ranks-per-node", "4", "--cpus-per-rank", "1"]
    words = ["--name", "high", "--partition", "high", *high, "--", "sleep", "1"]
    (first,) = desk.submit(*words)
    assert desk.ended(first)[0]["state"] == "COMPLETED"
    log = finished(desk, "preempted", job)
    assert "saved step" in log


def test_the_end_of_the_walltime_is_foreseen(desk: Desk, jobs: dict[str, str]) -> None:
    log = finished(desk, "walltime", jobs["walltime"])
    assert "the walltime is nearly over" in log
    assert "DUE TO TIME LIMIT" not in log
