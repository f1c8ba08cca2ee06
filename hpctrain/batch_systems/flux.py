"""Flux. Written from its documentation; only rendering and arguments are tested."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.batch_systems.job import JobState, PlannedJob, Template
from hpctrain.batch_systems.launchers import LauncherRow
from hpctrain.batch_systems.system import Ask, BatchSystem, given, unreadable

__all__ = ["Flux", "format_duration"]

_STATES = {"CANCELED": "CANCELLED", "RUN": "RUNNING", "CLEANUP": "RUNNING"}
_STATES |= dict.fromkeys(("NEW", "DEPEND", "PRIORITY", "SCHED"), "PENDING")
_ID = re.compile(r"[A-Za-z0-9ƒ][A-Za-z0-9_.\[\]-]{0,127}")


class Flux(BatchSystem):
    """Flux, whose batch jobs know no arrays: each task is a job that gets its index."""

    name = "flux"
    title = "Flux"
    tools = ("flux",)

    job_variables = ("FLUX_JOB_ID",)
    variable_prefixes = ("FLUX_",)
    launcher = LauncherRow(
        name="flux",
        title="flux run",
        present=("FLUX_TASK_RANK",),
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
    )

    templates = (Template(name="flux-run", batch="flux", launcher="flux", mpis=()),)
    directive_prefix = "#flux:"
    managed = (
        *("job-name", "nodes", "nslots", "cores-per-slot", "gpus-per-slot", "time-limit", "queue"),
        *("bank", "requires", "output", "error", "signal", "dependency", "exclusive", "wrap"),
        *("env", "cwd", "dry-run"),
    )
    lacks = ("qos", "reservation", "memory", "array_limit")
    has_arrays = False
    resubmits = True

    def directives(self, plan: PlannedJob) -> list[str]:
        """`#flux:` takes the options of `flux batch`."""
        request = plan.request
        words = given(
            ("--job-name=", request.name),
            ("--nodes=", request.num_nodes),
            ("--time-limit=", format_duration(request.walltime_s)),
            ("--queue=", plan.partition),
            ("--bank=", plan.account),
            ("--requires=", plan.constraint),
            ("--output=", f"{request.log_dir}/{request.name}-{{{{id}}}}.out"),
        )
        words.append("--exclusive")
        words += [f"--dependency=after{request.after_kind}:{job}" for job in request.after]
        if request.signal_lead_s is not None:
            words.append(f"--signal={request.signal}@{format_duration(request.signal_lead_s)}")
        return words

    def rank_words(self, plan: PlannedJob) -> list[str]:
        """`flux run`."""
        words = ["flux", "run", "-N", str(plan.request.num_nodes), "-n", str(plan.num_ranks)]
        if plan.cpus_per_rank:
            words += ["-c", str(plan.cpus_per_rank)]
        if plan.gpus_per_node and plan.gpus_per_node == plan.ranks_per_node:
            words += ["-g", "1"]
        return words

    def node_words(self, plan: PlannedJob) -> list[str]:
        """One task per node."""
        nodes = str(plan.request.num_nodes)
        return ["flux", "run", "-N", nodes, "-n", nodes]

    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """`flux batch`."""
        own = [] if index is None else [f"--env=HPCTRAIN_ARRAY_INDEX={index}"]
        return ["flux", "batch", *own, str(script)]

    def read_id(self, said: str) -> str:
        """The last line."""
        lines = said.strip().splitlines()
        if not lines or not _ID.fullmatch(lines[-1]):
            raise unreadable("flux", said)
        return lines[-1]

    def cancel_words(self, job: str) -> list[str]:
        """`flux cancel`."""
        return ["flux", "cancel", job]

    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """`flux jobs` with columns of our own."""
        words = ["flux", "jobs", "--no-header", "--format={status}|{returncode}|{runtime!F}|{name}"]
        answer = ask([*words, job], None)
        if answer is None or answer.code != 0:
            return []
        found = []
        for line in answer.out.splitlines():
            status, code, elapsed, name = ([*line.split("|", 3), "", "", ""])[:4]
            found.append(
                JobState(
                    job=job,
                    name=name,
                    state=_STATES.get(status, status or "UNKNOWN"),
                    exit_code=int(code) if code.lstrip("-").isdecimal() else None,
                    elapsed=elapsed,
                )
            )
        return found

    def time_left_words(self, job: str, index: int | None) -> list[str]:
        """`flux job timeleft`, of the job around it."""
        return ["flux", "job", "timeleft"]

    def read_time_left(self, said: str, *, now_s: float) -> float | None:
        """Seconds, or `infinity`."""
        try:
            seconds = float(said.strip())
        except ValueError:
            return None
        return seconds if 0.0 <= seconds < float("inf") else None


def format_duration(count: int) -> str:
    """`9000s`: the one form of a duration that needs no thought."""
    return f"{count}s"
