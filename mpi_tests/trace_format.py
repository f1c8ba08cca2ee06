"""What is wrong with a trace, by Google's description of the trace event format and its reader.

Written apart from what writes traces: fields that each kind of event must have, slices of a thread
that nest, pairs of asynchronous events, and arrows that begin and end inside slices. Perfetto, as
its sources have it, asks for more: events in the order of time, arrows named by numbers, processes
and threads from 1 on (0 is the kernel's), and an arrow's second slice not begun before its first.
"""

from __future__ import annotations

from collections import defaultdict
from numbers import Real

METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
}
NEEDS = {
    "X": ("name", "cat", "pid", "tid", "ts", "dur"),
    "M": ("name", "pid", "tid", "args"),
    "s": ("name", "cat", "pid", "tid", "ts", "id"),
    "f": ("name", "cat", "pid", "tid", "ts", "id", "bp"),
    "b": ("name", "cat", "pid", "tid", "ts", "id"),
    "e": ("name", "cat", "pid", "tid", "ts", "id"),
}


def complaints(document):
    """All that is wrong; an empty list when nothing is."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["the object form has a list traceEvents"]
    wrong = []
    if document.get("displayTimeUnit") not in ("ms", "ns"):
        wrong.append("displayTimeUnit is ms or ns")
    records = document["traceEvents"]
    for record in records:
        wrong += _fields(record)
    if wrong:
        return wrong
    return _order(records) + _nesting(records) + _pairs(records) + _arrows(records)


def _fields(record):
    kind = record.get("ph")
    if kind not in NEEDS:
        return [f"unknown kind {kind!r}"]
    wrong = [f"{kind}: no {name}" for name in NEEDS[kind] if name not in record]
    for name in ("ts", "dur"):
        if name in record and (not isinstance(record[name], Real) or record[name] < 0):
            wrong.append(f"{kind}: {name} is {record[name]!r}")
    wrong += [
        f"{name} is {record[name]!r}, no whole number from 1 on"
        for name in ("pid", "tid")
        if type(record[name]) is not int or record[name] < 1
    ]
    if kind in "sf" and type(record.get("id")) is not int:
        wrong.append(f"an arrow's id is a number, not {record.get('id')!r}")
    if kind == "M" and METADATA.get(record["name"]) not in record.get("args", {}):
        wrong.append(f"metadata {record['name']} without its argument")
    if kind == "f" and record.get("bp") != "e":
        wrong.append("an arrow ends in the slice around it: bp is e")
    return wrong


def _order(records):
    times = [record["ts"] for record in records if "ts" in record]
    return [] if times == sorted(times) else ["events are not in the order of time"]


def _nesting(records):
    """Slices of one thread either contain each other or have nothing in common."""
    wrong = []
    for slices in _slices(records).values():
        stack = []
        for begin, end, name in slices:
            while stack and stack[-1][1] <= begin + 1e-6:  # below a nanosecond
                stack.pop()
            if stack and end > stack[-1][1] + 1e-6:
                wrong.append(f"{name} and {stack[-1][2]} overlap")
            stack.append((begin, end, name))
    return wrong


def _slices(records):
    threads = defaultdict(list)
    for r in records:
        if r["ph"] == "X":
            threads[r["pid"], r["tid"]].append((r["ts"], r["ts"] + r["dur"], r["name"]))
    return {key: sorted(found, key=lambda s: (s[0], -s[1])) for key, found in threads.items()}


def _pairs(records):
    flying = defaultdict(list)
    for r in records:
        if r["ph"] in "be":
            flying[r["cat"], r["id"], r["name"]].append((r["ts"], r["ph"]))
    return [
        f"asynchronous {key}: {found}"
        for key, found in flying.items()
        if [kind for _, kind in sorted(found)] != ["b", "e"]
    ]


def _arrows(records):
    """One pass in the order of the file, as a reader that keeps what is open on each thread."""
    wrong, begun, ended = [], {}, set()
    opened = defaultdict(list)
    for r in records:
        stack = opened[r["pid"], r["tid"]]
        while stack and stack[-1][1] <= r.get("ts", 0.0):
            stack.pop()
        if r["ph"] == "X":
            stack.append((r["ts"], r["ts"] + r["dur"]))
        if r["ph"] not in "sf":
            continue
        arrow = (r["cat"], r["id"], r["name"])
        if not stack:
            wrong.append(f"arrow {arrow} ({r['ph']}) is in no slice")
        elif r["ph"] == "s" and arrow in begun:
            wrong.append(f"arrow {arrow} begins twice")
        elif r["ph"] == "s":
            begun[arrow] = stack[-1]
        elif arrow not in begun or arrow in ended:
            wrong.append(f"arrow {arrow} ends before it begins, or twice")
        else:
            ended.add(arrow)
            if stack[-1][0] < begun[arrow][0] or stack[-1][0] < begun[arrow][1] - 1e-6:
                wrong.append(f"arrow {arrow} goes back in time")
    return wrong + [f"arrow {arrow} does not end" for arrow in begun.keys() - ended]
