"""Reports on benchmark results and runs, as a page, pictures and tables.

| module | what |
| --- | --- |
| results, runs | read result files, run directories and traces |
| points | a scaling study: efficiency, speed-up, serial fraction (pure) |
| advice | what limits scaling, and what to try (pure) |
| asking | time to solution and node-hours (pure) |
| composing, study_section, run_section | from those to a document (pure) |
| charts, study_charts, run_charts | what pictures show (pure) |
| axes, shapes, svg | charts as SVG (pure) |
| pictures | charts as PNG and PDF |
| page, plain | documents as HTML, Markdown, CSV and LaTeX (pure) |
"""

from __future__ import annotations

from hpctrain.report.asking import Wish
from hpctrain.report.writing import FORMATS, write_report

__all__ = ["FORMATS", "Wish", "write_report"]
