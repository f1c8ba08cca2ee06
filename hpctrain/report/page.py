"""A document as one HTML file: no script, nothing from elsewhere, made for paper as well. Pure."""

from __future__ import annotations

import re
from html import escape

from hpctrain.report.document import Document, Section, Table
from hpctrain.report.page_style import STYLE
from hpctrain.report.svg import draw

__all__ = ["render_page"]

_NUMBER = re.compile(r"[-+\d.,\s\[\]%xXkMGTiBshmin]*\d[-+\d.,\s\[\]%xXkMGTiBshmin]*")
_GAPS = ("", "failed")
_CODE = re.compile(r"`([^`]+)`")


def render_page(document: Document) -> str:
    """The whole page."""
    body = [_header(document), _contents(document)]
    for number, section in enumerate(document.sections):
        body.append(_section(section, number))
    body.append("<footer>Made by <code>hpctrain report</code>.</footer>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escape(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _header(document: Document) -> str:
    figures = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>"
        for value, what in document.figures
    )
    strip = f'<dl class="figures">{figures}</dl>' if figures else ""
    return (
        f"<header><h1>{escape(document.title)}</h1>\n"
        f'<p class="subtitle">{escape(document.subtitle)}</p>{strip}</header>'
    )


def _contents(document: Document) -> str:
    links = "".join(
        f'<li><a href="#s{number}">{escape(section.title)}</a></li>'
        for number, section in enumerate(document.sections)
    )
    return f'<nav aria-label="Contents"><ol>{links}</ol></nav>'


def _section(section: Section, number: int) -> str:
    parts = [f"<p>{_words(paragraph)}</p>" for paragraph in section.paragraphs]
    parts += [_findings(section)] if section.findings else []
    if section.charts:
        drawn = "".join(
            f"<figure>{draw(chart)}<figcaption>{escape(chart.title)}</figcaption></figure>"
            for chart in section.charts
        )
        parts.append(f'<div class="charts">{drawn}</div>')
    parts += [_table(table) for table in section.tables]
    if section.commands:
        lines = "\n".join(escape(command) for command in section.commands)
        parts.append(f'<pre tabindex="0"><code>{lines}</code></pre>')
    for words, path in section.links:
        parts.append(f'<p><a href="{escape(path)}">{escape(words)}</a></p>')
    body = "\n".join(parts)
    if section.is_minor:
        body = f"<details><summary>Show</summary>\n{body}\n</details>"
    return f'<section id="s{number}"><h2>{escape(section.title)}</h2>\n{body}\n</section>'


def _findings(section: Section) -> str:
    items = "".join(
        f"<li><p>{_words(what)}</p><p><strong>Try:</strong> {_words(attempt)}</p></li>"
        for what, attempt in section.findings
    )
    return f'<div class="findings"><h3>What limits it, and what to try</h3><ol>{items}</ol></div>'


def _words(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _table(table: Table) -> str:
    columns = list(zip(*table.rows, strict=True)) if table.rows else []
    right = [all(cell in _GAPS or _NUMBER.fullmatch(cell) for cell in column) for column in columns]
    if len(table.headers) == 1:
        lines = "\n".join(escape(row[0]) for row in table.rows)
        return f'<pre tabindex="0"><code>{lines}</code></pre>'

    def row(cells: tuple[str, ...], tag: str) -> str:
        aligned = (
            f'<{tag} class="number">' if right[index : index + 1] == [True] else f"<{tag}>"
            for index in range(len(cells))
        )
        return "".join(f"{a}{escape(c)}</{tag}>" for a, c in zip(aligned, cells, strict=True))

    head = row(table.headers, "th").replace("<th", '<th scope="col"')
    body = "".join(f"<tr{_chosen(table, cells)}>{row(cells, 'td')}</tr>" for cells in table.rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.title)}">'
        f"<table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _chosen(table: Table, cells: tuple[str, ...]) -> str:
    return ' class="chosen"' if table.headers[0] == "ask for" and cells[0] else ""
