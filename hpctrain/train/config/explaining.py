"""What keys mean: in words, as documentation tables, as a template, as a JSON schema. Pure."""

from __future__ import annotations

import textwrap
from typing import Any, Literal, get_args, get_origin

from hpctrain.errors import ConfigError
from hpctrain.tables import Key, keys_of, nearest, write_value
from hpctrain.train.config.file import SECTIONS, all_keys

__all__ = ["explain", "json_schema", "list_keys", "markdown", "template"]


_EXAMPLES = {
    "model.build": "my_model:build",
    "data.build": "my_data:load",
    "train.global_batch": 256,
    "train.loss": "cross_entropy",
    "optimizer.lr": 0.001,
}
"""Template values for keys without a default, or whose default alone is not valid."""


def explain(name: str) -> str:
    """A key's meaning, kind, default and range; or a section's keys.

    Raises:
        ConfigError: there is no such key; with the nearest.
    """
    if name in SECTIONS:
        return list_keys(name)
    keys = all_keys()
    if name not in keys:
        full = [each for each in keys if each.endswith(f".{name}")]
        if len(full) == 1:
            name = full[0]
        else:
            guess = full or [each for each in [nearest(name, keys)] if each]
            hint = (
                f"did you mean {' or '.join(guess)}?" if guess else "see `hpctrain config explain`"
            )
            raise ConfigError(f"there is no key {name}; {hint}")
    key = keys[name]
    rows = [
        ("kind", key.kind_in_words()),
        ("default", _default(key)),
        ("range", key.range_in_words()),
    ]
    lines = [name, *textwrap.wrap(key.meaning, 88, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines + [f"  {title:<8} {text}" for title, text in rows if text])


def list_keys(section: str | None = None) -> str:
    """Every key with the first words of its meaning."""
    lines: list[str] = []
    for title, cls in SECTIONS.items():
        if section in (None, title):
            lines += [*([""] if lines else []), f"[{title}]  {(cls.__doc__ or '').strip()}"]
            for key in keys_of(cls):
                meaning = textwrap.shorten(key.meaning, 66, placeholder=" ...")
                lines.append(f"  {key.name:<22} {meaning}")
    return "\n".join(lines)


def markdown() -> str:
    """The tables of all keys, as the documentation has them."""
    lines: list[str] = []
    for title, cls in SECTIONS.items():
        lines += [*([""] if lines else []), f"### [{title}]", "", (cls.__doc__ or "").strip(), ""]
        lines += ["| key | kind | default | meaning |", "| --- | --- | --- | --- |"]
        for key in keys_of(cls):
            limits = f"; {key.range_in_words()}" if key.range_in_words() else ""
            cells = (
                f"`{key.name}`",
                f"{key.kind_in_words()}{limits}",
                _default(key),
                key.meaning,
            )
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def template() -> str:
    """A configuration with every key, explained; those with a default are commented out."""
    lines: list[str] = []
    for title, cls in SECTIONS.items():
        lines += [*([""] if lines else []), f"[{title}]  # {(cls.__doc__ or '').strip()}"]
        for key in keys_of(cls):
            example = _EXAMPLES.get(f"{title}.{key.name}")
            value = key.default if example is None else example
            shown = write_value(value) if value not in (None, {}) else _blank(key)
            head = "" if example is not None else "# "
            lines += textwrap.wrap(f"## {key.meaning}", 96, subsequent_indent="## ")
            lines.append(f"{head}{key.name} = {shown}")
    return "\n".join(lines) + "\n"


def _blank(key: Key) -> str:
    kind = key.kind_in_words()
    return "{}" if kind == "a table" else f"  # {kind}"


def _default(key: Key) -> str:
    if key.is_required:
        return "must be given"
    if key.default is None:
        return "left out"
    return write_value(key.default)


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
