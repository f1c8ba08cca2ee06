"""What a result contains, and the name of its file. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["SCHEMA", "file_name", "parse_file_name", "upgrade", "validate"]

SCHEMA = 2
"""Raised whenever a result of the new form could be misread by a reader of the old one."""

_NUMBER = (int, float)
_TOP: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "benchmark": str,
    "date": str,
    "machine": dict,
    "settings": dict,
    "series": list,
    "ratios": list,
    "blocks": list,
    "num_thrown_away": int,
    "num_noisy": int,
}
_MACHINE: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "cpu": str,
    "arch": str,
    "cores": int,
    "memory_gib": _NUMBER,
    "system": str,
    "python": str,
    "mpi": str,
    "torch": str,
    "mpi4py": str,
    "horovod": (str, type(None)),
    "commit": (str, type(None)),
    "modified": bool,
}
_SERIES: dict[str, type | tuple[type, ...]] = {
    "case": str,
    "variant": str,
    "kind": str,
    "num_ranks": int,
    "num_threads": int,
    "seconds": list,
    "counts": dict,
    "outcome": dict,
    "metrics": dict,
}
_RATIO: dict[str, type | tuple[type, ...]] = {
    "case": str,
    "variant": str,
    "baseline": str,
    "median": _NUMBER,
    "low": _NUMBER,
    "high": _NUMBER,
    "coverage": _NUMBER,
    "num_blocks": int,
}
_BLOCK: dict[str, type | tuple[type, ...]] = {
    "case": str,
    "order": list,
    "foreign_load": _NUMBER,
    "kept": bool,
    "noisy": bool,
}
_LISTS = {"series": _SERIES, "ratios": _RATIO, "blocks": _BLOCK}
_FILE = re.compile(r"(?P<benchmark>\w+)-(?P<date>\d{4}-\d\d-\d\d)-(?P<machine>[\w.-]+)\.json")


def validate(result: object) -> list[str]:
    """Say what is wrong with a result; an empty list when nothing is."""
    if not isinstance(result, dict):
        return ["a result is an object"]
    wrong = _misfits(result, _TOP, "result")
    if wrong:
        return wrong
    if result["schema"] != SCHEMA:
        return [f"schema {result['schema']} is not {SCHEMA}"]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]):
        wrong.append(f"date {result['date']!r} is not YYYY-MM-DD")
    wrong += _misfits(result["machine"], _MACHINE, "machine")
    for name, fields in _LISTS.items():
        for index, item in enumerate(result[name]):
            wrong += _misfits(item, fields, f"{name}[{index}]")
    return wrong or _contradictions(result)


def upgrade(result: object) -> object:
    """Bring a result of schema 1, where all variants had one layout, into today's form."""
    if not isinstance(result, dict) or result.get("schema") != 1:
        return result
    settings = {**result["settings"]}
    layout = {
        "num_ranks": settings.pop("num_ranks"),
        "num_threads": settings.pop("threads_per_rank"),
    }
    series = [{**item, "kind": item["variant"], **layout} for item in result["series"]]
    return {**result, "schema": SCHEMA, "settings": settings, "series": series}


def _misfits(item: object, fields: Mapping[str, type | tuple[type, ...]], where: str) -> list[str]:
    if not isinstance(item, dict):
        return [f"{where} is no object"]
    wrong = [f"{where}: {name} is missing" for name in fields if name not in item]
    for name, kind in fields.items():
        is_flag = isinstance(item.get(name), bool) and kind is not bool
        if name in item and (is_flag or not isinstance(item[name], kind)):
            wrong.append(f"{where}: {name} is {item[name]!r}")
    return wrong


def _contradictions(result: Mapping[str, Any]) -> list[str]:
    """What does not fit together, each part being well formed."""
    wrong = []
    kept: dict[str, int] = {}
    for block in result["blocks"]:
        kept[block["case"]] = kept.get(block["case"], 0) + block["kept"]
    for item in result["series"]:
        where = f"{item['case']}, {item['variant']}"
        if len(item["seconds"]) != kept.get(item["case"], 0):
            wrong.append(
                f"{where}: {len(item['seconds'])} times in {kept.get(item['case'])} blocks"
            )
        if not all(isinstance(s, _NUMBER) and s > 0 for s in item["seconds"]):
            wrong.append(f"{where}: a time is not above 0")
    known = {(item["case"], item["variant"]) for item in result["series"]}
    for ratio in result["ratios"]:
        for name in (ratio["variant"], ratio["baseline"]):
            if (ratio["case"], name) not in known:
                wrong.append(f"ratio of {name} in {ratio['case']}, which was not measured")
        if not ratio["low"] <= ratio["median"] <= ratio["high"]:
            wrong.append(f"{ratio['case']}, {ratio['variant']}: the median is outside its interval")
    thrown = sum(not block["kept"] for block in result["blocks"])
    noisy = sum(block["kept"] and block["noisy"] for block in result["blocks"])
    if (thrown, noisy) != (result["num_thrown_away"], result["num_noisy"]):
        wrong.append(f"{thrown} blocks thrown away and {noisy} noisy ones; it says otherwise")
    return wrong


def file_name(result: Mapping[str, Any]) -> str:
    """The name of a result's file: benchmark, date, kind of machine; and ranks, if more than 2."""
    ranks = {item["num_ranks"] for item in result["series"]}
    tail = f"-{max(ranks)}ranks" if len(ranks) == 1 and max(ranks) > 2 else ""
    return f"{result['benchmark']}-{result['date']}-{result['machine']['id']}{tail}.json"


def parse_file_name(name: str) -> tuple[str, str, str] | None:
    """Benchmark, date, and machine with ranks, of a file's name; None when it is no result."""
    match = _FILE.fullmatch(name)
    return (match["benchmark"], match["date"], match["machine"]) if match else None
