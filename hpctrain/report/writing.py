"""A report in every format that was asked for, as files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.report.asking import Wish
from hpctrain.report.composing import compose
from hpctrain.report.document import Document
from hpctrain.report.page import render_page
from hpctrain.report.plain import render_csv, render_latex, render_markdown
from hpctrain.report.results import Result, read_result
from hpctrain.report.runs import Run, is_run, is_trace, read_run, read_trace

__all__ = ["FORMATS", "write_report"]

FORMATS = ("html", "png", "pdf", "csv", "md", "tex")


def write_report(
    inputs: Sequence[Path],
    out: Path,
    *,
    formats: Sequence[str] = ("html",),
    title: str | None = None,
    wish: Wish | None = None,
) -> list[Path]:
    """Write a report on results and runs.

    Args:
        inputs: Result files, run directories, and folders of `--trace`.
        out: A folder; or one .html file, if that is the only format.
        formats: Of `FORMATS`.
        title: None makes one of what is in the inputs.
        wish: What is to be trained, to be priced.

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
    document = _read(inputs, folder, formats, title, wish, str(out))
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
    wish: Wish | None,
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
    if wish is not None:
        words += ["--samples", f"{wish.num_samples:g}", "--runs", str(wish.runs)]
        words += ["--reserve", f"{wish.reserve:g}"]
    made = title or _title(results, runs)
    return compose(results, runs, traces, title=made, command=shlex.join(words), wish=wish)


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
