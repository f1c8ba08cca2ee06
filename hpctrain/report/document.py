"""A report before it has a format, and as Markdown, CSV and LaTeX. Pure."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.report.charts import Chart

__all__ = [
    "Document",
    "ReportSection",
    "ReportTable",
    "render_csv",
    "render_latex",
    "render_markdown",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportTable:
    """Rows under headers; the first column names the row."""

    key: str
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    data: tuple[tuple[str, ...], ...] = ()
    """Headers and rows of bare numbers, for programs; empty: those above."""
    doubts: tuple[str, ...] = ()
    """Why its numbers should not be quoted; a table used on its own must include them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSection:
    """A part of a report."""

    title: str
    paragraphs: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    commands: tuple[str, ...] = ()
    """Shell commands that reproduce it."""
    links: tuple[tuple[str, str], ...] = ()
    """Link text, and the file next to the report."""
    findings: tuple[tuple[str, str], ...] = ()
    """What limits, and what to try."""
    is_minor: bool = False
    """Whether it is collapsed on the page: reference material."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    figures: tuple[tuple[str, str], ...]
    """The key numbers: a value and its label."""
    sections: tuple[ReportSection, ...]

    def charts(self) -> Iterator[Chart]:
        """All charts in their order."""
        for section in self.sections:
            yield from section.charts

    def tables(self) -> Iterator[ReportTable]:
        """All tables in their order."""
        for section in self.sections:
            yield from section.tables


_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def render_markdown(document: Document, *, pictures: dict[str, str]) -> str:
    """The document as Markdown; `pictures` are files by the key of their chart."""
    lines = [f"# {document.title}", ""]
    if document.subtitle:
        lines += [document.subtitle, ""]
    lines += [f"- {what}: **{value}**" for value, what in document.figures]
    for section in document.sections:
        lines += ["", f"## {section.title}", "", *_section(section, pictures)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _section(section: ReportSection, pictures: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for paragraph in section.paragraphs:
        lines += [paragraph, ""]
    for number, (what, attempt) in enumerate(section.findings, 1):
        lines += [f"{number}. {what} Try: {attempt}"]
    lines.append("")
    for chart in section.charts:
        if chart.key in pictures:
            lines += [f"![{chart.title}]({pictures[chart.key]})", ""]
        else:
            lines += [f"*{chart.title}.* {chart.description}", ""]
    for table in section.tables:
        lines += [*_table(table), ""]
    if section.commands:
        lines += ["```sh", *section.commands, "```", ""]
    lines += [f"[{words}]({path})" for words, path in section.links]
    return lines


def _table(table: ReportTable) -> list[str]:
    if len(table.headers) == 1:
        return ["```toml", *(row[0] for row in table.rows), "```"]
    rows = [table.headers, tuple("---" for _ in table.headers), *table.rows]
    body = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return [f"**{table.title}**", "", *body]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def render_csv(table: ReportTable) -> str:
    """A table as CSV: bare numbers where the table has them.

    Doubts are a column `warning`: a line of words would break what reads the file.
    """
    headers, *rows = table.data or (table.headers, *table.rows)
    if table.doubts:
        said = " ".join(table.doubts)
        headers, rows = (*headers, "warning"), [(*row, said) for row in rows]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([headers, *rows])
    return out.getvalue()


def render_latex(document: Document) -> str:
    r"""The scaling tables for a proposal; they need `\usepackage{booktabs}`."""
    wanted = [t for t in document.tables() if t.key.endswith(("-points", "-cost"))]
    return "\n".join(
        [f"% {_escape(document.title)}", r"% \usepackage{booktabs}", *(_latex(t) for t in wanted)]
    )


def _latex(table: ReportTable) -> str:
    columns = "l" * 2 + "r" * max(0, len(table.headers) - 2)
    rows = [" & ".join(_escape(cell) for cell in row) + r" \\" for row in table.rows]
    return "\n".join(
        [
            r"\begin{table}[tbp]",
            r"  \centering",
            rf"  \caption{{{_escape(table.title)}}}",
            rf"  \label{{tab:{table.key}}}",
            rf"  \begin{{tabular}}{{{columns[: len(table.headers)]}}}",
            r"    \toprule",
            "    " + " & ".join(_escape(name) for name in table.headers) + r" \\",
            r"    \midrule",
            *(f"    {row}" for row in rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            *(rf"  \par\smallskip{{\footnotesize {_escape(doubt)}}}" for doubt in table.doubts),
            r"\end{table}",
            "",
        ]
    )


def _escape(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
