"""Documents as Markdown, tables as CSV and LaTeX. Pure."""

from __future__ import annotations

import csv
import io
import re

from hpctrain.report.document import Document, Section, Table

__all__ = ["render_csv", "render_latex", "render_markdown"]

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


def _section(section: Section, pictures: dict[str, str]) -> list[str]:
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


def _table(table: Table) -> list[str]:
    if len(table.headers) == 1:
        return ["```toml", *(row[0] for row in table.rows), "```"]
    rows = [table.headers, tuple("---" for _ in table.headers), *table.rows]
    body = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return [f"**{table.title}**", "", *body]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def render_csv(table: Table) -> str:
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


def _latex(table: Table) -> str:
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
