"""Sweeps as batch jobs: one array a number of nodes, and rows for jobs that left nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.bench.jobs import collect_jobs, group_launches, submit_sweep
from hpctrain.bench.local import summarize_log
from hpctrain.bench.sweep import Folder, Measured, Sweep, SweepSettings, plan_points
from hpctrain.errors import ConfigError
from hpctrain.programs import Answer
from hpctrain.submit.ledger import Ledger
from mpi_tests.unit.jobs_kit import ask as make_request
from mpi_tests.unit.jobs_kit import site

SHOWN = "JobId={job} JobName=b JobState={state} ExitCode={code} RunTime=00:00:05"


def make_sweep():
    points = plan_points(
        mode="weak",
        ranks=[4, 8],
        engines=["auto"],
        num_cores=8,
        num_threads=2,
        ranks_per_node=4,
    )
    return Sweep(
        target="train.py",
        is_module=False,
        arguments=(),
        settings=SweepSettings(repeats=2),
        points=tuple(points),
    )


class Slurm:
    """A batch system that numbers what it is given and knows what it is told of jobs."""

    def __init__(self) -> None:
        self.scripts: list[str] = []
        self.states: dict[str, str] = {}

    def __call__(self, words, stdin=None):
        if words[0] == "sbatch":
            self.scripts.append(Path(words[-1]).read_text())
            return Answer(code=0, out=f"{100 + len(self.scripts)}\n", err="")
        if words[0] == "scontrol":
            rows = [
                SHOWN.format(job=job, state=state, code="1:0" if state == "FAILED" else "0:0")
                for job, state in self.states.items()
                if job.partition("_")[0] == words[-1]
            ]
            return Answer(code=0 if rows else 1, out="\n".join(rows), err="")
        return Answer(code=1, out="", err="")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Folder(tmp_path / "sweep")
    folder.begin(make_sweep())
    return folder


def submit(folder, slurm):
    return submit_sweep(
        folder,
        make_sweep(),
        make_request(),
        site(),
        ledger=Ledger(folder.path / "state"),
        ask=slurm,
        num_cores=8,
    )


def test_one_array_for_each_number_of_nodes_and_the_baselines_on_one_node(folder):
    sweep = make_sweep()
    batches = group_launches(folder, sweep, folder.pending(sweep))
    assert [(b.num_nodes, b.ranks_per_node, len(b.keys)) for b in batches] == [
        (1, 1, 4),
        (1, 4, 2),
        (2, 4, 2),
    ]
    slurm = Slurm()
    assert submit(folder, slurm) == ["101", "102", "103"]
    alone, _, two = slurm.scripts
    assert "#SBATCH --array=0-3%1" in alone
    assert "#SBATCH --nodes=2" in two
    key = batches[2].keys[1]
    assert f"bench measure {folder.path} {key}" in two
    # What is queued is not submitted again; what has ended and left nothing is.
    slurm.states = {"101": "PENDING", "102": "RUNNING", "103": "FAILED"}
    assert submit(folder, slurm) == ["104"]


def test_a_job_that_ended_without_a_measurement_is_a_row_that_says_why(folder):
    sweep, slurm = make_sweep(), Slurm()
    with pytest.raises(ConfigError, match="has no jobs"):
        collect_jobs(folder, sweep, say=print, ask=slurm)
    submit(folder, slurm)
    jobs = json.loads((folder.path / "jobs.json").read_text())
    done = jobs[1]["keys"][0]
    point, repeat = folder.launch_of(sweep, done)
    folder.write(done, Measured(point=point.name, repeat=repeat, wall_s=1.0))
    slurm.states = {"101": "PENDING", "102_0": "COMPLETED", "102_1": "FAILED", "103": "RUNNING"}
    log = Path(jobs[1]["entry"]["log_dir"])
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{jobs[1]['entry']['name']}-102_1.out").write_text("much\nRuntimeError: no nodes\n")
    told: list[str] = []
    assert collect_jobs(folder, sweep, say=told.append, ask=slurm) == 4 + 2
    assert told == [f"{point.name}, repeat 2: job 102 ended FAILED: RuntimeError: no nodes"]
    kept = folder.measured(sweep)[point.name, 1]
    assert kept.why.startswith("job 102 ended FAILED: RuntimeError: no nodes")
    assert (point.name, 1) in folder.pending(sweep)
    assert submit(folder, slurm) == ["104"]  # that launch alone, and it is waited for again
    slurm.states["104"] = "PENDING"
    assert (point.name, 1) not in folder.measured(sweep)
    assert collect_jobs(folder, sweep, say=told.append, ask=slurm) == 4 + 2 + 1
    assert len(told) == 1


def test_the_end_of_a_log_begins_with_its_error():
    text = "a\n\ntorch.OutOfMemoryError: too large\n" + "\n".join("bcdefghij")
    assert summarize_log(text).splitlines() == ["torch.OutOfMemoryError: too large", *"efghij"]
    assert summarize_log("\n \n") == "no output"
    assert summarize_log("\x1b[31mValueError: red\x1b[0m\r\n") == "ValueError: red\nValueError: red"
