"""Floor 9: reports on benchmark results and runs, as a page, pictures and tables.

| module | what |
| --- | --- |
| results | result files, and the scaling studies in them |
| runs | run directories and traces, read, drawn and described |
| advice | what limits scaling and what to try; time to solution and node-hours (pure) |
| study | a study as sections, tables and charts (pure) |
| charts, drawing | what a picture shows; laid out as shapes (pure) |
| svg, pictures | the shapes as SVG, and as PNG and PDF |
| document, page | a report before it has a format; as Markdown, CSV, LaTeX and HTML (pure) |
| writing | from inputs to a document, and to files |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.report.advice import PlannedTraining
    from hpctrain.report.charts import Line, LineChart
    from hpctrain.report.pictures import write_chart
    from hpctrain.report.writing import FORMATS, write_report

__all__ = [
    "FORMATS",
    "Line",
    "LineChart",
    "PlannedTraining",
    "write_chart",
    "write_report",
]

__getattr__ = lazy(
    __name__,
    {
        ".advice": ("PlannedTraining",),
        ".charts": ("Line", "LineChart"),
        ".pictures": ("write_chart",),
        ".writing": (
            "FORMATS",
            "write_report",
        ),
    },
)
