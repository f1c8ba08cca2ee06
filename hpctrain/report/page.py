"""A document as one HTML file: no script, nothing from elsewhere, made for paper too. Pure."""

from __future__ import annotations

import re
from html import escape

from hpctrain.report.document import Document, ReportSection, ReportTable
from hpctrain.report.svg import CHART_STYLE, render_svg

__all__ = ["STYLE", "render_page"]

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


def _section(section: ReportSection, number: int) -> str:
    parts = [f"<p>{_words(paragraph)}</p>" for paragraph in section.paragraphs]
    parts += [_findings(section)] if section.findings else []
    if section.charts:
        drawn = "".join(
            f"<figure>{render_svg(chart)}<figcaption>{escape(chart.title)}</figcaption></figure>"
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


def _findings(section: ReportSection) -> str:
    items = "".join(
        f"<li><p>{_words(what)}</p><p><strong>Try:</strong> {_words(attempt)}</p></li>"
        for what, attempt in section.findings
    )
    return f'<div class="findings"><h3>What limits it, and what to try</h3><ol>{items}</ol></div>'


def _words(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _table(table: ReportTable) -> str:
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


def _chosen(table: ReportTable, cells: tuple[str, ...]) -> str:
    return ' class="chosen"' if table.headers[0] == "ask for" and cells[0] else ""


STYLE = (
    """
:root { --ink: #1c2128; --soft: #57606a; --line: #d8dee4; --ground: #f6f8fa; --accent: #0b5fa5;
  color-scheme: light; }
* { box-sizing: border-box; }
html { background: var(--ground); }
body { margin: 0; color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 32px 64px; background: #fff;
  min-height: 100vh; border-left: 1px solid var(--line); border-right: 1px solid var(--line); }
h1 { font-size: 34px; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 4px; }
h2 { font-size: 23px; line-height: 1.3; letter-spacing: -0.01em; margin: 56px 0 12px;
  padding-top: 20px; border-top: 1px solid var(--line); }
h3 { font-size: 16px; margin: 0 0 8px; }
p { margin: 0 0 12px; max-width: 78ch; overflow-wrap: anywhere; }
a { color: var(--accent); }
.subtitle { color: var(--soft); margin-bottom: 24px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 0 0 24px; }
.figures div { display: flex; flex-direction: column-reverse; justify-content: flex-end;
  border: 1px solid var(--line); border-top: 4px solid var(--accent); border-radius: 6px;
  padding: 12px 14px; }
.figures dd { margin: 0; font-size: 26px; font-weight: 650; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.figures dt { color: var(--soft); font-size: 13.5px; line-height: 1.35; overflow-wrap: anywhere; }
nav ol { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 0;
  font-size: 14.5px; }
.findings { border: 1px solid var(--line); border-left: 5px solid #c44601; border-radius: 6px;
  padding: 16px 20px 8px; margin: 16px 0 20px; }
.findings ol { margin: 0; padding-left: 22px; }
.findings li { margin-bottom: 12px; }
.findings p { margin: 0 0 2px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr));
  gap: 20px; margin: 16px 0 20px; }
.charts figure:only-child { max-width: 660px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: 14px 12px 10px;
  background: #fff; min-width: 0; }
figcaption { font-size: 14px; color: var(--soft); text-align: center; padding: 4px 8px 0; }
"""
    + CHART_STYLE
    + """.scroll { overflow-x: auto; margin: 16px 0; }
table { border-collapse: collapse; font-size: 14px; width: 100%;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 4px 0 8px; }
th, td { padding: 6px 12px 6px 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { border-bottom: 2px solid #8c959f; font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap; }
tr.chosen td { font-weight: 700; background: #eef5fc; }
pre { background: var(--ground); border: 1px solid var(--line); border-radius: 6px; margin: 12px 0;
  padding: 12px 16px; overflow-x: auto; font-size: 13.5px; line-height: 1.5; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 0.93em; }
details summary { cursor: pointer; color: var(--accent); margin-bottom: 8px; }
footer { margin-top: 56px; color: var(--soft); font-size: 13.5px; }
a:focus-visible, summary:focus-visible, .scroll:focus-visible, pre:focus-visible {
  outline: 3px solid var(--accent); outline-offset: 2px; }
@media (max-width: 640px) { main { padding: 24px 16px; border: 0; } h1 { font-size: 27px; } }
@media print {
  html, main { background: #fff; } main { max-width: none; padding: 0; border: 0; }
  body { font-size: 10.5pt; } nav { display: none; }
  h2 { break-after: avoid; margin-top: 24px; }
  details summary { display: none; }
  details::details-content { content-visibility: visible; }
  figure, .findings, tr { break-inside: avoid; }
  .charts { grid-template-columns: 1fr 1fr; }
  .scroll, pre { overflow: visible; } pre { white-space: pre-wrap; }
  table { font-size: 8pt; } th, td { padding: 3px 6px 3px 0; overflow-wrap: anywhere; }
  td.number, th.number { white-space: normal; } a { color: inherit; text-decoration: none; }
}
"""
)
