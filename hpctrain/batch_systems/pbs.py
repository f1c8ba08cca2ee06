"""PBS Pro. Written from its documentation; only rendering and arguments are tested."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.batch_systems.job import JobState, PlannedJob, Template
from hpctrain.batch_systems.system import Ask, BatchSystem, given, unreadable
from hpctrain.batch_systems.units import format_clock, format_memory, read_clock
from hpctrain.errors import ConfigError
from hpctrain.programs import Answer

__all__ = ["Pbs"]

_STATES = {"Q": "PENDING", "H": "PENDING", "W": "PENDING", "T": "PENDING", "M": "PENDING"}
_STATES |= {"R": "RUNNING", "E": "RUNNING", "B": "RUNNING", "S": "SUSPENDED", "X": "COMPLETED"}
_ID = re.compile(r"\d+(\[\d*\])?(\.[\w.-]+)?")
_TASK = re.compile(r"(\w+)\[(\d+)\](\..*)?")
_RESOURCES = ("select", "walltime", "nodes", "ncpus", "ngpus", "mpiprocs", "mem")
_OVER = {35, 153}
"""With these codes `qstat` says that a job has finished, or that there is none of that id."""


class Pbs(BatchSystem):
    """PBS Pro, whose ranks are started by an MPI's own mpiexec."""

    name = "pbs"
    title = "PBS"
    tools = ("qsub",)

    job_variables = ("PBS_JOBID",)
    variable_prefixes = ("PBS_",)

    templates = (
        Template(
            name="pbs-mpiexec",
            batch="pbs",
            launcher="mpiexec",
            mpis=("pals", "mpich", "openmpi"),
        ),
    )
    directive_prefix = "#PBS"
    option = re.compile(r"(-[A-Za-z])(?: (.+))?")  # to PBS -qdebug is -q debug
    option_form = "-X value"
    managed = (
        *("-N", "-q", "-A", "-J", "-r", "-W", "-o", "-e", "-j", "-k", "-S", "-V", "-v", "-C"),
        *("-I", "-X", "-f", "-z"),
    )
    lacks = ("constraint", "qos", "reservation")
    resubmits = True

    def cluster(self, environ: Mapping[str, str]) -> str | None:
        """The server in `123.server`."""
        return environ[self.job_variables[0]].partition(".")[2] or None

    def directives(self, plan: PlannedJob) -> list[str]:
        """The options of `qsub`."""
        request, site = plan.request, plan.site
        chunk = [f"select={request.num_nodes}"]
        if not site.whole_nodes:
            chunk.append(f"ncpus={plan.ranks_per_node * (plan.cpus_per_rank or 1)}")
            chunk.append(f"mpiprocs={plan.ranks_per_node}")
            if plan.gpus_per_node:
                chunk.append(f"ngpus={plan.gpus_per_node}")
            if plan.memory_mib:
                chunk.append(f"mem={format_memory(plan.memory_mib, unit='mb', gib='gb')}")
        words = given(
            ("-N ", request.name),
            ("-l ", ":".join([*chunk, *site.select])),
            ("-l walltime=", format_clock(request.walltime_s)),
            ("-q ", plan.partition),
            ("-A ", plan.account),
        )
        # -k doe: the log is written where it belongs while the job runs
        words += ["-j oe", "-k doe", f"-o {request.log_dir}/", "-r n"]
        if request.array_size is not None and request.array_size > 1:  # PBS has no arrays of one
            limit = f"%{request.array_limit}" if request.array_limit else ""
            words.append(f"-J 0-{request.array_size - 1}{limit}")
        if request.after:
            words.append(f"-W depend=after{request.after_kind}:{':'.join(request.after)}")
        return words

    def manages(self, name: str, value: str | None) -> bool:
        """`-l` has a resource of its own, of which hpctrain writes some."""
        if name != "-l":
            return super().manages(name, value)
        resource = (value or "").partition("=")[0]
        return not resource or resource in _RESOURCES or "," in (value or "")

    def check(self, plan: PlannedJob) -> None:
        """Besides: nodes that are given out whole, and arrays, of which no task is restarted."""
        if plan.site.whole_nodes and plan.request.memory_mib:
            raise ConfigError(f"{plan.site.title} allocates whole nodes; leave out --memory")
        if plan.request.max_requeues and plan.is_array:
            raise ConfigError("a task of a PBS array cannot be resubmitted; leave out --requeue")
        super().check(plan)

    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """`qsub`."""
        return ["qsub", str(script)]

    def read_id(self, said: str) -> str:
        """The last line, `123.server` or `123[].server`."""
        lines = said.strip().splitlines()
        if not lines or not _ID.fullmatch(lines[-1]):
            raise unreadable("qsub", said)
        return lines[-1]

    def cancel_words(self, job: str) -> list[str]:
        """`qdel`."""
        return ["qdel", job]

    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """`-x`: finished jobs too, as long as the server keeps them."""
        answer = ask(["qstat", "-x", "-f", "-F", "json", job], None)
        if answer is None or answer.code != 0:
            return []
        try:
            jobs = json.loads(answer.out).get("Jobs", {})
        except ValueError:
            return []
        return [_state(name, facts) for name, facts in jobs.items()]

    def log_name(self, name: str, job: str, task: int | None) -> str:
        """As PBS names logs in a directory; a task's index goes between the brackets."""
        return f"{job if task is None else self.task_id(job, task)}.OU"

    def task_id(self, job: str, task: int) -> str:
        """`123[4].server`."""
        return job.replace("[]", f"[{task}]")

    def split_task(self, job: str) -> tuple[str, int | None]:
        """`123[4].server`."""
        match = _TASK.fullmatch(job)
        return (f"{match[1]}[]{match[3] or ''}", int(match[2])) if match else (job, None)

    def time_left_words(self, job: str, index: int | None) -> list[str]:
        """`qstat`, whose facts have the limit and the start."""
        return ["qstat", "-f", "-F", "json", job]

    def read_time_left(self, said: str, *, now_s: float) -> float | None:
        """The walltime less what has passed since the start."""
        try:
            jobs = json.loads(said)["Jobs"]
            (facts,) = jobs.values()
            limit_s = read_clock(str(facts["Resource_List"]["walltime"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if limit_s is None:
            return None
        used = facts.get("resources_used")
        used_s = read_clock(str(used.get("walltime"))) if isinstance(used, dict) else None
        try:  # what was used is counted now and then only; the start is exact
            began = time.mktime(time.strptime(str(facts.get("stime")), "%a %b %d %H:%M:%S %Y"))
        except (ValueError, OverflowError):
            began = now_s
        return max(limit_s - max(used_s or 0.0, now_s - began), 0.0)

    def activity_words(self, job: str) -> list[str]:
        """`qstat`, by its exit code."""
        return ["qstat", job]

    def read_activity(self, answer: Answer) -> str | None:
        """Finished and unknown jobs have separate codes."""
        return "over" if answer.code in _OVER else "alive" if answer.code == 0 else None


def _state(name: str, facts: dict[str, object]) -> JobState:
    code = facts.get("Exit_status")
    exit_code = code if isinstance(code, int) else None
    letter = str(facts.get("job_state", ""))
    state = _STATES.get(letter, "UNKNOWN")
    if letter == "F":
        state = "COMPLETED" if exit_code == 0 else "FAILED"
        if exit_code is None or exit_code == 271:  # ended by qdel, or never started
            state = "CANCELLED"
    used = facts.get("resources_used")
    elapsed = str(used.get("walltime", "")) if isinstance(used, dict) else ""
    return JobState(
        job=name,
        name=str(facts.get("Job_Name", "")),
        state=state,
        exit_code=exit_code,
        elapsed=elapsed,
        reason=str(facts.get("comment", "")),
    )
