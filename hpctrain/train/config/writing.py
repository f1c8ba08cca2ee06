"""A configuration as TOML: the standard library reads it and does not write it. Pure."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.train.config.root import Config

__all__ = ["to_toml", "write_value"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def to_toml(config: Config) -> str:
    """Write all keys of a configuration, those included that were left out, except None."""
    lines: list[str] = []
    for title, table in config.as_tree().items():
        lines += ["", f"[{title}]"]
        nested = {name: value for name, value in table.items() if isinstance(value, Mapping)}
        plain = {name: value for name, value in table.items() if name not in nested}
        lines += [f"{_write_name(name)} = {write_value(value)}" for name, value in plain.items()]
        for name, inner in nested.items():
            if inner:
                lines += ["", f"[{title}.{_write_name(name)}]"]
                lines += [f"{_write_name(k)} = {write_value(v)}" for k, v in inner.items()]
    return "\n".join(lines[1:]) + "\n"


def write_value(value: Any) -> str:
    """Write one value as TOML does.

    Raises:
        ConfigError: TOML has no such value.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{"".join(_escape(letter) for letter in value)}"'
    if isinstance(value, int | float):
        return repr(value)  # inf and nan are TOML's words, too
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(write_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_write_name(k)} = {write_value(v)}" for k, v in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    raise ConfigError(f"{value!r} ({type(value).__name__}) cannot be written as TOML")


def _write_name(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"key {name!r} must be text to be written as TOML")
    return name if _BARE.fullmatch(name) else write_value(name)


def _escape(letter: str) -> str:
    if letter in _SHORT:
        return _SHORT[letter]
    return f"\\u{ord(letter):04x}" if ord(letter) < 32 or ord(letter) == 127 else letter
