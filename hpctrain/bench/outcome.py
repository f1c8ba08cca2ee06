"""A result from the launches of a sweep. Pure.

The result is one of `hpctrain.bench.results`; `scale` in it has one row for every point,
those that failed among them, the fitted laws, and what a reader must know of how it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from hpctrain.bench.laws import conclude_curves, find_baseline, make_ratios
from hpctrain.bench.paired import interval_ranks
from hpctrain.bench.results import SCHEMA
from hpctrain.bench.sweep import ALONE, NODE, Measured, Sweep, SweepPoint, fill_arguments

__all__ = ["make_result"]

_CONFIDENCE = 0.95
Launches = Mapping[tuple[str, int], Measured]


def make_result(
    sweep: Sweep, measured: Launches, *, machine: Mapping[str, Any], date: str, command: str
) -> dict[str, Any]:
    """Everything that was measured, as one result.

    Args:
        sweep: What was to be measured.
        measured: The launches that have ended, by point and repeat.
        machine: Where.
        date: Day in UTC.
        command: What repeats it.
    """
    whole = {p.name: _launches(sweep, p, measured) for p in sweep.points}
    good = [p for p in sweep.points if _trouble(sweep, whole[p.name]) == ""]
    by_steps = all(m.report is not None for p in good for m in whole[p.name])
    rates = {p.name: _rates(sweep, p, whole[p.name], by_steps=by_steps) for p in good}
    seconds = {p.name: [_seconds(m, by_steps=by_steps) for m in whole[p.name]] for p in good}
    rows = [_row(sweep, p, whole, rates, by_steps=by_steps) for p in sweep.points]
    blocks = _blocks(sweep, good, measured)
    settings = asdict(sweep.settings)
    return {
        "schema": SCHEMA,
        "benchmark": sweep.kind,
        "date": date,
        "machine": dict(machine),
        "settings": {**settings, "blocks": sweep.settings.repeats},
        "series": [
            _series(sweep, p, whole[p.name], row, by_steps=by_steps)
            for p, row in zip(sweep.points, rows, strict=True)
            if p in good
        ],
        "ratios": make_ratios(sweep.title, good, seconds),
        "blocks": blocks,
        "num_thrown_away": 0,
        "num_noisy": sum(bool(block["noisy"]) for block in blocks),
        "scale": {
            "program": sweep.title.rpartition(" ")[0],
            "mode": sweep.settings.mode,
            "measured": "steps" if by_steps else "launches",
            "command": command,
            "points": rows,
            "laws": conclude_curves(rows, seconds),
            "notes": _notes(sweep, good, whole, by_steps=by_steps),
        },
    }


def _launches(sweep: Sweep, point: SweepPoint, measured: Launches) -> list[Measured]:
    repeats = range(sweep.settings.repeats)
    return [measured[point.name, r] for r in repeats if (point.name, r) in measured]


def _trouble(sweep: Sweep, launches: Sequence[Measured]) -> str:
    """Why a point is not valid; empty if it is."""
    failed = [launch for launch in launches if launch.why]
    if failed:
        return failed[0].why
    missing = sweep.settings.repeats - len(launches)
    return f"{missing} of {sweep.settings.repeats} launches are missing" if missing else ""


def _seconds(launch: Measured, *, by_steps: bool) -> float:
    return median(launch.report["step_s"]) if by_steps and launch.report else launch.wall_s


def _samples(launch: Measured) -> float | None:
    report = launch.report or {}
    told = report.get("samples_per_step") or report.get("global_batch")
    return None if told is None else float(told)


def _rates(
    sweep: Sweep, point: SweepPoint, launches: Sequence[Measured], *, by_steps: bool
) -> list[float]:
    """Work a second in every launch: samples, or else shares of the batch."""
    is_weak = sweep.settings.mode == "weak"
    _, used = fill_arguments(sweep, point)
    rates = []
    for launch in launches:
        work = _samples(launch) if by_steps else None
        if work is None and ("batch" in used or (launch.report or {}).get("global_batch")):
            work = point.factor
        elif work is None:  # every process does what the script does by itself
            work = point.num_ranks if is_weak or by_steps else 1
        rates.append(work / _seconds(launch, by_steps=by_steps))
    return rates


def _row(
    sweep: Sweep,
    point: SweepPoint,
    whole: Mapping[str, list[Measured]],
    rates: Mapping[str, list[float]],
    *,
    by_steps: bool,
) -> dict[str, Any]:
    """One point, in all that is known of it."""
    launches = whole[point.name]
    row: dict[str, Any] = {**asdict(point), "kind": point.kind, "values": dict(point.values)}
    row["why"] = _trouble(sweep, launches)
    row["state"] = "failed" if row["why"] else "ok"
    if row["why"]:
        return row
    times = [_seconds(launch, by_steps=by_steps) for launch in launches]
    row |= _interval("step_s", times) if by_steps else _interval("launch_s", times)
    sized = by_steps and all(_samples(launch) is not None for launch in launches)
    if sized:
        row |= _interval("samples_per_s", rates[point.name])
        row["samples_per_step"] = _samples(launches[0])
    good = [p for p in sweep.points if p.name in rates]
    alone = find_baseline(point, good, ALONE)
    if alone is not None:
        pairs = list(zip(rates[point.name], rates[alone.name], strict=True))
        row |= _interval("speedup", [mine / base for mine, base in pairs])
        cores = point.num_ranks * point.num_threads / alone.num_threads
        row |= _interval("efficiency", [mine / base / cores for mine, base in pairs])
        row["speedup_per_sequential_s"] = row["speedup"] / median(
            [_seconds(launch, by_steps=by_steps) for launch in whole[alone.name]]
        )
    node = find_baseline(point, good, NODE)
    if node is not None and point.num_nodes == 1:
        pairs = list(zip(rates[point.name], rates[node.name], strict=True))
        row |= _interval("over_node", [mine / base for mine, base in pairs])
    if by_steps:
        row |= _split(launches)
        if "speedup" in row:
            millions = row["num_parameters"] / 1e6
            row["speedup_per_million_parameters"] = row["speedup"] / millions
    return row


def _split(launches: Sequence[Measured]) -> dict[str, Any]:
    """Where the time of a step goes, and what it needs."""
    reports = [launch.report for launch in launches if launch.report is not None]
    first = reports[0]
    return {
        "split_s": {k: fmean(r["split_s"][k] for r in reports) for k in first["split_s"]},
        "straggling_s": median([r["straggling_s"] for r in reports]),
        "memory_bytes": max(max(r["memory_bytes"]) for r in reports),
        "counts": _same([r["counts"] for r in reports]),
        "engine_used": first["engine"],
        "sees_forward": all(r["sees_forward"] for r in reports),
        "num_parameters": first["num_parameters"],
        "optimizer": first["optimizer"],
        "is_fused": first["is_fused"],
        "device": first["device"],
    }


def _same(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Counts that all launches agree on; Horovod's own fusion depends on timing."""
    return {k: v for k, v in counts[0].items() if all(c.get(k) == v for c in counts)}


def _interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median, and its interval where there is one: a single launch has none."""
    if len(values) == 1:
        return {name: values[0]}
    ordered = sorted(values)
    first, last, _ = interval_ranks(len(ordered), _CONFIDENCE)
    return {
        name: median(ordered),
        f"{name}_low": ordered[first],
        f"{name}_high": ordered[last],
    }


def _series(
    sweep: Sweep,
    point: SweepPoint,
    launches: Sequence[Measured],
    row: Mapping[str, Any],
    *,
    by_steps: bool,
) -> dict[str, Any]:
    told = ("samples_per_s", "speedup", "efficiency", "over_node")
    return {
        "case": sweep.title,
        "variant": point.name,
        "kind": point.kind,
        "num_ranks": point.num_ranks,
        "num_threads": point.num_threads,
        "seconds": [_seconds(launch, by_steps=by_steps) for launch in launches],
        "counts": row.get("counts", {}),
        "outcome": {},
        "metrics": {name.replace("_", " "): row[name] for name in told if name in row},
    }


def _blocks(sweep: Sweep, good: Sequence[SweepPoint], measured: Launches) -> list[dict[str, Any]]:
    names = {point.name for point in good}
    blocks = []
    for repeat in range(sweep.settings.repeats if good else 0):
        order = [name for name, r in sweep.order() if r == repeat and name in names]
        load = max(measured[name, repeat].foreign_load or 0.0 for name in order)
        blocks.append(
            {
                "case": sweep.title,
                "order": order,
                "foreign_load": round(load, 4),
                "kept": True,
                "noisy": load > sweep.settings.load_limit,
            }
        )
    return blocks


def _notes(
    sweep: Sweep, good: Sequence[SweepPoint], whole: Mapping[str, list[Measured]], *, by_steps: bool
) -> list[str]:
    """What a reader must know."""
    notes = []
    _, used = fill_arguments(sweep, sweep.points[0])
    if not by_steps:
        taken = "all ranks together are assumed to do the work of one process"
        if "batch" in used:
            taken = "their work is assumed to be the batch"
        elif sweep.settings.mode == "weak":
            taken = "every rank is assumed to do as much as one process alone"
        notes.append(
            "The script does not train through hpctrain.distribute, so whole launches were "
            f"timed, including start and exit; {taken}."
        )
    reports = [m.report for p in good for m in whole[p.name] if m.report is not None]
    if by_steps and "batch" not in used and not all("batch" in r["reads"] for r in reports):
        notes.append(
            "The script does not read world.bench.global_batch, so it was measured with its own "
            "batches, regardless of the mode."
        )
    if by_steps and reports and not all(report["sees_forward"] for report in reports):
        notes.append("The model is not called as replica(x): input is part of forward.")
    if by_steps and any(_samples(m) is None for p in good for m in whole[p.name]):
        notes.append("The script passes no num_samples, so efficiency counts steps.")
    if by_steps:
        notes += _fused_notes(sweep, good, whole)
    return notes


def _fused_notes(
    sweep: Sweep, good: Sequence[SweepPoint], whole: Mapping[str, list[Measured]]
) -> list[str]:
    """Whether one process with all cores has its fused optimizer, and whether it alone has."""
    configured = sweep.label.endswith(".toml")
    asked = [p for p in good if p.role == NODE and "fused" in p.values]
    if not all(_is_fused(whole[p.name]) for p in asked):
        allow = "a script allows one by fused=world.bench.value('fused', False)"
        if configured:
            allow = "its class has none for this device, or the configuration says fused = false"
        return [f"One process with all cores has no fused optimizer; {allow}."]
    if asked and not all(_is_fused(whole[p.name]) for p in good if p.role != NODE):
        give = "optimizer.args.fused = true" if configured else "fused=True"
        return [
            "One process with all cores has a fused optimizer, the other points do not; "
            f"{give} gives it to all."
        ]
    return []


def _is_fused(launches: Sequence[Measured]) -> bool:
    return all(bool(launch.report and launch.report["is_fused"]) for launch in launches)
