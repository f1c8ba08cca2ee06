"""From results and runs to a document. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hpctrain.bench.render import caption, tables
from hpctrain.report.asking import Wish
from hpctrain.report.axes import number_text
from hpctrain.report.charts import Bars
from hpctrain.report.document import Document, Section, Table
from hpctrain.report.points import Study
from hpctrain.report.results import Result, doubts_of, estimate
from hpctrain.report.run_section import run_figures, run_sections, trace_words
from hpctrain.report.runs import Run
from hpctrain.report.study_charts import bandwidth_chart
from hpctrain.report.study_section import study_sections

__all__ = ["compose"]

_MOST_BARS = 12


def compose(
    results: Sequence[Result],
    runs: Sequence[Run],
    traces: Sequence[Mapping[str, Any]] = (),
    *,
    title: str,
    command: str,
    wish: Wish | None = None,
) -> Document:
    """Write the report on all inputs.

    Args:
        results: Benchmark results.
        runs: Run directories.
        traces: What is known of timelines, each with its `path` as the report's reader finds it.
        title: Of the report.
        command: What made this report.
        wish: What is to be trained, to be priced.
    """
    sections: list[Section] = []
    for number, result in enumerate(results):
        key = f"r{number}"
        for index, study in enumerate(result.studies):
            sections += study_sections(study, f"{key}s{index}", wish)
        if result.bandwidths:
            sections.append(_collectives(result, key))
        if not result.studies and not result.bandwidths:
            sections += _others(result, key)
    for number, run in enumerate(runs):
        sections += run_sections(run, f"t{number}")
    for trace in traces:
        path = str(trace["path"])
        sections.append(
            Section(title="Timeline", paragraphs=(trace_words(trace),), links=((path, path),))
        )
    sections += [_environment(results, runs), _repeat(results, runs, command)]
    figures = [figure for result in results for s in result.studies for figure in _figures(s)]
    figures += [figure for run in runs for figure in run_figures(run)]
    dates = sorted({str(result.raw["date"]) for result in results})
    machines = dict.fromkeys(_machine_words(result.raw["machine"]) for result in results)
    subtitle = "; ".join(
        [*machines, *([" to ".join(dates[:: max(1, len(dates) - 1)])] * bool(dates))]
    )
    return Document(
        title=title,
        subtitle=subtitle,
        figures=tuple(figures[:6]),
        sections=tuple(section for section in sections if section),
    )


def _machine_words(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']} ({machine['arch']}, {machine['cores']} cores)"


def _figures(study: Study) -> list[tuple[str, str]]:
    best = study.best()
    if best is None:
        return []
    if study.mode == "layout":
        timed = [(p.step_s.median, p) for p in study.measured if p.step_s]
        seconds, quickest = min(timed, key=lambda pair: pair[0])
        return [(f"{1000 * seconds:.1f} ms", f"{study.title}: {quickest.engine} {quickest.layout}")]
    speed_up, efficiency = study.speed_up(best), study.efficiency(best)
    found = []
    if speed_up and efficiency and best.num_ranks > 1:
        found.append(
            (f"{speed_up.median:.2f}x", f"{study.title}: speed-up on {best.num_ranks} ranks")
        )
        found.append((f"{100 * efficiency.median:.0f} %", f"{study.title}: efficiency there"))
    return found


def _collectives(result: Result, key: str) -> Section:
    limits = [one for one in result.bandwidths if one.is_limit]
    words = [
        "Bus bandwidth is what an ideal ring would have to move per rank, 2(n-1)/n times the size "
        "over the time, so that it compares with a copy in memory or with a link."
    ]
    if not limits:
        words.append("No copy or link was measured beside the collectives: there is no limit line.")
    for one in result.bandwidths:
        limit = next((other for other in limits if other.sizes[-1:] == one.sizes[-1:]), None)
        if limit is not None and not one.is_limit:
            share = one.gb_per_s[-1].median / limit.gb_per_s[-1].median
            words.append(
                f"{one.name} reaches {100 * share:.0f} % of {limit.name} at the largest size."
            )
    return Section(
        title="Collectives",
        paragraphs=(*words, *doubts_of(result.raw)),
        charts=(bandwidth_chart(result.bandwidths, key),),
        tables=_result_tables(result, key),
    )


def _others(result: Result, key: str) -> list[Section]:
    """A benchmark that the report has no picture of its own for: bars and the tables."""
    charts = []
    for index, case in enumerate(dict.fromkeys(item["case"] for item in result.raw["series"])):
        items = [i for i in result.raw["series"] if i["case"] == case and i["seconds"]]
        spread = [median(i["seconds"]) for i in items]
        if not 1 < len(items) <= _MOST_BARS or max(spread) > 200 * min(spread):
            continue
        steps = [estimate(item["seconds"]).scaled(1000) for item in items]
        charts.append(
            Bars(
                key=f"{key}c{index}",
                title=f"{result.benchmark}: {case}",
                description="Milliseconds: "
                + ", ".join(
                    f"{i['variant']} {s.median:.3g}" for i, s in zip(items, steps, strict=True)
                ),
                y_label="ms",
                labels=tuple(item["variant"] for item in items),
                parts=(("time", tuple(step.median for step in steps)),),
                low=tuple(step.low for step in steps),
                high=tuple(step.high for step in steps),
                styles=tuple(range(len(items))),
            )
        )
    return [
        Section(
            title=result.benchmark.replace("_", " "),
            paragraphs=tuple(doubts_of(result.raw)),
            charts=tuple(charts),
            tables=_result_tables(result, key),
        )
    ]


def _result_tables(result: Result, key: str) -> tuple[Table, ...]:
    return tuple(
        Table(
            key=f"{key}-table{index}",
            title=f"{result.benchmark}: all numbers",
            headers=tuple(headers),
            rows=tuple(tuple(row) for row in rows),
            doubts=tuple(doubts_of(result.raw)),
        )
        for index, (headers, rows) in enumerate(tables(result.raw))
    )


def _environment(results: Sequence[Result], runs: Sequence[Run]) -> Section:
    words = [f"{result.name}: {caption(result.raw)}" for result in results]
    made = [
        _facts(f"e{number}", result.name, result.raw["machine"])
        for number, result in enumerate(results)
    ]
    made += [
        _facts(f"u{number}", run.name, run.environment)
        for number, run in enumerate(runs)
        if run.environment
    ]
    words += [
        f"{run.name} has no environment.json: where it ran is not known."
        for run in runs
        if not run.environment
    ]
    return Section(title="Environment", paragraphs=tuple(words), tables=tuple(made), is_minor=True)


def _facts(key: str, name: str, facts: Mapping[str, Any]) -> Table:
    rows = [(str(what), _fact(value)) for what, value in facts.items() if value not in (None, "")]
    return Table(key=f"{key}-environment", title=name, headers=("what", "value"), rows=tuple(rows))


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _repeat(results: Sequence[Result], runs: Sequence[Run], command: str) -> Section:
    words, commands = [], []
    for result in results:
        if result.command:
            commands.append(result.command)
        else:
            settings = ", ".join(f"{k}={v}" for k, v in result.raw["settings"].items())
            words.append(f"{result.name} names no command; its settings are {settings}.")
    for run in runs:
        said = run.environment.get("command") or run.summary.get("command")
        if said:
            commands.append(" ".join(said) if isinstance(said, list) else str(said))
        else:
            words.append(
                f"{run.name} is repeated by the config.toml that it left, with every setting it "
                "had, where the modules can be found that the file names."
            )
            number = run.summary.get("ranks") or len(run.environment.get("ranks", ())) or 1
            file = shlex.quote(f"{run.folder or run.name}/config.toml")
            commands.append(f"hpctrain train {file} -n {number}")
    return Section(
        title="To repeat it",
        paragraphs=tuple(words),
        commands=tuple([*dict.fromkeys(commands), command]),
    )
