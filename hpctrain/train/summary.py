"""The last word on a run: summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.replica import Replica
from hpctrain.train.monitor import Monitor
from hpctrain.train.progress import Progress

__all__ = ["make_summary"]


def make_summary(
    replica: Replica,
    progress: Progress,
    monitor: Monitor,
    *,
    state: str,
    failure: str | None,
    earlier_s: float,
    job_s: float,
    num_steps: int | None,
    used: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Put the summary together.

    `steps`, `epochs`, `samples` and `seconds` are those of the whole run, over all its jobs; what
    is called `job_`, and `samples_per_s`, are of this one.

    Args:
        replica: What was trained.
        progress: How far it is.
        monitor: What was best.
        state: `running`, `finished`, `stopped` (to be run again) or `failed`.
        failure: The rank and its exception.
        earlier_s: Seconds of earlier jobs, up to where the run was resumed.
        job_s: Seconds of this job.
        num_steps: The goal, where it is known.
        used: What this job used of what it had; None before its end.
    """
    world = replica.world
    return {
        "state": state,
        "metrics": progress.results,
        "monitor": {"name": monitor.name, **monitor.state_dict()},
        "steps": progress.step,
        "num_steps": num_steps,
        "epochs": progress.epochs_done,
        "samples": progress.samples,
        "seconds": earlier_s + job_s,
        "job_steps": progress.job_steps,
        "job_samples": progress.job_samples,
        "job_seconds": job_s,
        "samples_per_s": progress.job_samples / job_s if job_s > 0 else 0.0,
        "ranks": world.size,
        "nodes": world.num_nodes,
        "engine": replica.engine.name,
        "job_id": world.launch.job_id,
        "stop_reason": progress.stop_reason,
        "failure": failure,
        "used": None if used is None else dict(used),
    }
