"""The command that measures a sweep again. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from hpctrain.bench.folder import Sweep
from hpctrain.bench.points import RANKS, Settings

__all__ = ["repeat_command"]

_OPTIONS = {
    "--warmup": "warmup",
    "--seed": "seed",
    "--timeout": "timeout_s",
    "--load-limit": "load_limit",
    "--retries": "retries",
}
_FIRST_OWN = "train.global_batch={batch}"
"""What a sweep itself sets first of a configuration; before it are the user's own."""


def repeat_command(sweep: Sweep, *, directory: Path, output: Path | None) -> str:
    """The command line of `bench scale` or `bench layout` that makes this sweep.

    Args:
        sweep: What was measured.
        directory: What `--dir` was.
        output: What `--json` was; None: not given.
    """
    settings = sweep.settings
    words = ["hpctrain", "bench", sweep.kind, *_points(sweep)]
    words += ["--repeats", str(settings.repeats), "--steps", str(settings.steps)]
    words += ["--batch", str(settings.batch)] if settings.batch is not None else []
    for option, name in _OPTIONS.items():
        if getattr(settings, name) != getattr(Settings(), name):
            words += [option, str(getattr(settings, name))]
    words += ["--dir", str(directory)]
    words += ["--json", str(output)] if output is not None else []
    return shlex.join([*words, *_program(sweep)])


def _points(sweep: Sweep) -> list[str]:
    ranked = [point for point in sweep.points if point.role == RANKS]
    ranks = sorted({point.num_ranks for point in ranked})
    words = ["--ranks", ",".join(map(str, ranks))] if ranks else []
    if sweep.kind == "layout":
        first = sweep.points[0]
        return [*words, "--cores", str(first.num_ranks * first.num_threads)]
    engines = dict.fromkeys(point.engine for point in ranked)
    words += ["--mode", sweep.settings.mode, "--engines", ",".join(engines)]
    words += ["--threads", str(ranked[0].num_threads)]
    axes: dict[str, dict[str, None]] = {}
    for point in ranked:
        for key, value in point.values.items():
            axes.setdefault(key, {})[value] = None
    for key, values in axes.items():
        words += ["--vary", f"{key}={','.join(values)}"]
    return words


def _program(sweep: Sweep) -> list[str]:
    if sweep.label.endswith(".toml"):
        given = list(sweep.arguments[1:])
        own = given.index(_FIRST_OWN) - 1 if _FIRST_OWN in given else len(given)
        return [sweep.label, *given[:own]]
    target = sweep.target if sweep.is_module else Path(sweep.target).name
    return [*(["-m"] if sweep.is_module else []), target, *sweep.arguments]
