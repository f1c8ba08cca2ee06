"""A sweep's result in words and tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Table", "describe_laws", "point_rows", "split_rows"]

Table = tuple[list[str], list[list[str]]]
_PHASES = ("input", "forward", "backward", "exchange", "update")


def point_rows(result: Mapping[str, Any]) -> Table:
    """One row a point: speed, efficiency, and what one node with one process would do."""
    scale = result["scale"]
    unit = "ms a step" if scale["measured"] == "steps" else "ms a launch"
    time = "step_s" if scale["measured"] == "steps" else "launch_s"
    headers = ["point", unit, "samples/s", "speed-up", "efficiency", "over one process, all cores"]
    extra = [
        ("S / sequential s", "speedup_per_sequential_s"),
        ("S / M parameters", "speedup_per_million_parameters"),
    ]
    rows = []
    for row in scale["points"]:
        if row["state"] != "ok":
            reason = row["why"].splitlines()[0]
            rows.append([row["name"], f"failed: {reason}", *[""] * (len(headers) + len(extra) - 2)])
            continue
        rows.append(
            [
                row["name"],
                _with_interval(row, time, 1000.0),
                _with_interval(row, "samples_per_s", 1.0),
                _with_interval(row, "speedup", 1.0),
                _with_interval(row, "efficiency", 100.0, "%"),
                _with_interval(row, "over_node", 1.0),
                *(_short(row[key]) if key in row else "" for _, key in extra),
            ]
        )
    return [*headers, *(title for title, _ in extra)], rows


def split_rows(result: Mapping[str, Any]) -> Table:
    """One row a point: where the time of a step goes, in milliseconds, and what it needs."""
    headers = ["point", *_PHASES, "straggling", "messages", "MB exchanged", "MiB a rank"]
    rows = []
    for row in result["scale"]["points"]:
        if "split_s" in row:
            counts = row["counts"]
            rows.append(
                [
                    row["name"],
                    *(_short(1000 * row["split_s"].get(phase, 0.0)) for phase in _PHASES),
                    _short(1000 * row["straggling_s"]),
                    f"{counts['messages']:g}" if "messages" in counts else "",
                    _short(counts["bytes"] / 1e6) if "bytes" in counts else "",
                    f"{row['memory_bytes'] / 2**20:.0f}",
                ]
            )
    return headers, rows


def describe_laws(result: Mapping[str, Any]) -> list[str]:
    """What the fits say, a sentence or two for each curve; and the speed-ups of settings."""
    lines = []
    for law in result["scale"]["laws"]:
        few = law["best"] is None or len(law["karp_flatt"]) < 2
        lines.append(f"{law['kind']}: {_TOO_FEW if few else _explain(law)}.")
        if len(law["karp_flatt"]) > 1:
            series = ", ".join(
                f"{k['fraction']:.3f} at {k['num_ranks']}" for k in law["karp_flatt"]
            )
            lines.append(f"{law['kind']}: Karp-Flatt {series}: {_MEANING[law['trend']]}.")
    return lines + _settings(result)


_MEANING = {
    "rises": "it rises, so overhead grows with the ranks",
    "falls": "it falls: what is lost does not grow as fast as the ranks",
    "level": "level within its intervals, as a fixed serial part would be",
    "unknown": "one number of ranks shows no trend",
    "unrepeated": "measured once, so a trend cannot be told from noise",
}
_TOO_FEW = (
    "too few points to fit a law of scaling; measure at least three numbers of ranks, each at "
    "least twice"
)


def _explain(law: Mapping[str, Any]) -> str:
    """Which law explains a curve, and what follows from it."""
    best = next(fit for fit in law["fits"] if fit["name"] == law["best"])
    name = "ideal scaling" if best["name"] == "ideal" else f"{best['name']}'s law"
    text = f"{name} explains the data best"
    if best["name"] != "ideal":
        interval = f"[{best['low']:.3f}, {best['high']:.3f}]"
        text += f", with a serial fraction of {best['serial']:.3f} {interval}"
    if not law["is_clear"]:
        text += ", though not clearly better than the others"
    return f"{text}; {_threshold(law)}"


def _threshold(law: Mapping[str, Any]) -> str:
    limit, where = law["efficiency_limit"], law["falls_below"]
    if where is None:
        return f"by it, efficiency does not fall below {limit:.0%}"
    low, high = (law[f"falls_below_{end}"] for end in ("low", "high"))
    upper = "no limit" if high is None else f"{high:.1f}"
    lower = f"{low:.1f}" if low is not None else "1"
    return f"by it, efficiency falls below {limit:.0%} at {where:.1f} ranks [{lower}, {upper}]"


def _settings(result: Mapping[str, Any]) -> list[str]:
    """Speed-up of a setting over the first of its axis, such as mixed precision over without."""
    rows = {row["name"]: row for row in result["scale"]["points"]}
    lines = []
    for ratio in result["ratios"]:
        mine, theirs = rows[ratio["variant"]], rows[ratio["baseline"]]
        if mine["role"] == theirs["role"] and mine["values"] != theirs["values"]:
            changed = [k for k in mine["values"] if mine["values"][k] != theirs["values"].get(k)]
            what = ", ".join(f"{k}={mine['values'][k]}" for k in changed)
            than = ", ".join(f"{k}={theirs['values'].get(k)}" for k in changed)
            times = [1 / ratio[key] for key in ("median", "high", "low")]
            text = "{:.2f} [{:.2f}, {:.2f}]".format(*times)
            if ratio["num_blocks"] == 1:
                text = f"{times[0]:.2f} (measured once)"
            lines.append(f"{mine['name']}: {what} is {text} times as fast as {than}.")
    return lines


def _with_interval(row: Mapping[str, Any], key: str, factor: float, unit: str = "") -> str:
    if key not in row:
        return ""
    middle = f"{_short(factor * row[key])}{unit}"
    if f"{key}_low" not in row:
        return middle
    low, high = (_short(factor * row[key + tail]) for tail in ("_low", "_high"))
    return f"{middle} [{low}, {high}]"


def _short(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"
