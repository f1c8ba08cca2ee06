"""The launches of a sweep on this machine, one after the other."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from hpctrain.bench.load import background_load, read_clocks
from hpctrain.bench.sweep import RANKS, Folder, Measured, Sweep, SweepPoint, fill_arguments
from hpctrain.submit import launch
from hpctrain.sweep_request import BENCH_VARIABLE, SweepRequest

__all__ = ["explain_mismatch", "explain_other_device", "request_of", "run_sweep", "summarize_log"]

_TAIL_LINES = 6
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_ERROR = re.compile(r"(?:[\w.]*(?:Error|Exception): |hpctrain: rank )")


def run_sweep(
    folder: Folder, sweep: Sweep, environ: Mapping[str, str], *, say: Callable[[str], None]
) -> None:
    """Measure what is still missing; what fails is kept with its reason, and the rest continues."""
    pending = folder.pending(sweep)
    if len(pending) < len(sweep.order()):
        say(f"{len(sweep.order()) - len(pending)} launches are already measured; resuming")
    for number, (name, repeat) in enumerate(pending, start=1):
        point = sweep.point(name)
        measured = _measure(folder, sweep, point, repeat, environ)
        tries = 1
        limit = sweep.settings.load_limit
        while not measured.why and (measured.foreign_load or 0) > limit:
            if tries > sweep.settings.retries:
                break
            tries += 1
            again = _measure(folder, sweep, point, repeat, environ)
            # By the load alone, never by the time: leaving out slow ones would be cheating.
            if again.why or (again.foreign_load or 0) < (measured.foreign_load or 0):
                measured = again
        if not measured.why:
            why = explain_other_device(measured, folder.measured(sweep).values())
            measured = replace(measured, why=why)
        told = measured.why.splitlines()[0] if measured.why else _brief(measured)
        say(f"{number} of {len(pending)}: {name}, repeat {repeat + 1}: {told}")
        key = folder.key(sweep, name, repeat)
        folder.write(key, replace(measured, num_tries=tries))


def request_of(folder: Folder, sweep: Sweep, point: SweepPoint, repeat: int) -> SweepRequest:
    """The request to a launch."""
    key = folder.key(sweep, point.name, repeat)
    return SweepRequest(
        report=str(folder.report_path(key).absolute()),
        batch=sweep.settings.batch,
        factor=point.factor,
        engine=None if point.engine == "auto" else point.engine,
        values=dict(point.values),
        warmup=sweep.settings.warmup,
        steps=sweep.settings.steps,
    )


def explain_mismatch(sweep: Sweep, point: SweepPoint, report: Mapping[str, object] | None) -> str:
    """What makes a launch that ended well no measurement of its point; empty: nothing. Pure."""
    _, used = fill_arguments(sweep, point)
    reads = report["reads"] if report else []
    known = {*used, *(reads if isinstance(reads, list) else [])}
    optional = {"fused"} if point.role != RANKS else set()
    unread = sorted(set(point.values) - known - optional)
    if unread:
        return (
            f"the script does not read {unread[0]}, so varying it changes nothing; read "
            f"world.bench.value({unread[0]!r}, default), or put {{{unread[0]}}} into its arguments"
        )
    chosen = point.engine if report is None or point.role != RANKS else report["engine"]
    if point.engine not in ("auto", chosen):
        return f"the script chooses engine {chosen} itself; leave it at auto"
    if report is not None and not report["step_s"]:
        return "no step was timed: the script ended within the warm-up; lower --warmup"
    return ""


def explain_other_device(launch: Measured, others: Iterable[Measured]) -> str:
    """What makes a launch incomparable with the good ones before it; empty: nothing. Pure."""
    if launch.report is None:
        return ""
    own = _device(launch.report)
    for other in others:
        if other.report is not None and not other.why and _device(other.report) != own:
            return (
                f"it computed on {own}, and {other.point} on {_device(other.report)}; measure all "
                "points on the same device (CUDA_VISIBLE_DEVICES), in another --dir"
            )
    return ""


def _device(report: Mapping[str, object]) -> str:
    return re.sub(r":\d+", "", str(report["device"]))  # whichever GPU of the node it was


def _measure(
    folder: Folder, sweep: Sweep, point: SweepPoint, repeat: int, environ: Mapping[str, str]
) -> Measured:
    key = folder.key(sweep, point.name, repeat)
    folder.report_path(key).unlink(missing_ok=True)
    arguments, _ = fill_arguments(sweep, point)
    module = ["-m"] if sweep.is_module else []
    command = [sys.executable, "-m", "hpctrain", "run", "-n", str(point.num_ranks)]
    before = read_clocks()
    code, ended = launch(
        [*command, *module, sweep.target, *arguments],
        folder.log_path(key),
        environ={
            **environ,
            "OMP_NUM_THREADS": str(point.num_threads),
            BENCH_VARIABLE: request_of(folder, sweep, point, repeat).text(),
        },
        timeout_s=sweep.settings.timeout_s,
    )
    after = read_clocks()
    report = folder.read_report(key)
    why = ""
    if not ended:
        why = f"ran past {sweep.settings.timeout_s:g} s (--timeout)"
    elif code != 0:
        why = f"exit code {code}: {summarize_log(folder.log_path(key).read_text(errors='replace'))}"
    return Measured(
        point=point.name,
        repeat=repeat,
        wall_s=after.wall_s - before.wall_s,
        why=why or explain_mismatch(sweep, point, report),
        foreign_load=background_load(before, after, num_cores=os.cpu_count() or 1),
        report=report,
    )


def summarize_log(log: str) -> str:
    """The line of a log that says most, and its last lines, without colours. Pure."""
    lines = [line for line in _CONTROL.sub("", log).splitlines() if line.strip()]
    said = [line.strip() for line in lines if _ERROR.match(line)]
    return "\n".join([*said[-1:], *lines[-_TAIL_LINES:]]) or "no output"


def _brief(measured: Measured) -> str:
    report = measured.report
    steps = sorted(report["step_s"]) if report else []
    load = f", background load {measured.foreign_load or 0:.0%}"
    if steps:
        return f"{1000 * steps[len(steps) // 2]:.1f} ms a step{load}"
    return f"{measured.wall_s:.1f} s for the whole launch{load}"
