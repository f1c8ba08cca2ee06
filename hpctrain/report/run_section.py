"""What a report says of a run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from hpctrain.report.asking import hours_text
from hpctrain.report.axes import number_text
from hpctrain.report.document import Section, Table
from hpctrain.report.run_charts import event_name, run_charts
from hpctrain.report.runs import Run
from hpctrain.timeline import blame

__all__ = ["run_figures", "run_sections", "trace_words"]

_MOST_EVENTS = 200
_BEHIND = 1.05
"""A slowest rank that takes less than this times the usual is only the one that happens to be."""


def run_sections(run: Run, key: str) -> list[Section]:
    """Curves and what happened, then the events one by one."""
    charts = run_charts(run, key)
    words = [_outcome(run), *_speed(run), *_slowest(run)]
    if run.num_unreadable:
        words.append(f"Not readable in metrics.jsonl: {_count(run.num_unreadable, 'line')}.")
    if not run.of_kind("step"):
        words.append("It logged no steps: there are no curves.")
    elif not any(chart.key.endswith("breakdown") for chart in charts):
        words.append("The parts of a step were not timed in this run: there is no breakdown.")
    sections = [Section(title=f"Run {run.name}", paragraphs=tuple(words), charts=tuple(charts))]
    events = run.of_kind("event")
    if events:
        rows = tuple(
            (hours_text(line["hours"]), str(line.get("step", "")), event_name(line), _rest(line))
            for line in events[:_MOST_EVENTS]
        )
        table = Table(
            key=f"{key}-events",
            title=f"{run.name}: what happened",
            headers=("time", "step", "event", "more"),
            rows=rows,
        )
        more = len(events) - len(rows)
        said = (f"{more} later events are left out.",) if more > 0 else ()
        sections.append(
            Section(title=f"{run.name}: events", paragraphs=said, tables=(table,), is_minor=True)
        )
    if run.config:
        lines = tuple(run.config.strip().splitlines())
        table = Table(
            key=f"{key}-config",
            title=f"{run.name}: config.toml",
            headers=("config.toml",),
            rows=tuple((line,) for line in lines),
        )
        sections.append(Section(title=f"{run.name}: configuration", tables=(table,), is_minor=True))
    return sections


def run_figures(run: Run) -> list[tuple[str, str]]:
    """The numbers that everybody looks for."""
    found = []
    summary = run.summary
    if isinstance(summary.get("samples_per_s"), int | float):
        where = " in the last job" * _was_resumed(run)
        rate = number_text(summary["samples_per_s"])
        found.append((rate, f"{run.name}: samples a second{where}"))
    if isinstance(summary.get("seconds"), int | float):
        what = "training time" if _covers_all_jobs(run) else "time of the last job"
        found.append((hours_text(summary["seconds"] / 3600), f"{run.name}: {what}"))
    metrics = summary.get("metrics")
    for name, value in (metrics if isinstance(metrics, Mapping) else {}).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found.append((number_text(value), f"{run.name}: {name}"))
    return found[:4]


def _covers_all_jobs(run: Run) -> bool:
    """Whether the summary's time is that of its steps: older ones have that of the last job."""
    return "job_seconds" in run.summary or not _was_resumed(run)


def _was_resumed(run: Run) -> bool:
    return any(event_name(line) == "restart" for line in run.of_kind("event"))


def _outcome(run: Run) -> str:
    summary = run.summary
    if not summary:
        return "There is no summary.json: the run has not ended, or was killed."
    parts = [f"The run {summary.get('state', 'ended')}"]
    if summary.get("steps"):
        parts.append(f"after {summary['steps']} steps")
    if summary.get("ranks"):
        parts.append(f"on {summary['ranks']} ranks")
    if summary.get("engine"):
        parts.append(f"with the {summary['engine']} engine")
    counts = Counter(event_name(line) for line in run.of_kind("event"))
    told = [_count(counts[name], name) for name in ("restart", "checkpoint") if counts[name]]
    return " ".join(parts) + (f"; {' and '.join(told)}." if told else ".")


def _speed(run: Run) -> list[str]:
    times = [line["step_s"] for line in run.of_kind("step") if _is_number(line.get("step_s"))]
    if len(times) < 2:
        return []
    slow = sum(t > 2 * median(times) for t in times)
    text = f"A step took {1000 * median(times):.3g} ms (median)"
    if slow:
        text += f"; {slow} of {len(times)} logged steps took more than twice as long"
    return [f"{text}."]


def _slowest(run: Run) -> list[str]:
    said = []
    ranks = [
        int(line["slowest_rank"]) for line in run.lines if _is_number(line.get("slowest_rank"))
    ]
    if ranks:
        rank, count = Counter(ranks).most_common(1)[0]
        share = count / len(ranks)
        text = f"Rank {rank} was the slowest in {100 * share:.0f} % of the steps that say so"
        behind = [
            float(line["slowest_ratio"])
            for line in run.lines
            if _is_number(line.get("slowest_ratio"))
        ]
        if behind:
            text += f", {100 * (median(behind) - 1):.0f} % behind (median of the slowest ranks)"
        if share > 0.5 and len(ranks) >= 10 and (not behind or median(behind) > _BEHIND):
            text += "; look at its node with `hpctrain doctor --all-nodes`"
        said.append(f"{text}.")
    return said + ([trace_words(run.trace)] if run.trace else [])


def trace_words(trace: Mapping[str, Any]) -> str:
    """What a timeline shows, and where to look in it."""
    slowest = trace.get("slowest")
    text = (
        f"{trace.get('path', 'trace.json.gz')} has {trace.get('num_events', 0)} events of "
        f"{trace.get('num_ranks', 0)} ranks; clocks are within {trace.get('error_us', 0.0):.1f} us."
    )
    if not isinstance(slowest, Mapping):
        return f"{text} It has too few steps to name a slowest one."
    phase, extra_s = str(slowest.get("phase", "")), float(slowest.get("extra_s", 0.0))
    why = blame(slowest["rank"], phase, extra_s)
    return (
        f"{text} Its slowest step is number {slowest['step']}: {1000 * slowest['seconds']:.1f} ms "
        f"against a median of {1000 * slowest['median_s']:.1f}; {why}. "
        f'Open the file at ui.perfetto.dev and search for "step {slowest["step"]}".'
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rest(line: Mapping[str, Any]) -> str:
    hidden = {"kind", "event", "name", "what", "step", "epoch", "time_s", "wall", "seq", "hours"}
    return ", ".join(f"{k}={v}" for k, v in line.items() if k not in hidden)
