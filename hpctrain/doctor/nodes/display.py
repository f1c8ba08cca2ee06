"""Shows what the comparison of nodes found: a table, or JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hpctrain import __version__, log
from hpctrain.doctor.nodes.outliers import Outlier
from hpctrain.doctor.nodes.report import NodeLink, NodeReport

__all__ = ["ExaminedJob", "as_json", "as_text"]

_MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ExaminedJob:
    """What the title says."""

    num_ranks: int
    mpi: str


def as_json(
    job: ExaminedJob,
    nodes: Sequence[NodeReport],
    links: Sequence[NodeLink],
    outliers: Sequence[Outlier],
) -> str:
    """Write everything as one JSON object."""
    hosts = [node.host for node in nodes]
    value = {
        "hpctrain": __version__,
        "status": "broken" if outliers else "ok",
        "mpi": job.mpi,
        "num_ranks": job.num_ranks,
        "nodes": [asdict(node) for node in nodes],
        "links": [
            {
                "hosts": [hosts[link.a], hosts[link.b]],
                "bandwidth": link.bandwidth,
                "latency": link.latency,
            }
            for link in links
        ],
        "outliers": [asdict(outlier) for outlier in outliers],
        "units": {
            "gflops": "GFLOP/s",
            "memory": "GB/s",
            "network": "MB/s",
            "bandwidth": "MB/s",
            "latency": "us",
        },
    }
    return json.dumps(value, indent=2)


def as_text(
    job: ExaminedJob,
    nodes: Sequence[NodeReport],
    links: Sequence[NodeLink],
    outliers: Sequence[Outlier],
) -> str:
    """Draw a table of the nodes, and under it the outliers with their cures."""
    named = {host for outlier in outliers for host in outlier.hosts}
    shown = sorted(nodes, key=lambda node: node.host not in named)[:_MOST_ROWS]
    rows = [
        (
            node.host,
            node.num_ranks,
            node.num_threads,
            node.device,
            f"{node.gflops:.1f}",
            f"{node.memory:.1f}",
            _number(node.network, "{:.0f}"),
            _number(node.latency, "{:.0f}"),
            _number(node.clock_s, "{:+.4f}"),
            "<" if node.host in named else "",
        )
        for node in sorted(shown, key=nodes.index)
    ]
    headers = (
        "node", "ranks", "threads", "device", "GFLOP/s", "memory GB/s", "link MB/s", "latency us",
        "clock s", "",
    )  # fmt: skip
    counts = f"{_count(job.num_ranks, 'rank')} on {_count(len(nodes), 'node')}"
    title = f"{counts}, {job.mpi}, {_count(len(links), 'link')} measured"
    lines = [log.table(headers, rows, title=title)]
    if len(nodes) > len(shown):
        lines.append(f" ... and {len(nodes) - len(shown)} more nodes, none of them listed below")
    for outlier in outliers:
        lines += [f"outlier  {outlier.text}", f"         fix: {outlier.cure}"]
    if not outliers:
        lines.append("no outliers" if len(nodes) > 1 else "one node: nothing to compare it with")
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
