"""Patterns of the names of a model's modules. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hpctrain.errors import ConfigError

__all__ = ["match_names"]

_SHOWN = 40


def match_names(
    patterns: Iterable[str], names: Iterable[str], *, what: str = "module"
) -> dict[str, list[str]]:
    """The names that each pattern matches, in the order of the names.

    Args:
        patterns: `*` stands for any text, dots too. `*.up` is `blocks.0.up`, and also `up`.
        names: As in `model.named_modules()`.
        what: What the names are of, for the error.

    Raises:
        ConfigError: a pattern matches nothing; the names are listed.
    """
    known = list(names)
    found = {pattern: [name for name in known if _matches(name, pattern)] for pattern in patterns}
    if not found:
        raise ConfigError(f"no pattern is given; give at least one name of a {what}")
    for pattern, matched in found.items():
        if not matched:
            raise ConfigError(f"pattern {pattern!r} matches no {what}; there are {_list(known)}")
    return found


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)


def _list(names: Sequence[str]) -> str:
    if not names:
        return "none"
    shown = list(names[:_SHOWN])
    more = [f"... ({len(names) - _SHOWN} more)"] if len(names) > _SHOWN else []
    return ", ".join([*shown, *more])
