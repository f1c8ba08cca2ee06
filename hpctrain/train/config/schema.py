"""The JSON schema of a configuration, for editors that check TOML as it is written. Pure."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from hpctrain.tables import Key, keys_of
from hpctrain.train.config.root import SECTIONS

__all__ = ["json_schema"]

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def json_schema() -> dict[str, Any]:
    """The schema, made from the dataclasses."""
    sections: dict[str, Any] = {}
    needed = []
    for title, cls in SECTIONS.items():
        keys = keys_of(cls)
        required = [key.name for key in keys if key.is_required]
        sections[title] = {
            "type": "object",
            "description": (cls.__doc__ or "").strip(),
            "properties": {key.name: _describe(key) for key in keys},
            "additionalProperties": False,
            **({"required": required} if required else {}),
        }
        needed += [title] if required or title == "data" else []
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpctrain train",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
        "required": needed,
    }


def _describe(key: Key) -> dict[str, Any]:
    kinds = [_kind(key, part) for part in key.members]
    described: dict[str, Any] = dict(kinds[0]) if len(kinds) == 1 else {"anyOf": kinds}
    described["description"] = key.meaning
    if not key.is_required and key.default is not None:
        default = key.default
        described["default"] = list(default) if isinstance(default, tuple) else default
    return described


def _kind(key: Key, part: Any) -> dict[str, Any]:
    if get_origin(part) is Literal:
        return {"enum": list(get_args(part))}
    if get_origin(part) is tuple:
        return {"type": "array", "items": _kind(key, get_args(part)[0])}
    if get_origin(part) is dict:
        return {"type": "object"}
    described: dict[str, Any] = {"type": _TYPES[part]}
    if part in (int, float):
        bounds = {
            "minimum": key.low,
            "exclusiveMinimum": key.above,
            "maximum": key.high,
            "exclusiveMaximum": key.below,
        }
        described |= {name: bound for name, bound in bounds.items() if bound is not None}
    if part is str and key.form is not None:
        described["pattern"] = f"^({key.form})$"
    return described
