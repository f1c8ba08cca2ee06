"""A result: its fields and file name, the machine it was measured on, its tables."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from hpctrain.tables import is_of

__all__ = [
    "ROOT",
    "SCHEMA",
    "best_rows",
    "caption",
    "comparison_rows",
    "cpu_name",
    "describe_machine",
    "file_name",
    "machine_id",
    "markdown",
    "parse_file_name",
    "series_rows",
    "tables",
    "upgrade",
    "validate",
]

SCHEMA = 2
"""Incremented whenever a reader of the old form could misread the new one."""

_TOP: dict[str, Any] = {
    "schema": int,
    "benchmark": str,
    "date": str,
    "machine": dict,
    "settings": dict,
    "series": list,
    "ratios": list,
    "blocks": list,
    "num_thrown_away": int,
    "num_noisy": int,
}
_MACHINE: dict[str, Any] = {
    "id": str,
    "cpu": str,
    "arch": str,
    "cores": int,
    "memory_gib": float,
    "system": str,
    "python": str,
    "mpi": str,
    "torch": str,
    "mpi4py": str,
    "horovod": str | None,
    "commit": str | None,
    "modified": bool,
}
_SERIES: dict[str, Any] = {
    "case": str,
    "variant": str,
    "kind": str,
    "num_ranks": int,
    "num_threads": int,
    "seconds": list,
    "counts": dict,
    "outcome": dict,
    "metrics": dict,
}
_RATIO: dict[str, Any] = {
    "case": str,
    "variant": str,
    "baseline": str,
    "median": float,
    "low": float,
    "high": float,
    "coverage": float,
    "num_blocks": int,
}
_BLOCK: dict[str, Any] = {
    "case": str,
    "order": list,
    "foreign_load": float,
    "kept": bool,
    "noisy": bool,
}
_LISTS = {"series": _SERIES, "ratios": _RATIO, "blocks": _BLOCK}
_FILE = re.compile(r"(?P<benchmark>\w+)-(?P<date>\d{4}-\d\d-\d\d)-(?P<machine>[\w.-]+)\.json")


def validate(result: object) -> list[str]:
    """Say what is wrong with a result; an empty list when nothing is."""
    if not isinstance(result, dict):
        return ["a result is an object"]
    wrong = _misfits(result, _TOP, "result")
    if wrong:
        return wrong
    if result["schema"] != SCHEMA:
        return [f"schema {result['schema']} is not {SCHEMA}"]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]):
        wrong.append(f"date {result['date']!r} is not YYYY-MM-DD")
    wrong += _misfits(result["machine"], _MACHINE, "machine")
    for name, fields in _LISTS.items():
        for index, item in enumerate(result[name]):
            wrong += _misfits(item, fields, f"{name}[{index}]")
    return wrong or _contradictions(result)


def upgrade(result: object) -> object:
    """Bring a result of schema 1, where all variants had one layout, into today's form."""
    if not isinstance(result, dict) or result.get("schema") != 1:
        return result
    settings = {**result["settings"]}
    layout = {
        "num_ranks": settings.pop("num_ranks"),
        "num_threads": settings.pop("threads_per_rank"),
    }
    series = [{**item, "kind": item["variant"], **layout} for item in result["series"]]
    return {**result, "schema": SCHEMA, "settings": settings, "series": series}


def _misfits(item: object, fields: Mapping[str, Any], where: str) -> list[str]:
    if not isinstance(item, dict):
        return [f"{where} is not an object"]
    wrong = [f"{where}: {name} is missing" for name in fields if name not in item]
    wrong += [
        f"{where}: {name} is {item[name]!r}"
        for name, kind in fields.items()
        if name in item and not is_of(kind, item[name])
    ]
    return wrong


def _contradictions(result: Mapping[str, Any]) -> list[str]:
    """What does not fit together, each part being well formed."""
    wrong = []
    kept: dict[str, int] = {}
    for block in result["blocks"]:
        kept[block["case"]] = kept.get(block["case"], 0) + block["kept"]
    for item in result["series"]:
        where = f"{item['case']}, {item['variant']}"
        if len(item["seconds"]) != kept.get(item["case"], 0):
            wrong.append(
                f"{where}: {len(item['seconds'])} times in {kept.get(item['case'])} blocks"
            )
        if not all(is_of(float, s) and s > 0 for s in item["seconds"]):
            wrong.append(f"{where}: a time is not above 0")
    known = {(item["case"], item["variant"]) for item in result["series"]}
    for ratio in result["ratios"]:
        for name in (ratio["variant"], ratio["baseline"]):
            if (ratio["case"], name) not in known:
                wrong.append(f"ratio of {name} in {ratio['case']}, which was not measured")
        if not ratio["low"] <= ratio["median"] <= ratio["high"]:
            wrong.append(f"{ratio['case']}, {ratio['variant']}: the median is outside its interval")
    thrown = sum(not block["kept"] for block in result["blocks"])
    noisy = sum(block["kept"] and block["noisy"] for block in result["blocks"])
    if (thrown, noisy) != (result["num_thrown_away"], result["num_noisy"]):
        wrong.append(
            f"{thrown} blocks thrown away and {noisy} noisy ones; the result's counts differ"
        )
    return wrong


def file_name(result: Mapping[str, Any]) -> str:
    """The name of a result's file: benchmark, date, kind of machine; and ranks, if more than 2."""
    ranks = {item["num_ranks"] for item in result["series"]}
    tail = f"-{max(ranks)}ranks" if len(ranks) == 1 and max(ranks) > 2 else ""
    return f"{result['benchmark']}-{result['date']}-{result['machine']['id']}{tail}.json"


def parse_file_name(name: str) -> tuple[str, str, str] | None:
    """Benchmark, date, and machine with ranks, of a file's name; None if it is not a result."""
    match = _FILE.fullmatch(name)
    return (match["benchmark"], match["date"], match["machine"]) if match else None


ROOT = Path(__file__).resolve().parents[2]
"""The parent of the package: a checkout, or an environment's site-packages."""
_PACKAGES = ("torch", "mpi4py", "horovod", "numpy")


def describe_machine(*, mpi: str) -> dict[str, object]:
    """Describe this machine and the software; `mpi` is what the ranks said they run on."""
    cores = len(os.sched_getaffinity(0))
    return {
        "id": machine_id(platform.machine(), cores),
        "cpu": cpu_name(),
        "arch": platform.machine(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "mpi": mpi,
        **{name: _version(name) for name in _PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--", "hpctrain", "benchmarks")),
    }


def machine_id(arch: str, cores: int) -> str:
    """A short name for machines of one kind. Pure."""
    return f"{arch}-{cores}core{'s' if cores != 1 else ''}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """What the processor calls itself; ARM's /proc/cpuinfo has only numbers, lscpu the name."""
    text = _output(["lscpu"])
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model name" and value.strip() not in ("", "-"):
            return value.strip()
    return platform.processor() or platform.machine()


def _git(*words: str) -> str | None:
    if not (ROOT / ".git").exists():  # a repository around an environment is not ours
        return None
    return _output(["git", "-C", str(ROOT), *words]).strip() or None


def _output(command: list[str]) -> str:
    """What a command says; nothing when it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


Table = tuple[list[str], list[list[str]]]


def tables(result: Mapping[str, Any]) -> list[Table]:
    """All tables of a result that have rows."""
    every = [series_rows(result), comparison_rows(result)]
    if result["settings"].get("best_of_kind"):
        every.insert(0, best_rows(result))
    return [table for table in every if table[1]]


def best_rows(result: Mapping[str, Any]) -> Table:
    """One row per case and kind: its fastest layout."""
    baseline = _baselines(result)[0] if result["ratios"] else ""
    ratios = {(r["case"], r["variant"]): r for r in result["ratios"] if r["baseline"] == baseline}
    best: dict[tuple[str, str], Mapping[str, Any]] = {}
    for item in result["series"]:
        key = (item["case"], item["kind"])
        if key not in best or median(item["seconds"]) < median(best[key]["seconds"]):
            best[key] = item
    rows = [
        [
            case,
            kind,
            f"{item['num_ranks']} x {item['num_threads']}",
            _short(1000 * median(item["seconds"])),
            _ratio(ratios.get((case, item["variant"])), item, baseline),
        ]
        for (case, kind), item in best.items()
    ]
    return ["case", "kind", "best: ranks x threads", "ms", f"ratio to {baseline}"], rows


def series_rows(result: Mapping[str, Any]) -> Table:
    """One row per case and variant: time, ratio to the baseline, counts and metrics."""
    baseline = _baselines(result)[0] if result["ratios"] else ""
    ratios = {(r["case"], r["variant"]): r for r in result["ratios"] if r["baseline"] == baseline}
    counts = _keys(item["counts"] for item in result["series"])
    metrics = _keys(item["metrics"] for item in result["series"])
    headers = ["case", "variant", "ms", *([f"ratio to {baseline}"] if ratios else [])]
    rows = []
    for item in result["series"]:
        row = [item["case"], item["variant"], _short(1000 * median(item["seconds"]))]
        if ratios:
            row.append(_ratio(ratios.get((item["case"], item["variant"])), item, baseline))
        row += [_count(item["counts"].get(key)) for key in counts]
        row += [_short(item["metrics"][key]) if key in item["metrics"] else "" for key in metrics]
        rows.append(row)
    return [*headers, *counts, *metrics], rows


def comparison_rows(result: Mapping[str, Any]) -> Table:
    """One row per case and comparison with something else than the first baseline."""
    others = [r for r in result["ratios"] if r["baseline"] != _baselines(result)[0]]
    rows = [[r["case"], f"{r['variant']} / {r['baseline']}", _interval(r)] for r in others]
    return ["case", "comparison", "ratio"], rows


def caption(result: Mapping[str, Any]) -> str:
    """Where and how the result was measured, in one sentence."""
    machine, settings = result["machine"], result["settings"]
    horovod = f", Horovod {machine['horovod']}" if machine["horovod"] else ""
    commit = (machine["commit"] or "unknown")[:10] + (" + changes" if machine["modified"] else "")
    coverage = min((r["coverage"] for r in result["ratios"]), default=0.0)
    intervals = f" with {coverage:.0%} intervals" if coverage else ""
    layouts = {(item["num_ranks"], item["num_threads"]) for item in result["series"]}
    layout = "ranks x threads as named"
    if len(layouts) == 1:
        ((ranks, threads),) = layouts
        layout = f"{ranks} rank{'s' * (ranks > 1)} of {threads} thread{'s' * (threads > 1)}"
    noisy = f", {result['num_noisy']} of those kept were disturbed" if result["num_noisy"] else ""
    return (
        f"{result['date']}, {machine['cpu']} ({machine['arch']}, {machine['cores']} cores), "
        f"{_device(settings)}{layout}, torch {machine['torch']}, {machine['mpi']}{horovod}, "
        f"commit {commit}; medians of {settings['blocks']} blocks{intervals}, "
        f"{result['num_thrown_away']} blocks thrown away for background load{noisy}."
    )


def _device(settings: Mapping[str, Any]) -> str:
    return f"on {settings['device']}, " if "device" in settings else ""


def markdown(table: Table) -> str:
    """A table of Markdown."""
    headers, rows = table
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _baselines(result: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(ratio["baseline"] for ratio in result["ratios"]))


def _keys(dictionaries: Any) -> list[str]:
    return list(dict.fromkeys(key for one in dictionaries for key in one))


def _ratio(ratio: Mapping[str, Any] | None, item: Mapping[str, Any], baseline: str) -> str:
    if ratio is None:
        return "1" if item["variant"] == baseline else ""
    return _interval(ratio)


def _interval(ratio: Mapping[str, Any]) -> str:
    values: Sequence[float] = (ratio["median"], ratio["low"], ratio["high"])
    middle, low, high = (f"{v:.3f}" if v < 10 else f"{v:.1f}" for v in values)
    return f"{middle} [{low}, {high}]" if ratio["num_blocks"] > 1 else middle


def _count(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _short(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 4
    return f"{value:.{digits}f}"
