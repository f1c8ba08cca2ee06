"""Slurm: sbatch, srun, scancel, scontrol and squeue, and sacct where there is accounting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.batch_systems.job import FINAL, JobState, JobUse, PlannedJob, Template
from hpctrain.batch_systems.launchers import LauncherRow
from hpctrain.batch_systems.system import Ask, BatchSystem, given, unreadable
from hpctrain.batch_systems.units import format_clock, format_memory, read_clock
from hpctrain.errors import ConfigError, JobError, LaunchError
from hpctrain.programs import Answer

__all__ = [
    "ACCOUNTING_FIELDS",
    "Slurm",
    "ask_plugins",
    "parse_plugins",
    "parse_task_counts",
    "read_accounting",
    "read_memory",
    "read_sacct",
    "read_scontrol",
]

_FIELDS = ("JobID", "JobName", "State", "ExitCode", "Elapsed")
ACCOUNTING_FIELDS = (
    *("JobID", "State", "Elapsed", "Timelimit", "AllocCPUS", "NNodes", "NTasks", "TotalCPU"),
    *("MaxRSS", "ReqMem", "AllocTRES", "TRESUsageInTot", "TRESUsageInAve", "TRESUsageInMax"),
)
_ID = re.compile(r"(\d+)(?:;[\w.-]+)?\s*")
_TASK = re.compile(r"(\w+?)_(\d+)")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)([nc]?)", re.ASCII)
_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_EXPEDITES = (25, 11)
_PLUGINS = ("pmix", "pmi2", "cray_shasta", "pspmix", "none")
_CONTAINER_ENGINE = "slurm-edf"


def parse_task_counts(text: str) -> list[int]:
    """Expand a list of tasks per node: `2(x3),1` becomes `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of counts like '4(x2),1'; "
                "unset it or start the step again"
            )
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


class Slurm(BatchSystem):
    """Slurm, whose own launcher is srun."""

    name = "slurm"
    title = "Slurm"
    tools = ("sbatch", "srun")

    job_variables = ("SLURM_JOB_ID",)
    variable_prefixes = ("SLURM_",)
    end_time_variable = "SLURM_JOB_END_TIME"  # set from 23.02 on
    launcher = LauncherRow(
        name="srun",
        title="srun",
        # The batch shell has SLURM_PROCID too; only a step has SLURM_STEP_ID.
        present=("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
        read_counts=parse_task_counts,
        node_id="SLURM_NODEID",
    )
    # Hydra starts its proxies by srun, which must not offer a second process manager.
    mpirun_variables = (("SLURM_MPI_TYPE", "none"),)

    templates = (
        Template(name="slurm-srun", batch="slurm", launcher="srun", mpis=_PLUGINS),
        Template(name="slurm-mpirun", batch="slurm", launcher="mpirun", mpis=("openmpi", "mpich")),
        Template(
            name="slurm-apptainer",
            batch="slurm",
            launcher="srun",
            mpis=_PLUGINS,
            needs_image=True,
        ),
        Template(
            name=_CONTAINER_ENGINE, batch="slurm", launcher="srun", mpis=_PLUGINS, needs_image=True
        ),
    )
    directive_prefix = "#SBATCH"
    managed = (
        *("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node"),
        *("gpus-per-task", "gres", "gpus", "mem", "time", "partition", "account", "qos"),
        *("constraint", "reservation", "output", "error", "open-mode", "array", "dependency"),
        *("kill-on-invalid-dep", "requeue", "no-requeue", "signal", "wrap", "export", "chdir"),
        *("tasks-per-node", "clusters", "parsable", "test-only", "wait", "workdir"),
    )
    has_expedited_restarts = True
    overlap_options = ("--overlap",)
    has_accounting = True

    def cluster(self, environ: Mapping[str, str]) -> str | None:
        """Its ClusterName."""
        return environ.get("SLURM_CLUSTER_NAME") or None

    # Rendering.

    def directives(self, plan: PlannedJob) -> list[str]:
        """The options of `sbatch`."""
        request, site = plan.request, plan.site
        number = "%A_%a" if plan.is_array else "%j"
        words = given(
            ("--job-name=", request.name),
            ("--nodes=", request.num_nodes),
            ("--ntasks-per-node=", plan.ranks_per_node),
            ("--cpus-per-task=", plan.cpus_per_rank),
        )
        if plan.gpus_per_node and site.gpu_request != "none":
            one = "1" if site.gpu_request == "gpus-per-task" else str(plan.gpus_per_node)
            option = "gres=gpu:" if site.gpu_request == "gres" else f"{site.gpu_request}="
            words.append(f"--{option}{one}")
        words += given(
            ("--mem=", format_memory(plan.memory_mib) if plan.memory_mib else None),
            ("--time=", format_clock(request.walltime_s)),
            ("--partition=", plan.partition),
            ("--account=", plan.account),
            ("--qos=", plan.qos),
            ("--constraint=", plan.constraint),
            ("--reservation=", request.reservation),
            ("--output=", f"{request.log_dir}/%x-{number}.out"),
        )
        words.append("--open-mode=append")
        if request.array_size is not None:
            limit = f"%{request.array_limit}" if request.array_limit else ""
            words.append(f"--array=0-{request.array_size - 1}{limit}")
        if request.after:
            words.append(f"--dependency=after{request.after_kind}:{':'.join(request.after)}")
            words.append("--kill-on-invalid-dep=yes")
        again = "--requeue=expedite" if request.expedite else "--requeue"
        words.append(again if request.max_requeues else "--no-requeue")
        if request.signal_lead_s is not None:
            words.append(f"--signal=B:{request.signal}@{request.signal_lead_s}")
        return words

    def rank_words(self, plan: PlannedJob) -> list[str]:
        """`srun`, or an MPI's own mpirun."""
        if plan.template.launcher != "srun":
            return super().rank_words(plan)
        words = ["srun", f"--nodes={plan.request.num_nodes}", f"--ntasks={plan.num_ranks}"]
        words += [f"--ntasks-per-node={plan.ranks_per_node}", f"--mpi={plan.mpi}"]
        # A rank that dies without MPI noticing would leave the others waiting until the walltime.
        words.append("--kill-on-bad-exit=1")
        if masks := plan.site.cpu_masks[: plan.ranks_per_node]:
            words.append(f"--cpu-bind=mask_cpu:{','.join(masks)}")
        return words

    def launch_words(self, plan: PlannedJob) -> list[str]:
        """With the environment definition file, where a container engine inside srun takes one."""
        words = super().launch_words(plan)
        if plan.template.name != _CONTAINER_ENGINE:
            return words
        image = plan.request.image or ""  # a name in the engine's search path, or a path
        is_name = not image.endswith(".toml") or image.startswith(("/", "./", "../"))
        return [*words, f"--environment={image if is_name else f'./{image}'}"]

    def node_words(self, plan: PlannedJob) -> list[str]:
        """`srun`, whichever launcher the ranks have."""
        nodes = plan.request.num_nodes
        return [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
            "--mpi=none",
        ]

    def passed_signals(self, plan: PlannedJob) -> dict[str, str]:
        """Seen: srun passes USR2 on, but kills its ranks on TERM, which Slurm sends them itself."""
        if plan.template.launcher != "srun":
            return super().passed_signals(plan)
        return {"TERM": "", plan.request.signal: plan.request.signal}

    def check(self, plan: PlannedJob) -> None:
        """Besides: srun does not pass every signal on."""
        if plan.template.launcher == "srun" and plan.request.signal in ("TERM", "HUP"):
            raise ConfigError(
                f"srun kills its ranks on {plan.request.signal} instead of passing it on; leave "
                "--signal out (USR2)"
            )
        super().check(plan)

    # Client commands.

    def version(self, ask: Ask) -> tuple[int, int] | None:
        """Of srun."""
        try:
            answer = ask(["srun", "--version"], None)
        except JobError:
            return None
        match = re.match(r"slurm\S* (\d+)\.(\d+)", answer.out) if answer else None
        return (int(match.group(1)), int(match.group(2))) if match else None

    def why_no_expedite(self, ask: Ask) -> str | None:
        """Why `--requeue=expedite` would be refused; None also where Slurm is not here."""
        version = ask(["sbatch", "--version"], None)
        if version is None:
            return None
        match = re.search(r"(\d+)\.(\d+)", version.out)
        if match is None or (int(match[1]), int(match[2])) < _EXPEDITES:
            return (
                f"it needs Slurm 25.11, and this is {version.out.strip() or 'an unknown version'}"
            )
        config = ask(["scontrol", "show", "config"], None)
        if config is None or "enable_expedited_requeue" not in config.out:
            return "this site has not enabled it (SlurmctldParameters=enable_expedited_requeue)"
        return None

    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """`--parsable`: the id alone, or with the cluster's name."""
        return ["sbatch", "--parsable", str(script)]

    def read_id(self, said: str) -> str:
        """The number before the semicolon, in the last line: sites print greetings."""
        lines = said.strip().splitlines()
        match = _ID.fullmatch(lines[-1]) if lines else None
        if match is None:
            raise unreadable("sbatch", said)
        return match.group(1)

    def cancel_words(self, job: str) -> list[str]:
        """`scancel`."""
        return ["scancel", job]

    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """The controller's state, which is the newest; else what accounting has stored."""
        current = ask(["scontrol", "--oneliner", "show", "job", job], None)
        if current is not None and current.code == 0 and (found := read_scontrol(current.out)):
            return found
        words = ["sacct", "--allocations", "--parsable2", "--noheader", f"--jobs={job}"]
        past = ask([*words, f"--format={','.join(_FIELDS)}"], None)
        return read_sacct(past.out) if past is not None and past.code == 0 else []

    def ask_use(self, job: str, ask: Ask) -> tuple[list[JobUse], str]:
        """`sacct`, where the site has accounting."""
        words = ["sacct", "--parsable2", "--noheader", f"--jobs={job}"]
        answer = ask([*words, f"--format={','.join(ACCOUNTING_FIELDS)}"], None)
        if answer is None:
            return [], "sacct is not on PATH"
        if answer.code != 0:
            return [], f"sacct failed: {' '.join(answer.err.split()) or f'exit code {answer.code}'}"
        found = read_accounting(answer.out)
        return found, "" if found else f"sacct has no record of job {job} starting"

    def log_name(self, name: str, job: str, task: int | None) -> str:
        """As in the directive `--output`."""
        return f"{name}-{job}.out" if task is None else f"{name}-{job}_{task}.out"

    def split_task(self, job: str) -> tuple[str, int | None]:
        """`123_4`."""
        match = _TASK.fullmatch(job)
        return (match[1], int(match[2])) if match else (job, None)

    # Inside a job.

    def time_left_words(self, job: str, index: int | None) -> list[str]:
        """`squeue`."""
        return ["squeue", "--noheader", "--jobs", job, "--format", "%L"]

    def read_time_left(self, said: str, *, now_s: float) -> float | None:
        """A clock; UNLIMITED and INVALID are none."""
        return read_clock(said)

    def activity_words(self, job: str) -> list[str]:
        """`squeue`, which keeps a job for minutes after its end."""
        return ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]

    def read_activity(self, answer: Answer) -> str | None:
        """A job that the controller has forgotten ended minutes ago."""
        if answer.code != 0:
            return "over" if "Invalid job id" in answer.err else None
        state = answer.out.split()[0] if answer.out.split() else ""
        if not state or state in FINAL:
            return "over"
        return "ending" if state == "COMPLETING" else "alive"


def ask_plugins(ask: Ask) -> frozenset[str]:
    """What `srun --mpi=` may be here; nothing where srun is missing or does not answer."""
    try:
        answer = ask(["srun", "--mpi=list"], None)
    except JobError:
        return frozenset()
    if answer is None or answer.code != 0:
        return frozenset()
    return parse_plugins(f"{answer.out}\n{answer.err}")


def parse_plugins(text: str) -> frozenset[str]:
    """Read the output of `srun --mpi=list`, whichever version wrote it."""
    names: set[str] = set()
    for line in text.splitlines():
        body = re.sub(r"^srun:\s*", "", line.strip())
        if body.lower().startswith(("mpi plugin types", "mpi types")):
            continue
        body = re.sub(r"^specific \w+ plugin versions available:\s*", "", body, flags=re.IGNORECASE)
        words = [word.strip() for word in body.split(",")]
        names.update(word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word))
    return frozenset(names)


def read_sacct(said: str) -> list[JobState]:
    """Read the lines of `sacct --parsable2`."""
    found = []
    for line in said.splitlines():
        fields = dict(zip(_FIELDS, line.split("|"), strict=False))
        if len(fields) == len(_FIELDS):
            found.append(
                JobState(
                    job=fields["JobID"],
                    name=fields["JobName"],
                    state=fields["State"].split()[0] if fields["State"] else "UNKNOWN",
                    exit_code=_exit_code(fields["ExitCode"]),
                    elapsed=fields["Elapsed"],
                )
            )
    return found


def read_scontrol(said: str) -> list[JobState]:
    """Read the lines of `scontrol --oneliner show job`."""
    found = []
    for line in said.splitlines():
        fields = dict(re.findall(r"(?:^|\s)([A-Z][A-Za-z/:]*)=(\S*)", line))
        if "JobId" in fields:
            array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
            found.append(
                JobState(
                    job=f"{array}_{task}" if array and task else fields["JobId"],
                    name=fields.get("JobName", ""),
                    state=fields.get("JobState", "UNKNOWN"),
                    exit_code=_exit_code(fields.get("ExitCode", "")),
                    elapsed=fields.get("RunTime", ""),
                    restarts=int(fields["Restarts"]) if "Restarts" in fields else None,
                    reason="" if fields.get("Reason") == "None" else fields.get("Reason", ""),
                    log=fields.get("StdOut", ""),
                )
            )
    return found


def _exit_code(text: str) -> int | None:
    """Slurm writes `code:signal`; a signal is reported as by a shell."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        return None
    code, signal = (int(number) for number in match.groups())
    return code or (128 + signal if signal else 0)


def read_memory(text: str, *, num_nodes: int = 1, num_cores: int = 1) -> int | None:
    """Bytes of `1234K`, `1.50G` or a bare number of bytes; None: no size.

    Slurm before 21.08 gives memory per node (`16Gn`) or core (`4000Mc`): it is multiplied.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        return None
    number, unit, per = match.groups()
    times = {"n": num_nodes, "c": num_cores}.get(per, 1)
    return round(float(number) * _BYTES[unit] * times)


def _tres(text: str) -> dict[str, str]:
    """`cpu=8,gres/gpu=2,mem=32G` by name."""
    return dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)


def read_accounting(said: str) -> list[JobUse]:
    """Read the lines of `sacct --parsable2` with `ACCOUNTING_FIELDS`, by job or task. Pure.

    The line of an allocation has what was given and the processor time of all steps; those of its
    steps (`12.batch`, `12.0`) have memory and GPUs, of which the largest step counts.
    """
    jobs: dict[str, dict[str, str]] = {}
    steps: dict[str, list[dict[str, str]]] = {}
    for line in said.splitlines():
        row = dict(zip(ACCOUNTING_FIELDS, line.split("|"), strict=False))
        if len(row) == len(ACCOUNTING_FIELDS):
            job, dot, _ = row["JobID"].partition(".")
            if dot:
                steps.setdefault(job, []).append(row)
            else:
                jobs[job] = row
    return [use for job, row in jobs.items() if (use := _read_job(job, row, steps.get(job, ())))]


def _read_job(
    job: str, row: Mapping[str, str], steps: Sequence[Mapping[str, str]]
) -> JobUse | None:
    elapsed = read_clock(row["Elapsed"])
    if not elapsed:  # it has not begun
        return None
    nodes, cores = (_whole(row[name]) or 1 for name in ("NNodes", "AllocCPUS"))
    given = _tres(row["AllocTRES"])
    cpu_s = read_clock(row["TotalCPU"])
    memory = read_memory(given.get("mem", "")) or read_memory(
        row["ReqMem"], num_nodes=nodes, num_cores=cores
    )
    gpus = _count_gpus(given)
    busy = [value for step in steps if (value := _busy_gpus(step)) is not None]
    gpu_memory = [
        size
        for step in steps
        if (size := read_memory(_tres(step["TRESUsageInMax"]).get("gres/gpumem", "")))
    ]
    state = row["State"].split()[0] if row["State"] else "UNKNOWN"
    return JobUse(
        job=job,
        state=state,
        source="sacct",
        elapsed_s=elapsed,
        limit_s=read_clock(row["Timelimit"]),
        num_nodes=nodes,
        cores=cores,
        busy_cores=cpu_s / elapsed if cpu_s else None,
        memory_bytes=memory or None,
        used_memory_bytes=max((_step_memory(step) for step in steps), default=0) or None,
        gpus=gpus,
        busy_gpus=min(float(gpus), max(busy)) if busy and gpus else None,
        used_gpu_memory_bytes=max(gpu_memory, default=None),
    )


def _step_memory(step: Mapping[str, str]) -> int:
    """What all tasks of a step had together: Slurm's sum, else the largest for each."""
    total = read_memory(_tres(step["TRESUsageInTot"]).get("mem", ""))
    largest = read_memory(step["MaxRSS"]) or 0
    return total or largest * (_whole(step["NTasks"]) or 1)


def _busy_gpus(step: Mapping[str, str]) -> float | None:
    """GPUs that a step kept busy: the percentage of a task, which adds up over its GPUs."""
    share = _tres(step["TRESUsageInAve"]).get("gres/gpuutil", "")
    if not share.isdigit():
        return None
    return int(share) / 100 * (_whole(step["NTasks"]) or 1)


def _count_gpus(given: Mapping[str, str]) -> int:
    if "gres/gpu" in given:
        return _whole(given["gres/gpu"]) or 0
    return sum(_whole(n) or 0 for name, n in given.items() if name.startswith("gres/gpu:"))


def _whole(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
