"""A report before it has a format: sections of words, charts, tables and commands. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.report.charts import Chart

__all__ = ["Document", "Section", "Table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under headers; the first column names the row."""

    key: str
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    data: tuple[tuple[str, ...], ...] = ()
    """Headers and rows of bare numbers, for programs; empty: those above."""
    doubts: tuple[str, ...] = ()
    """Why its numbers should not be quoted; a table that travels alone must carry them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a report."""

    title: str
    paragraphs: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[str, ...] = ()
    """Shell commands that do it again."""
    links: tuple[tuple[str, str], ...] = ()
    """Words, and the file beside the report that they lead to."""
    findings: tuple[tuple[str, str], ...] = ()
    """What limits, and what to try."""
    is_minor: bool = False
    """Whether it is folded away on the page: what one looks up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    figures: tuple[tuple[str, str], ...]
    """The few numbers that everybody looks for: a value and what it is."""
    sections: tuple[Section, ...]

    def charts(self) -> Iterator[Chart]:
        """All charts in their order."""
        for section in self.sections:
            yield from section.charts

    def tables(self) -> Iterator[Table]:
        """All tables in their order."""
        for section in self.sections:
            yield from section.tables
