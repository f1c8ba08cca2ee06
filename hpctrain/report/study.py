"""A scaling study as sections, tables and charts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hpctrain.log import format_bytes, format_hours
from hpctrain.report.advice import PlannedTraining, Quote, advise, describe_scaling, price
from hpctrain.report.charts import Bars, Chart, Line, LineChart, number_text
from hpctrain.report.document import ReportSection, ReportTable
from hpctrain.report.results import PARTS, Bandwidth, Estimate, Study, StudyPoint

__all__ = [
    "bandwidth_chart",
    "breakdown_chart",
    "layout_chart",
    "scaling_charts",
    "side_by_side",
    "study_sections",
]


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


def _lines(study: Study, measure: Callable[[StudyPoint], Estimate | None]) -> list[Line]:
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
    study: Study, measure: Callable[[StudyPoint], Estimate | None], what: str, *, as_percent: bool
) -> str:
    """A text description of the curve."""
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


_MILLION = 1e6


def study_sections(study: Study, key: str, planned: PlannedTraining | None) -> list[ReportSection]:
    """Curves, breakdown, what limits it, and what it costs."""
    is_layout = study.mode == "layout"
    charts = (
        [layout_chart(study, key)]
        if is_layout
        else [*scaling_charts(study, key), breakdown_chart(study, key), side_by_side(study, key)]
    )
    findings = tuple((f.what, f.attempt) for f in advise(study))
    words = [_best_layout(study) if is_layout else describe_scaling(study), *_gaps(study)]
    words += list(study.fits)
    if not findings and not is_layout:
        words.append("The report's rules found nothing that costs much time.")
    section = ReportSection(
        title=study.title if is_layout else f"{study.title}: {study.mode} scaling",
        paragraphs=tuple(words),
        charts=tuple(chart for chart in charts if chart is not None),
        tables=_tables(study, key),
        findings=findings,
    )
    costs = None if is_layout else _cost_section(study, key, planned)
    return [section, costs] if costs else [section]


def _gaps(study: Study) -> list[str]:
    """What the report cannot show, said instead of left out."""
    said = []
    if study.mode != "layout":
        without = [p for p in study.measured if not p.split_s]
        if without and len(without) == len(study.measured):
            said.append("The parts of a step were not timed in this result: there is no breakdown.")
        elif without:
            names = ", ".join(f"{p.engine} on {p.num_ranks}" for p in without)
            said.append(f"No breakdown of {names}: the parts of a step were not timed there.")
        if not study.baselines:
            said.append(
                "There is no undistributed baseline: efficiency is relative to each engine's "
                "fewest ranks, and hides the basic cost of distributing."
            )
    return [*said, *study.doubts, *study.notes]


def _best_layout(study: Study) -> str:
    timed = [(p.step_s.median, p) for p in study.measured if p.step_s]
    if not timed:
        return "No layout was measured."
    seconds, best = min(timed, key=lambda pair: pair[0])
    one = study.node_of(best)
    text = (
        f"The fastest layout is {best.engine} with {best.layout} (ranks x threads): "
        f"{1000 * seconds:.1f} ms a step"
    )
    if one is None or one.step_s is None:
        return f"{text}."
    if not one.step_s.is_repeated:
        return f"{text}; one process with all cores took {1000 * one.step_s.median:.1f} ms."
    ratio = one.step_s.median / seconds
    verdict = (
        f"{ratio:.2f} times as fast as one process with all cores"
        if ratio >= 1
        else f"slower than one process with all cores ({1000 * one.step_s.median:.1f} ms): on this "
        "node, distributing does not pay"
    )
    return f"{text}, {verdict}."


def _tables(study: Study, key: str) -> tuple[ReportTable, ...]:
    """Speed in one table, what follows and what it needs in another: neither is too wide."""
    every = [*study.asides, *study.points]
    names = [
        ("engine", [p.engine for p in every]),
        ("ranks x threads", [p.layout for p in every]),
    ]
    speed = [
        ("nodes", [str(p.num_nodes) for p in every]),
        ("global batch", [str(p.global_batch or "") for p in every]),
        (f"ms a {study.unit}", [_milliseconds(p) for p in every]),
        ("samples/s", [f"{p.samples_per_s:.0f}" if p.samples_per_s else "" for p in every]),
    ]
    ratios = [
        ("speed-up", [_plain(study, p) for p in every]),
        ("efficiency", [_percents(study, p) for p in every]),
    ]
    more = [
        ("over one process, all cores", [_over_node(study, p) for p in every]),
        ("Karp-Flatt", [_fraction(study, p) for p in every]),
        ("S / sequential s", [_number(p.per_sequential_s) for p in every]),
        ("S / M parameters", [_number(p.per_million_parameters) for p in every]),
    ]
    needs = [
        ("bytes sent", [format_bytes(p.bytes_sent) if p.bytes_sent else "" for p in every]),
        ("memory a rank", [format_bytes(p.memory_bytes) if p.memory_bytes else "" for p in every]),
    ]
    is_layout = study.mode == "layout"
    points = _table(
        f"{key}-points",
        f"{study.title}: all points",
        names + speed + ([] if is_layout else ratios),
        _numbers(study, every),
    )
    rest = _table(
        f"{key}-needs",
        f"{study.title}: ratios, and what it needs",
        names + ([] if is_layout else more) + needs,
    )
    kept = (points, rest) if len(rest.headers) > len(names) else (points,)
    return tuple(replace(table, doubts=study.doubts) for table in kept)


def _table(
    key: str,
    title: str,
    columns: list[tuple[str, list[str]]],
    data: tuple[tuple[str, ...], ...] = (),
) -> ReportTable:
    """A table without columns that have nothing in them."""
    kept = [column for column in columns if any(column[1])]
    return ReportTable(
        key=key,
        title=title,
        headers=tuple(name for name, _ in kept),
        rows=tuple(zip(*(values for _, values in kept), strict=True)),
        data=data,
    )


def _numbers(study: Study, points: list[StudyPoint]) -> tuple[tuple[str, ...], ...]:
    """The same in bare numbers, with intervals and parts in separate columns."""
    headers = ["engine", "num_ranks", "num_threads", "num_nodes", "global_batch"]
    headers += [f"{study.unit}_s{tail}" for tail in ("", "_low", "_high")]
    headers += ["samples_per_s"]
    headers += [f"efficiency{tail}" for tail in ("", "_low", "_high")]
    headers += [f"over_node{tail}" for tail in ("", "_low", "_high")]
    headers += [f"{part}_s" for part in PARTS]
    headers += ["bytes_sent", "memory_bytes", "failure"]
    rows = []
    for point in points:
        found = None if _is_aside(study, point) else study.efficiency(point)
        numbers: list[object] = [point.global_batch, *_three(point.step_s), point.samples_per_s]
        numbers += [*_three(found), *_three(point.over_node)]
        numbers += [*(point.split_s.get(part) for part in PARTS)]
        numbers += [point.bytes_sent, point.memory_bytes, point.failure]
        place = [point.engine, point.num_ranks, point.num_threads, point.num_nodes]
        rows.append(tuple("" if v is None else str(v) for v in [*place, *numbers]))
    return (tuple(headers), *rows)


def _three(value: Estimate | None) -> tuple[float | None, ...]:
    if value is None or not value.is_repeated:
        return (None if value is None else value.median, None, None)
    return (value.median, value.low, value.high)


def _number(value: float | None) -> str:
    return "" if value is None else number_text(value)


def _in_full(value: float) -> str:
    """A table has one unit: thousands stay thousands."""
    return number_text(value) if value < 1000 else f"{value:.0f}"


def _milliseconds(point: StudyPoint) -> str:
    if point.step_s is None:
        return "failed"
    step = point.step_s.scaled(1000)
    low, middle, high = (_in_full(value) for value in (step.low, step.median, step.high))
    return f"{middle} [{low}, {high}]" if step.is_repeated else middle


def _plain(study: Study, point: StudyPoint) -> str:
    found = None if _is_aside(study, point) else study.speed_up(point)
    return f"{found.median:.2f}" if found else ""


def _percents(study: Study, point: StudyPoint) -> str:
    found = None if _is_aside(study, point) else study.efficiency(point)
    if found is None:
        return ""
    text = f"{100 * found.median:.1f} %"
    interval = f" [{100 * found.low:.1f}, {100 * found.high:.1f}]"
    return text + interval * found.is_repeated


def _over_node(study: Study, point: StudyPoint) -> str:
    found = None if _is_aside(study, point) else point.over_node
    if found is None:
        return ""
    return f"{found.median:.2f}" + f" [{found.low:.2f}, {found.high:.2f}]" * found.is_repeated


def _fraction(study: Study, point: StudyPoint) -> str:
    found = None if _is_aside(study, point) else study.serial_fraction(point)
    return "" if found is None else f"{found:.3f}"


def _is_aside(study: Study, point: StudyPoint) -> bool:
    return any(point is one for one in study.asides)


def _cost_section(study: Study, key: str, planned: PlannedTraining | None) -> ReportSection | None:
    """Time to solution and node-hours; for a million samples where the number was not given."""
    asks = price(study, planned or PlannedTraining(num_samples=_MILLION, reserve=0.0))
    if not asks:
        return None
    headers = ["ask for", "engine", "ranks x threads", "nodes", "time to solution"]
    headers += ["node-hours", "core-hours"]
    rows = [
        (
            "this" if ask.is_proposed else "",
            ask.point.engine,
            ask.point.layout,
            str(ask.point.num_nodes),
            format_hours(ask.hours),
            f"{ask.node_hours:.3g}",
            f"{ask.core_hours:.3g}",
        )
        for ask in asks
    ]
    table = ReportTable(
        key=f"{key}-cost",
        title=f"{study.title}: time and node-hours",
        headers=tuple(headers),
        rows=tuple(rows),
        doubts=study.doubts,
    )
    chosen = next((ask for ask in asks if ask.is_proposed), None)
    words = []
    if planned is None:
        words.append(
            "Times and node-hours are for one million samples: pass --samples N (samples x epochs) "
            "for the whole training, and --runs for as many of them."
        )
    elif chosen is not None:
        words.append(_ask_words(study, chosen, planned))
        others = sum(ask.hours < chosen.hours for ask in asks)
        words.append(
            "It is the fastest of all measured points, and its node-hours are within 1.25 times "
            "the fewest."
            if not others
            else f"It is the fastest point within 1.25 times the fewest node-hours: {others} "
            f"point{'s' * (others > 1)} would be faster and cost more than that."
        )
    words.append(
        "Only measured points are priced; `hpctrain plan` predicts larger numbers of ranks."
    )
    return ReportSection(
        title=f"{study.title}: time to solution", paragraphs=tuple(words), tables=(table,)
    )


def _ask_words(study: Study, chosen: Quote, planned: PlannedTraining) -> str:
    point = chosen.point
    nodes = f"{point.num_nodes} node{'s' * (point.num_nodes > 1)}"
    ranks = f"{point.num_ranks} rank{'s' * (point.num_ranks > 1)} of {point.engine}"
    if _is_aside(study, point):
        ranks = f"one process with {point.num_threads} thread{'s' * (point.num_threads > 1)}"
    return (
        f"Ask for {chosen.node_hours:.3g} node-hours: {planned.runs} training"
        f"{'s' * (planned.runs > 1)} of {number_text(planned.num_samples)} samples, "
        f"{format_hours(chosen.hours)} each on {nodes} ({ranks}), and {100 * planned.reserve:.0f} "
        "% in reserve for queues, restarts and mistakes."
    )
