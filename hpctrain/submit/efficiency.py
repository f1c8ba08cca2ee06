"""What a job used of what it requested: cores, memory, GPUs and time; what to request next time.

A batch system's accounting has it for any job. Without accounting, the run itself does:
`hpctrain train` and the Trainer leave what they used in `summary.json`. The arithmetic is pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.batch_systems import JobUse, format_clock

__all__ = ["advise_request", "find_summaries", "read_used"]

_IDLE = 0.5
"""Below this share of use, suggest requesting less."""
_FULL = 0.95
"""Above this share of memory, the next run may not fit."""
_SPARE = 1.25
"""Margin to request above what was used."""
_USED = (
    *("cores", "busy_cores", "memory_bytes", "used_memory_bytes", "gpus", "busy_gpus"),
    *("gpu_memory_bytes", "used_gpu_memory_bytes"),
)
_DEPTHS = ("summary.json", "*/summary.json", "*/*/summary.json")


def advise_request(use: JobUse) -> list[str]:
    """What to request next time; empty if the request fits. Pure."""
    return [*_advise_memory(use), *_advise_gpus(use), *_advise_cores(use), *_advise_time(use)]


def _advise_memory(use: JobUse) -> Iterator[str]:
    if use.state == "OUT_OF_MEMORY":
        yield "It ran out of memory: request more (--memory, per node), or for more nodes."
        return
    share = use.shares().get("memory")
    if share is None or use.used_memory_bytes is None:
        return
    if share > _FULL:
        yield f"Memory was {100 * share:.0f} % full: request more (--memory) for later runs."
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
        yield "It hit its time limit: request more (--time), or resume it with --requeue."
    elif use.state == "COMPLETED" and use.elapsed_s < _IDLE * use.limit_s:
        enough = 60 * max(1, math.ceil(_SPARE * use.elapsed_s / 60))
        if enough < use.limit_s:
            took, limit = (format_clock(round(s)) for s in (use.elapsed_s, use.limit_s))
            yield f"It took {took} of {limit}: with --time {format_clock(enough)} it starts sooner."


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
