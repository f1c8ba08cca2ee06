"""Charts of a scaling study. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpctrain.report.charts import Bars, Chart, Line, LineChart
from hpctrain.report.points import PARTS, Estimate, Point, Study
from hpctrain.report.results import Bandwidth

__all__ = ["bandwidth_chart", "breakdown_chart", "layout_chart", "scaling_charts", "side_by_side"]


def scaling_charts(study: Study, key: str) -> list[Chart]:
    """Efficiency and speed-up over ranks, each with its ideal line."""
    ranks = sorted({point.num_ranks for point in study.measured})
    if len(ranks) < 2:
        return []
    span = tuple(float(n) for n in ranks)
    base = min(b.num_ranks for p in study.measured if (b := study.base_of(p)) is not None)
    flat = Line(label="ideal", x=span, y=(1.0,) * len(span), is_ideal=True)
    slope = Line(label="ideal", x=span, y=tuple(n / base for n in span), is_ideal=True)
    return [
        LineChart(
            key=f"{key}-efficiency",
            title=f"{_name(study)}: efficiency",
            description=_tell(study, study.efficiency, "efficiency", as_percent=True),
            x_label="ranks",
            y_label="efficiency",
            lines=(*_lines(study, study.efficiency), flat),
            x_scale="log2",
            is_percent=True,
        ),
        LineChart(
            key=f"{key}-speed-up",
            title=f"{_name(study)}: speed-up",
            description=_tell(study, study.speed_up, "speed-up", as_percent=False),
            x_label="ranks",
            y_label="speed-up",
            lines=(*_lines(study, study.speed_up), slope),
            x_scale="log2",
            y_scale="log2",
        ),
    ]


def _name(study: Study) -> str:
    kinds = {"weak": "weak scaling", "strong": "strong scaling", "layout": "layouts"}
    return f"{study.title}, {kinds.get(study.mode, study.mode)}"


def _lines(study: Study, measure: Callable[[Point], Estimate | None]) -> list[Line]:
    lines = []
    for style, engine in enumerate(study.engines):
        known = [(p.num_ranks, found) for p in study.of_engine(engine) if (found := measure(p))]
        if known:
            lines.append(_line(engine, [float(n) for n, _ in known], [e for _, e in known], style))
    return lines


def _line(label: str, x: Sequence[float], values: Sequence[Estimate], style: int) -> Line:
    return Line(
        label=label,
        x=tuple(x),
        y=tuple(value.median for value in values),
        low=tuple(value.low for value in values),
        high=tuple(value.high for value in values),
        style=style,
    )


def _tell(
    study: Study, measure: Callable[[Point], Estimate | None], what: str, *, as_percent: bool
) -> str:
    """The curve in words, for those who cannot see it."""
    told = []
    for engine in study.engines:
        known = [
            (p.num_ranks, found.median) for p in study.of_engine(engine) if (found := measure(p))
        ]
        said = [f"{100 * v:.0f} %" if as_percent else f"{v:.2f}" for _, v in known]
        pairs = [f"{text} on {n}" for (n, _), text in zip(known, said, strict=True)]
        told.append(f"{engine}: {', '.join(pairs)}")
    return f"{what.capitalize()} by number of ranks. {'; '.join(told)}."


def breakdown_chart(study: Study, key: str) -> Bars | None:
    """Where the time of a step goes, a bar for every point whose parts were timed."""
    every = (*study.asides, *study.points)
    timed = [point for point in every if point.split_s and point.step_s is not None]
    if not timed:
        return None
    named = [part for part in PARTS if any(point.split_s.get(part) for point in timed)]
    parts = tuple(
        (_PART_NAMES.get(part, part), tuple(1000 * p.split_s.get(part, 0.0) for p in timed))
        for part in named
    )
    return Bars(
        key=f"{key}-breakdown",
        title=f"{_name(study)}: where a step's time goes",
        description="Stacked milliseconds of a step. "
        + "; ".join(f"{name}: {', '.join(f'{v:.2f}' for v in values)}" for name, values in parts),
        y_label=f"ms a {study.unit}",
        labels=tuple(f"{point.engine} {point.layout.replace(' ', '')}" for point in timed),
        parts=parts,
        styles=tuple(PARTS.index(part) for part in named),
    )


_PART_NAMES = {"exchange": "exchange (not hidden)", "straggling": "waiting for the slowest"}


def side_by_side(study: Study, key: str) -> Bars | None:
    """All engines at the largest number of ranks that most of them have."""
    if len(study.engines) < 2:
        return None
    counts = {n: len({p.engine for p in study.measured if p.num_ranks == n}) for n in _ranks(study)}
    shared = [n for n, count in counts.items() if count == max(counts.values()) and count > 1]
    if not shared:
        return None
    ranks = max(shared)
    points = [p for p in study.measured if p.num_ranks == ranks]
    timed = [(p.engine, p.step_s.scaled(1000)) for p in points if p.step_s]
    return Bars(
        key=f"{key}-engines",
        title=f"{_name(study)}: engines on {ranks} ranks",
        description="Milliseconds a step: "
        + ", ".join(f"{engine} {step.median:.2f}" for engine, step in timed),
        y_label=f"ms a {study.unit}",
        labels=tuple(engine for engine, _ in timed),
        parts=(("step", tuple(step.median for _, step in timed)),),
        low=tuple(step.low for _, step in timed),
        high=tuple(step.high for _, step in timed),
        styles=tuple(study.engines.index(engine) for engine, _ in timed),
    )


def _ranks(study: Study) -> list[int]:
    return sorted({point.num_ranks for point in study.measured})


def layout_chart(study: Study, key: str) -> LineChart | None:
    """Step time over ways to divide a node's cores, against one process that has them all."""
    lines = []
    for style, engine in enumerate(study.engines):
        points = [(p.num_ranks, p.step_s.scaled(1000)) for p in study.of_engine(engine) if p.step_s]
        lines.append(_line(engine, [float(n) for n, _ in points], [e for _, e in points], style))
    if not any(line.x for line in lines):
        return None
    span = tuple(float(n) for n in _ranks(study))
    for one in study.whole_nodes:
        if one.step_s is None:
            continue
        label = f"one process, {one.num_threads} threads"
        flat = (1000 * one.step_s.median,) * len(span)
        lines.append(Line(label=label, x=span, y=flat, is_ideal=True))
    told = [
        f"{line.label}: "
        + ", ".join(f"{y:.1f} ms on {x:g}" for x, y in zip(line.x, line.y, strict=True))
        for line in lines
    ]
    return LineChart(
        key=f"{key}-layout",
        title=f"{study.title}: ranks x threads on one node, the same global batch",
        description=f"Milliseconds a step by number of ranks. {'; '.join(told)}.",
        x_label="ranks (the node's cores are divided among them)",
        y_label=f"ms a {study.unit}",
        lines=tuple(lines),
        x_scale="log2",
    )


def bandwidth_chart(bandwidths: Sequence[Bandwidth], key: str) -> LineChart:
    """How fast collectives move bytes, against the copy or the link that limits them."""
    lines = [
        Line(
            label=f"{one.name} (the limit)",
            x=one.sizes,
            y=tuple(speed.median for speed in one.gb_per_s),
            is_ideal=True,
        )
        if one.is_limit
        else _line(one.name, one.sizes, one.gb_per_s, style)
        for style, one in enumerate(sorted(bandwidths, key=lambda one: one.is_limit))
    ]
    told = [f"{line.label}: " + ", ".join(f"{y:.2f}" for y in line.y) for line in lines]
    return LineChart(
        key=f"{key}-bandwidth",
        title="Allreduce: bandwidth over message size",
        description=f"GB/s from the smallest to the largest message. {'; '.join(told)}.",
        x_label="bytes",
        y_label="bus bandwidth, GB/s",
        lines=tuple(lines),
        x_scale="bytes",
        y_scale="log10",
    )
