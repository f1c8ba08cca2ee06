"""Checks that profiles and machine files share: what was given, what is required. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

from hpctrain.errors import ConfigError

__all__ = ["check_keys", "count_of", "number_of", "positive", "text_of"]


def check_keys(
    table: object, where: str, *, needed: Collection[str], known: Collection[str]
) -> Mapping[str, Any]:
    """The table itself, if it has all it needs and nothing that nobody knows.

    Raises:
        ConfigError: with what is missing or unknown, and where.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is a {type(table).__name__}, and must be a table of keys")
    if missing := sorted(set(needed) - set(table)):
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(set(table) - set(known)):
        raise ConfigError(
            f"{where} has {', '.join(map(str, unknown))}, which nobody reads; it may have "
            f"{', '.join(sorted(known))}"
        )
    return table


def number_of(value: object, where: str) -> float:
    """A finite number that is not negative.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}={value!r} must be a number")
    if not isfinite(value) or value < 0:
        raise ConfigError(f"{where}={value!r} must be finite and not negative")
    return float(value)


def positive(value: object, where: str) -> float:
    """A finite number above 0.

    Raises:
        ConfigError: it is none.
    """
    number = number_of(value, where)
    if number <= 0:
        raise ConfigError(f"{where}={value!r} must be above 0")
    return number


def count_of(value: object, where: str, *, least: int = 1) -> int:
    """A whole number, at least so large.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where}={value!r} must be a whole number, at least {least}")
    return value


def text_of(value: object, where: str) -> str:
    """A string.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{where}={value!r} must be a string")
    return value
