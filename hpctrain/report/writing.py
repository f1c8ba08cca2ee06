"""Compose a report from results and runs, and write it in every requested format."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain.bench import caption, tables
from hpctrain.errors import ConfigError
from hpctrain.report.advice import PlannedTraining
from hpctrain.report.charts import Bars, number_text
from hpctrain.report.document import (
    Document,
    ReportSection,
    ReportTable,
    render_csv,
    render_latex,
    render_markdown,
)
from hpctrain.report.page import render_page
from hpctrain.report.results import Result, Study, doubts_of, estimate, read_result
from hpctrain.report.runs import (
    Run,
    is_run,
    is_trace,
    read_run,
    read_trace,
    run_figures,
    run_sections,
    trace_words,
)
from hpctrain.report.study import bandwidth_chart, study_sections

__all__ = ["FORMATS", "compose", "write_report"]

_MOST_BARS = 12


def compose(
    results: Sequence[Result],
    runs: Sequence[Run],
    traces: Sequence[Mapping[str, Any]] = (),
    *,
    title: str,
    command: str,
    planned: PlannedTraining | None = None,
) -> Document:
    """Write the report on all inputs.

    Args:
        results: Benchmark results.
        runs: Run directories.
        traces: What is known of timelines, each with its `path` as the report's reader finds it.
        title: Of the report.
        command: What made this report.
        planned: What is to be trained, to be priced.
    """
    sections: list[ReportSection] = []
    for number, result in enumerate(results):
        key = f"r{number}"
        for index, study in enumerate(result.studies):
            sections += study_sections(study, f"{key}s{index}", planned)
        if result.bandwidths:
            sections.append(_collectives(result, key))
        if not result.studies and not result.bandwidths:
            sections += _others(result, key)
    for number, run in enumerate(runs):
        sections += run_sections(run, f"t{number}")
    for trace in traces:
        path = str(trace["path"])
        sections.append(
            ReportSection(title="Timeline", paragraphs=(trace_words(trace),), links=((path, path),))
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


def _collectives(result: Result, key: str) -> ReportSection:
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
    return ReportSection(
        title="Collectives",
        paragraphs=(*words, *doubts_of(result.raw)),
        charts=(bandwidth_chart(result.bandwidths, key),),
        tables=_result_tables(result, key),
    )


def _others(result: Result, key: str) -> list[ReportSection]:
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
        ReportSection(
            title=result.benchmark.replace("_", " "),
            paragraphs=tuple(doubts_of(result.raw)),
            charts=tuple(charts),
            tables=_result_tables(result, key),
        )
    ]


def _result_tables(result: Result, key: str) -> tuple[ReportTable, ...]:
    return tuple(
        ReportTable(
            key=f"{key}-table{index}",
            title=f"{result.benchmark}: all numbers",
            headers=tuple(headers),
            rows=tuple(tuple(row) for row in rows),
            doubts=tuple(doubts_of(result.raw)),
        )
        for index, (headers, rows) in enumerate(tables(result.raw))
    )


def _environment(results: Sequence[Result], runs: Sequence[Run]) -> ReportSection:
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
        f"{run.name} has no environment.json: where it ran is unknown."
        for run in runs
        if not run.environment
    ]
    return ReportSection(
        title="Environment", paragraphs=tuple(words), tables=tuple(made), is_minor=True
    )


def _facts(key: str, name: str, facts: Mapping[str, Any]) -> ReportTable:
    rows = [(str(what), _fact(value)) for what, value in facts.items() if value not in (None, "")]
    return ReportTable(
        key=f"{key}-environment", title=name, headers=("what", "value"), rows=tuple(rows)
    )


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _repeat(results: Sequence[Result], runs: Sequence[Run], command: str) -> ReportSection:
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
                f"{run.name} can be repeated with the config.toml that it wrote, which has every "
                "setting; the modules it names must be importable."
            )
            number = run.summary.get("ranks") or len(run.environment.get("ranks", ())) or 1
            file = shlex.quote(f"{run.folder or run.name}/config.toml")
            commands.append(f"hpctrain train {file} -n {number}")
    return ReportSection(
        title="To repeat it",
        paragraphs=tuple(words),
        commands=tuple([*dict.fromkeys(commands), command]),
    )


FORMATS = ("html", "png", "pdf", "csv", "md", "tex")


def write_report(
    inputs: Sequence[Path],
    out: Path,
    *,
    formats: Sequence[str] = ("html",),
    title: str | None = None,
    planned: PlannedTraining | None = None,
) -> list[Path]:
    """Write a report on results and runs.

    Args:
        inputs: Result files, run directories, and folders of `--trace`.
        out: A folder; or one .html file, if that is the only format.
        formats: Of `FORMATS`.
        title: None makes one of what is in the inputs.
        planned: What is to be trained, to be priced.

    Returns:
        The files that were written.

    Raises:
        ConfigError: an input is neither, a format is unknown, or nothing can be written there.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ConfigError(f"--format {','.join(unknown)!r} is unknown; choose {', '.join(FORMATS)}")
    single = out.suffix == ".html"
    if single and tuple(formats) != ("html",):
        raise ConfigError(f"-o {out} is one file, for --format html alone; name a folder instead")
    folder = out.parent if single else out
    document = _read(inputs, folder, formats, title, planned, str(out))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write(document, folder, out.name if single else "report.html", formats)
    except OSError as error:
        raise ConfigError(f"-o {out} cannot be written ({error}); name another place") from error


def _read(
    inputs: Sequence[Path],
    folder: Path,
    formats: Sequence[str],
    title: str | None,
    planned: PlannedTraining | None,
    out: str,
) -> Document:
    results: list[Result] = []
    runs: list[Run] = []
    traces = []
    for path in inputs:
        if is_trace(path):
            trace = read_trace(path)
            traces.append({**trace, "path": os.path.relpath(trace["path"], folder)})
        elif path.is_dir() or is_run(path):
            runs.append(read_run(path))
        else:
            results.append(read_result(path))
    words = ["hpctrain", "report", *map(str, inputs), "-o", out, "--format", ",".join(formats)]
    if planned is not None:
        words += ["--samples", f"{planned.num_samples:g}", "--runs", str(planned.runs)]
        words += ["--reserve", f"{planned.reserve:g}"]
    made = title or _title(results, runs)
    return compose(results, runs, traces, title=made, command=shlex.join(words), planned=planned)


def _title(results: Sequence[Result], runs: Sequence[Run]) -> str:
    if any(result.studies for result in results):
        return "How it scales"
    if results:
        return "Benchmark results"
    return f"Run {runs[0].name}" if len(runs) == 1 else "Runs" if runs else "Timeline"


def _write(document: Document, folder: Path, page: str, formats: Sequence[str]) -> list[Path]:
    written: list[Path] = []

    def write(name: str, text: str) -> None:
        (folder / name).write_text(text, encoding="utf-8")
        written.append(folder / name)

    charts = list(document.charts())
    pictures: dict[str, str] = {}
    if "png" in formats:
        from hpctrain.report.pictures import write_pngs

        pictures = write_pngs(charts, folder)
        written += [folder / name for name in pictures.values()]
    if "pdf" in formats and charts:
        from hpctrain.report.pictures import write_pdf

        write_pdf(charts, folder / "report.pdf")
        written.append(folder / "report.pdf")
    if "html" in formats:
        write(page, render_page(document))
    if "md" in formats:
        write("report.md", render_markdown(document, pictures=pictures))
    if "tex" in formats:
        write("report.tex", render_latex(document))
    if "csv" in formats:
        for table in document.tables():
            write(f"{table.key}.csv", render_csv(table))
    return written
