"""What a job used of what it asked for: cores, memory, GPUs and time; what to ask for next time.

Slurm's accounting (`sacct`) knows it for any job. Where there is none, the run itself does:
`hpctrain train` and the Trainer leave what they used in `summary.json`. Reading and arithmetic are
pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.submit.batch.system import Ask
from hpctrain.submit.units import format_clock, format_memory

__all__ = [
    "FIELDS",
    "JobUse",
    "advise_request",
    "ask_sacct",
    "find_summaries",
    "read_accounting",
    "read_sacct_memory",
    "read_sacct_time",
    "read_used",
]

FIELDS = (
    *("JobID", "State", "Elapsed", "Timelimit", "AllocCPUS", "NNodes", "NTasks", "TotalCPU"),
    *("MaxRSS", "ReqMem", "AllocTRES", "TRESUsageInTot", "TRESUsageInAve", "TRESUsageInMax"),
)
_TIME = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+(?:\.\d+)?)", re.ASCII)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)([nc]?)", re.ASCII)
_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_MIB = 1 << 20
_IDLE = 0.5
"""Less of something than this was used: ask for less."""
_FULL = 0.95
"""More of the memory than this was used: the next run may not fit."""
_SPARE = 1.25
"""What to ask for beyond what was used."""
_USED = (
    *("cores", "busy_cores", "memory_bytes", "used_memory_bytes", "gpus", "busy_gpus"),
    *("gpu_memory_bytes", "used_gpu_memory_bytes"),
)
_DEPTHS = ("summary.json", "*/summary.json", "*/*/summary.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUse:
    """What a job had, and what it used of it. None: nobody knows."""

    job: str
    state: str
    source: str
    """Who says so: `sacct`, or the path of a summary."""
    elapsed_s: float
    limit_s: float | None = None
    num_nodes: int = 1
    cores: int = 0
    """Processors of all nodes that the job had."""
    busy_cores: float | None = None
    """How many of them were busy on average; MPI that waits by polling is busy too."""
    memory_bytes: int | None = None
    """Of all nodes together."""
    used_memory_bytes: int | None = None
    """The most that all ranks together had; memory that ranks share counts for each of them."""
    gpus: int = 0
    busy_gpus: float | None = None
    """How many GPUs were busy on average."""
    gpu_memory_bytes: int | None = None
    """Of one GPU."""
    used_gpu_memory_bytes: int | None = None
    """The most that one rank had on its GPU."""

    def rows(self) -> list[tuple[str, str, str, str]]:
        """What, used, asked for, and the share; for a table."""
        kept = [
            ("cores", self.busy_cores, self.cores, _number),
            ("memory", self.used_memory_bytes, self.memory_bytes, _size),
            ("GPUs", self.busy_gpus, self.gpus, _number),
            ("memory of a GPU", self.used_gpu_memory_bytes, self.gpu_memory_bytes, _size),
            ("time", self.elapsed_s, self.limit_s, lambda s: format_clock(round(s))),
        ]
        rows = []
        for what, used, given, text in kept:
            if not used and not given:
                continue
            share = f"{100 * used / given:.0f} %" if used is not None and given else ""
            words = ("not known" if value is None else text(value) for value in (used, given))
            rows.append((what, *words, share))
        return rows  # type: ignore[return-value]

    def shares(self) -> dict[str, float]:
        """Used over asked for, of what is known."""
        pairs = {
            "cores": (self.busy_cores, self.cores),
            "memory": (self.used_memory_bytes, self.memory_bytes),
            "gpus": (self.busy_gpus, self.gpus),
            "gpu_memory": (self.used_gpu_memory_bytes, self.gpu_memory_bytes),
            "time": (self.elapsed_s, self.limit_s),
        }
        return {k: used / given for k, (used, given) in pairs.items() if used is not None and given}


def advise_request(use: JobUse) -> list[str]:
    """What to ask for next time; empty where the request fits. Pure."""
    return [*_advise_memory(use), *_advise_gpus(use), *_advise_cores(use), *_advise_time(use)]


def _advise_memory(use: JobUse) -> Iterator[str]:
    if use.state == "OUT_OF_MEMORY":
        yield "It ran out of memory: ask for more (--memory, per node), or for more nodes."
        return
    share = use.shares().get("memory")
    if share is None or use.used_memory_bytes is None:
        return
    if share > _FULL:
        yield f"Memory was {100 * share:.0f} % full: ask for more (--memory), or a later run fails."
    elif share < _IDLE:
        enough = _SPARE * use.used_memory_bytes / use.num_nodes
        gib = max(1, math.ceil(enough / (1 << 30)))
        if gib << 30 < (use.memory_bytes or 0) / use.num_nodes:
            yield f"{100 * share:.0f} % of the memory was used: --memory {gib}G a node is enough."


def _advise_gpus(use: JobUse) -> Iterator[str]:
    share = use.shares().get("gpus")
    if share is not None and share < _IDLE:
        yield (
            f"GPUs were busy {100 * share:.0f} % of the time: larger batches, more loader workers, "
            "or fewer GPUs; `hpctrain bench scale` shows where the time goes."
        )


def _advise_cores(use: JobUse) -> Iterator[str]:
    share = use.shares().get("cores")
    if share is None or share >= _IDLE or use.busy_cores is None:
        return
    enough = max(1, math.ceil(_SPARE * use.busy_cores))
    if enough < use.cores:
        because = ", as is usual beside GPUs" if use.gpus else ""
        yield (
            f"{use.busy_cores:.1f} of {use.cores} cores were busy{because}: {enough} are enough "
            "(--cpus-per-rank, --ranks-per-node, --nodes), unless the site gives whole nodes."
        )


def _advise_time(use: JobUse) -> Iterator[str]:
    if use.limit_s is None:
        return
    if use.state == "TIMEOUT":
        yield "It ran into its time limit: ask for more (--time), or resume it with --requeue."
    elif use.state == "COMPLETED" and use.elapsed_s < _IDLE * use.limit_s:
        enough = 60 * max(1, math.ceil(_SPARE * use.elapsed_s / 60))
        if enough < use.limit_s:
            took, limit = (format_clock(round(s)) for s in (use.elapsed_s, use.limit_s))
            yield f"It took {took} of {limit}: with --time {format_clock(enough)} it starts sooner."


def read_sacct_time(text: str) -> float | None:
    """Seconds of `[days-]hours:minutes:seconds` or `minutes:seconds.fraction`; None: no time."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (float(field or 0) for field in match.groups())
    return 86400 * days + 3600 * hours + 60 * minutes + seconds


def read_sacct_memory(text: str, *, num_nodes: int = 1, num_cores: int = 1) -> int | None:
    """Bytes of `1234K`, `1.50G` or a bare number of bytes; None: no size.

    Slurm before 21.08 asks for memory by node (`16Gn`) or core (`4000Mc`): it is multiplied out.
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
    """Read the lines of `sacct --parsable2` with `FIELDS`: one result per job or task. Pure.

    The line of an allocation has what was given and the processor time of all steps; those of its
    steps (`12.batch`, `12.0`) have memory and GPUs, of which the largest step counts.
    """
    jobs: dict[str, dict[str, str]] = {}
    steps: dict[str, list[dict[str, str]]] = {}
    for line in said.splitlines():
        row = dict(zip(FIELDS, line.split("|"), strict=False))
        if len(row) == len(FIELDS):
            job, dot, _ = row["JobID"].partition(".")
            if dot:
                steps.setdefault(job, []).append(row)
            else:
                jobs[job] = row
    return [use for job, row in jobs.items() if (use := _read_job(job, row, steps.get(job, ())))]


def _read_job(
    job: str, row: Mapping[str, str], steps: Sequence[Mapping[str, str]]
) -> JobUse | None:
    elapsed = read_sacct_time(row["Elapsed"])
    if not elapsed:  # it has not begun
        return None
    nodes, cores = (_whole(row[name]) or 1 for name in ("NNodes", "AllocCPUS"))
    given = _tres(row["AllocTRES"])
    cpu_s = read_sacct_time(row["TotalCPU"])
    memory = read_sacct_memory(given.get("mem", "")) or read_sacct_memory(
        row["ReqMem"], num_nodes=nodes, num_cores=cores
    )
    gpus = _count_gpus(given)
    busy = [value for step in steps if (value := _busy_gpus(step)) is not None]
    gpu_memory = [
        size
        for step in steps
        if (size := read_sacct_memory(_tres(step["TRESUsageInMax"]).get("gres/gpumem", "")))
    ]
    state = row["State"].split()[0] if row["State"] else "UNKNOWN"
    return JobUse(
        job=job,
        state=state,
        source="sacct",
        elapsed_s=elapsed,
        limit_s=read_sacct_time(row["Timelimit"]),
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
    total = read_sacct_memory(_tres(step["TRESUsageInTot"]).get("mem", ""))
    largest = read_sacct_memory(step["MaxRSS"]) or 0
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


def ask_sacct(job: str, ask: Ask) -> tuple[list[JobUse], str]:
    """What accounting knows of a job; else why it does not."""
    words = ["sacct", "--parsable2", "--noheader", f"--jobs={job}"]
    answer = ask([*words, f"--format={','.join(FIELDS)}"], None)
    if answer is None:
        return [], "sacct is not on PATH"
    if answer.code != 0:
        return [], f"sacct answers: {' '.join(answer.err.split()) or f'exit code {answer.code}'}"
    found = read_accounting(answer.out)
    return found, "" if found else f"sacct knows no job {job} that has begun"


def find_summaries(directory: Path, job: str) -> list[Path]:
    """The summaries of runs of a job, in its directory and two levels below; newest last."""
    found = [path for depth in _DEPTHS for path in directory.glob(depth)]
    mine = [path for path in found if str(_object(path).get("job_id")) == job]
    return sorted(mine, key=lambda path: path.stat().st_mtime)


def read_used(path: Path) -> JobUse | None:
    """What a run's summary says that it used; None where it says nothing."""
    summary = _object(path)
    used = summary.get("used")
    if not isinstance(used, Mapping):
        return None
    states = {"finished": "COMPLETED", "stopped": "PREEMPTED", "failed": "FAILED"}
    return JobUse(
        job=str(summary.get("job_id") or path.parent.name),
        state=states.get(str(summary.get("state")), "RUNNING"),
        source=str(path),
        elapsed_s=float(summary.get("job_seconds", 0.0)),
        num_nodes=int(summary.get("nodes", 1)),
        **{name: value for name, value in used.items() if name in _USED},
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: float) -> str:
    return f"{value:g}" if float(value).is_integer() else f"{value:.1f}"


def _size(value: float) -> str:
    if value < _MIB:
        return f"{value / 1024:.0f}K"
    return format_memory(round(value / _MIB)) if value < 10 * _MIB else f"{value / (1 << 30):.2f}G"
