"""Results as tables, for a terminal and for the documentation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["best_rows", "caption", "comparison_rows", "markdown", "series_rows", "tables"]

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
        f"{result['num_thrown_away']} blocks thrown away for foreign load{noisy}."
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
