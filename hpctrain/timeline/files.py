"""Reading what the ranks recorded; times come out on rank 0's clock."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.timeline.clocks import Offset, correct
from hpctrain.timeline.recording import SCHEMA

__all__ = ["Event", "RankTrace", "read_folder", "read_rank"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that a thread of a rank did; times in ns on rank 0's clock."""

    kind: str
    """`phase`, `step`, `collective` or `post`."""
    name: str
    thread: int
    """From 0, in the order in which a rank's threads first did something."""
    begin_ns: float
    end_ns: float
    group: str = ""
    number: int = 0
    """Of a collective: which one of its group, the same on all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """All events of a rank."""

    rank: int
    size: int
    host: str
    node_rank: int
    events: tuple[Event, ...]
    error_ns: float
    """How far its times may be off rank 0's."""
    drift_ns: float | None
    """How far its clock drifted against rank 0's during the run; None: unknown."""
    num_dropped: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it was recorded to the end."""
        return self.drift_ns is not None


def read_folder(folder: Path) -> list[RankTrace]:
    """All ranks that recorded into a folder, in their order.

    Raises:
        ConfigError: there are none, or they are of different runs.
    """
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise ConfigError(
            f"{folder} has no rank-*.jsonl: no rank recorded a trace there; run with `hpctrain "
            "run --trace "
            f"{folder}`, and let the script call hpctrain.distribute or hpctrain.connect"
        )
    traces = [read_rank(path.read_text(encoding="utf-8"), path.name) for path in paths]
    # Files of more ranks may be left from an earlier run into the same folder.
    size = traces[0].size
    return [trace for trace in traces if trace.rank < size and trace.size == size]


def read_rank(text: str, name: str) -> RankTrace:
    """The events in a rank's file, which may have been cut off. Pure.

    Raises:
        ConfigError: it is no such file.
    """
    lines = [line for line in map(_parse, text.splitlines()) if line is not None]
    if not lines or not isinstance(lines[0], dict) or lines[0].get("schema") != SCHEMA:
        raise ConfigError(
            f"{name} is not the trace of a rank ({SCHEMA}); remove it from the folder"
        )
    header = lines[0]
    last = lines[-1] if isinstance(lines[-1], dict) and "end" in lines[-1] else {}
    begin = Offset(**header["clock"])
    end = Offset(**last["clock"]) if last.get("clock") else None
    threads: dict[int, int] = {}
    written = [event for line in lines if isinstance(line, list) for event in line]
    events = tuple(_event(event, threads, begin, end) for event in written)
    return RankTrace(
        rank=header["rank"],
        size=header["size"],
        host=header["host"],
        node_rank=header["node_rank"],
        events=events,
        error_ns=max(begin.error_ns, end.error_ns if end else 0.0),
        drift_ns=None if end is None else end.ns - begin.ns,
        num_dropped=last.get("num_dropped", 0),
    )


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None  # the last line of a rank that was killed while it wrote


def _event(line: list[Any], threads: dict[int, int], begin: Offset, end: Offset | None) -> Event:
    kind, name, thread, since, until = line
    group, number = "", 0
    if kind == "collective":
        group, text, name = name.split("\n", 2)
        number = int(text)
    return Event(
        kind=kind,
        name=name,
        thread=threads.setdefault(thread, len(threads)),
        begin_ns=correct(since, begin, end),
        end_ns=correct(until, begin, end),
        group=group,
        number=number,
    )
