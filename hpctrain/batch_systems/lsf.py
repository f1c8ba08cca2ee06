"""LSF. Written from its documentation; only rendering and arguments are tested."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hpctrain.batch_systems.job import JobState, PlannedJob, Template
from hpctrain.batch_systems.launchers import LauncherRow
from hpctrain.batch_systems.system import Ask, BatchSystem, given, unreadable
from hpctrain.errors import ConfigError

__all__ = ["Lsf", "format_minutes"]

_STATES = {"PEND": "PENDING", "WAIT": "PENDING", "PSUSP": "PENDING", "RUN": "RUNNING"}
_STATES |= {"USUSP": "SUSPENDED", "SSUSP": "SUSPENDED", "DONE": "COMPLETED", "EXIT": "FAILED"}
_TASK = re.compile(r"(\w+)\[(\d+)\]")


class Lsf(BatchSystem):
    """LSF, whose own launcher is jsrun."""

    name = "lsf"
    title = "LSF"
    tools = ("bsub",)

    job_variables = ("LSB_JOBID",)
    variable_prefixes = ("LSB_",)
    index_variable = "LSB_JOBINDEX"
    launcher = LauncherRow(
        name="jsrun",
        title="jsrun",
        present=("JSM_NAMESPACE_RANK",),
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    )

    templates = (Template(name="lsf-jsrun", batch="lsf", launcher="jsrun", mpis=()),)
    directive_prefix = "#BSUB"
    option = re.compile(r"(-[A-Za-z][A-Za-z_]*)(?: (.+))?")
    option_form = "-X value"
    managed = (
        *("-J", "-q", "-P", "-U", "-W", "-nnodes", "-o", "-e", "-oo", "-eo", "-wa", "-wt", "-w"),
        *("-r", "-Q", "-L", "-cwd", "-env", "-I", "-Ip", "-Is", "-ISp", "-ISs", "-IS", "-IX"),
        *("-K", "-n", "-Zs", "-outdir", "-pack", "-tty", "-Jd"),
    )
    lacks = ("constraint", "qos", "memory")
    first_index = 1
    reads_script_from_stdin = True  # given as an argument, its directives would be ignored
    requeues_by_code = True
    one_gpu_per_rank = True

    def directives(self, plan: PlannedJob) -> list[str]:
        """The options of `bsub`."""
        request = plan.request
        number, name = "%J", request.name
        if request.array_size is not None:
            limit = f"%{request.array_limit}" if request.array_limit else ""
            number, name = "%J_%I", f'"{name}[1-{request.array_size}]{limit}"'
        words = given(
            ("-J ", name),
            ("-nnodes ", request.num_nodes),
            ("-W ", format_minutes(request.walltime_s)),
            ("-q ", plan.partition),
            ("-P ", plan.account),
            ("-U ", request.reservation),
            ("-o ", f"{request.log_dir}/{request.name}-{number}.out"),
        )
        if request.after:
            condition = {"ok": "done", "any": "ended"}[request.after_kind]
            words.append(f'-w "{" && ".join(f"{condition}({job})" for job in request.after)}"')
        if request.max_requeues:
            words.append(f'-Q "{" ".join(map(str, plan.restart_codes))}"')
        if request.signal_lead_s is not None:
            words.append(f"-wa {request.signal} -wt {_minutes(request.signal_lead_s)}")
        return words

    def rank_words(self, plan: PlannedJob) -> list[str]:
        """`jsrun`, one resource set per rank: its core block and its GPU stay together."""
        words = ["jsrun", "-n", str(plan.num_ranks), "-r", str(plan.ranks_per_node), "-a", "1"]
        words += ["-g", "1" if plan.gpus_per_node else "0"]
        cores = plan.cpus_per_rank or 1
        return [*words, "-c", str(cores), "-b", f"packed:{cores}"]

    def node_words(self, plan: PlannedJob) -> list[str]:
        """One resource set per node."""
        return ["jsrun", "-n", str(plan.request.num_nodes), "-r", "1", "-a", "1", "-c", "1"]

    def check(self, plan: PlannedJob) -> None:
        """Besides: a signal's lead is counted in whole minutes."""
        super().check(plan)
        request = plan.request
        lead_s = request.signal_lead_s
        if lead_s and _minutes(lead_s) >= _minutes(request.walltime_s):
            raise ConfigError(
                f"LSF counts in minutes, in which a signal {lead_s} s before the end of "
                f"{request.walltime_s} s comes at the start; shorten the lead"
            )

    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """`bsub`, with the script on standard input."""
        return ["bsub"]

    def read_id(self, said: str) -> str:
        """`Job <123> is submitted to queue <batch>.`."""
        match = re.search(r"Job <(\d+)> is submitted", said)
        if match is None:
            raise unreadable("bsub", said)
        return match.group(1)

    def cancel_words(self, job: str) -> list[str]:
        """`bkill`."""
        return ["bkill", job]

    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """`-a`: finished jobs too, as long as LSF keeps them."""
        columns = "jobid jobindex stat exit_code run_time job_name pend_reason"
        answer = ask(["bjobs", "-a", "-json", "-o", columns, job], None)
        if answer is None or answer.code != 0:
            return []
        try:
            records = json.loads(answer.out).get("RECORDS", [])
        except ValueError:
            return []
        return [_state(record) for record in records if "STAT" in record]

    def log_name(self, name: str, job: str, task: int | None) -> str:
        """As in the directive `-o`; LSF counts tasks from 1."""
        return (
            f"{name}-{job}.out" if task is None else f"{name}-{job}_{task + self.first_index}.out"
        )

    def task_id(self, job: str, task: int) -> str:
        """`123[4]`, from 1."""
        return f"{job}[{task + self.first_index}]"

    def split_task(self, job: str) -> tuple[str, int | None]:
        """`123[4]`."""
        match = _TASK.fullmatch(job)
        return (match[1], int(match[2])) if match else (job, None)

    def time_left_words(self, job: str, index: int | None) -> list[str]:
        """`bjobs`, of the task where there is an array."""
        task = job if index is None else f"{job}[{index}]"
        return ["bjobs", "-noheader", "-o", "time_left", task]

    def read_time_left(self, said: str, *, now_s: float) -> float | None:
        """`1:05 L`: hours and minutes."""
        match = re.match(r"\s*(\d+):(\d+)", said, re.ASCII)
        return None if match is None else 3600.0 * int(match.group(1)) + 60.0 * int(match.group(2))


def _minutes(seconds: int) -> int:
    return -(-seconds // 60)


def format_minutes(seconds: int) -> str:
    """`HH:MM`, rounded up: the one form of a walltime."""
    minutes = _minutes(seconds)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _state(record: dict[str, str]) -> JobState:
    index = record.get("JOBINDEX", "0")
    state = _STATES.get(record["STAT"], "UNKNOWN")
    code = record.get("EXIT_CODE", "")
    default = 0 if state == "COMPLETED" else None
    return JobState(
        job=record["JOBID"] if index in ("", "0") else f"{record['JOBID']}[{index}]",
        name=record.get("JOB_NAME", ""),
        state=state,
        exit_code=int(code) if code.isdecimal() else default,
        elapsed=record.get("RUN_TIME", ""),
        reason=record.get("PEND_REASON", ""),
    )
