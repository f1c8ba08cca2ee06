"""A sweep's result in words and tables, and the command that repeats it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.bench.laws import conclude_curves, point_names
from hpctrain.bench.sweep import RANKS, Sweep, SweepSettings

__all__ = [
    "Table",
    "conclude_result",
    "describe_law",
    "describe_laws",
    "describe_reach",
    "describe_settings",
    "percent",
    "point_rows",
    "repeat_command",
    "split_rows",
]

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
    names = point_names(scale["points"])
    for row in scale["points"]:
        name = names[row["name"]]
        if row["state"] != "ok":
            reason = row["why"].splitlines()[0]
            rows.append([name, f"failed: {reason}", *[""] * (len(headers) + len(extra) - 2)])
            continue
        rows.append(
            [
                name,
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
    names = point_names(result["scale"]["points"])
    for row in result["scale"]["points"]:
        if "split_s" in row:
            counts = row["counts"]
            rows.append(
                [
                    names[row["name"]],
                    *(_short(1000 * row["split_s"].get(phase, 0.0)) for phase in _PHASES),
                    _short(1000 * row["straggling_s"]),
                    f"{counts['messages']:g}" if "messages" in counts else "",
                    _short(counts["bytes"] / 1e6) if "bytes" in counts else "",
                    f"{row['memory_bytes'] / 2**20:.0f}",
                ]
            )
    return headers, rows


def describe_laws(result: Mapping[str, Any]) -> list[str]:
    """What follows from every curve, a sentence or two each; and the speed-ups of settings."""
    lines = []
    for curve in conclude_result(result):
        lines.append(f"{curve['kind']}: {describe_reach(curve)}.")
        lines += describe_law(curve)
    return lines + describe_settings(result)


def conclude_result(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conclusions on every curve of a result, whichever version wrote it."""
    seconds = {item["variant"]: item["seconds"] for item in result["series"]}
    return conclude_curves(result["scale"]["points"], seconds)


def describe_reach(curve: Mapping[str, Any]) -> str:
    """Where efficiency is at the limit or above, and where below: as measured."""
    limit = f"{100 * curve['efficiency_limit']:.0f} %"
    kept, missed = curve["kept_at"], curve["missed_at"]
    below = ", ".join(f"{percent(value)} at {n}" for n, value in missed)
    if not missed:
        return f"efficiency is {limit} or more at {_all_of(kept)}"
    if not kept:
        return f"efficiency is below {limit} at {_all_of([n for n, _ in missed])} ({below})"
    if max(kept) < missed[0][0]:
        return f"efficiency is {limit} or more up to {_ranks(max(kept))} and below beyond ({below})"
    return f"efficiency is {limit} or more at {_listed(kept)} and below elsewhere ({below})"


def describe_law(curve: Mapping[str, Any]) -> list[str]:
    """Which law describes a curve and what follows from it; the Karp-Flatt fractions."""
    kind, series = curve["kind"], curve["karp_flatt"]
    lines = [f"{kind}: {_explain(curve) if curve['fits'] else _TOO_FEW}."]
    if len(series) > 1:
        told = ", ".join(f"{k['fraction']:.3f} at {k['num_ranks']}" for k in series)
        lines.append(f"{kind}: Karp-Flatt {told}: {_MEANING[curve['trend']]}.")
    return lines


def percent(share: float) -> str:
    """As precise as tables are, so that a text and a table show the same."""
    return f"{100 * share:.1f} %"


_MEANING = {
    "rises": "it rises, so overhead grows with the ranks",
    "falls": "it falls: overhead grows more slowly than the ranks",
    "level": "level within its intervals, as a fixed serial part would be",
    "zero": "no serial part can be seen",
    "negative": "below 0, so better than ideal: there is no visible serial part",
    "mixed": "it varies beyond its intervals, which no serial part does",
    "unrepeated": "measured once, so a trend cannot be distinguished from noise",
}
_TOO_FEW = (
    "too few points to fit a scaling law; measure at least two numbers of ranks above 1, each "
    "at least twice"
)


def _explain(curve: Mapping[str, Any]) -> str:
    """Which law describes a curve, and what follows from it."""
    if curve["best"] is None:
        return _explain_none(curve)
    best = next(fit for fit in curve["fits"] if fit["name"] == curve["best"])
    text = f"{_law_name(best)} describes the data"
    if curve["is_clear"]:
        text += " best"
    if best["name"] != "ideal":
        interval = f"[{best['low']:.3f}, {best['high']:.3f}]"
        text += f", with a serial fraction of {best['serial']:.3f} {interval}"
    text += f" (at most {percent(best['largest_miss'])} off a measured speed-up)"
    if not curve["is_clear"]:
        text += ", though not clearly better than other laws"
    return text + _threshold(curve)


def _explain_none(curve: Mapping[str, Any]) -> str:
    nearest = min(curve["fits"], key=lambda fit: fit["largest_miss"])
    text = (
        f"no scaling law fits the data: the nearest, {_law_name(nearest)}, is "
        f"{percent(nearest['largest_miss'])} off at {_ranks(nearest['largest_miss_at'])}"
    )
    if curve["trend"] == "negative":
        text += "; the ranks are faster than ideal, which none of the laws allows"
    return text


def _threshold(curve: Mapping[str, Any]) -> str:
    """Where efficiency falls below the limit by the law, unless a measured point contradicts."""
    limit, where = f"{100 * curve['efficiency_limit']:.0f} %", curve["falls_below"]
    if where is None:
        never = curve["never_falls"]
        return f"; by it, efficiency does not fall below {limit}" if never else ""
    low, high = (curve[f"falls_below_{end}"] for end in ("low", "high"))
    upper = "no limit" if high is None else f"{high:.1f}"
    lower = f"{low:.1f}" if low is not None else "1"
    return f"; by it, efficiency falls below {limit} at {where:.1f} ranks [{lower}, {upper}]"


def _law_name(fit: Mapping[str, Any]) -> str:
    return "ideal scaling" if fit["name"] == "ideal" else f"{fit['name']}'s law"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _listed(numbers: Sequence[int]) -> str:
    *first, last = (str(number) for number in numbers)
    words = f"{', '.join(first)} and {last}" if first else last
    return f"{words} rank{'s' * (len(numbers) > 1 or numbers[0] != 1)}"


def _all_of(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return _ranks(numbers[0])
    return f"every measured number of ranks, {', '.join(map(str, numbers))}"


def describe_settings(result: Mapping[str, Any]) -> list[str]:
    """Speed-up of a setting over the first of its axis, such as mixed precision over without."""
    rows = {row["name"]: row for row in result["scale"]["points"]}
    names = point_names(result["scale"]["points"])
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
            lines.append(f"{names[mine['name']]}: {what} is {text} times as fast as {than}.")
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


_OPTIONS = {
    "--warmup": "warmup",
    "--seed": "seed",
    "--timeout": "timeout_s",
    "--load-limit": "load_limit",
    "--retries": "retries",
}
_FIRST_OWN = "train.global_batch={batch}"
"""The first key that a sweep itself sets; the user's keys come before it."""


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
        if getattr(settings, name) != getattr(SweepSettings(), name):
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
