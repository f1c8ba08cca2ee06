"""Patterns of the names of a model's modules and tensors: one meaning everywhere. Pure.

`*` stands for any text, dots too. `*.up` is `blocks.0.up`, and also an `up` at the top. Where
modules are taken whole (`outermost`), `blocks.*` is each of the blocks, without what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hpctrain.errors import ConfigError

__all__ = ["is_inside", "match_names", "matches_any"]

_SHOWN = 40


def match_names(
    patterns: Iterable[str],
    names: Iterable[str],
    *,
    what: str = "module",
    argument: str = "pattern",
    outermost: bool = False,
) -> dict[str, list[str]]:
    """The names that each pattern matches, in the order of the names.

    Args:
        patterns: At least one.
        names: As in `model.named_modules()`.
        what: What the names are of, for the error.
        argument: What the patterns were given as, for the error.
        outermost: Leave out what lies within another name that the same pattern matches.

    Raises:
        ConfigError: a pattern matches nothing; the names are listed.
    """
    known = list(names)
    found = {pattern: [name for name in known if _matches(name, pattern)] for pattern in patterns}
    if not found:
        raise ConfigError(f"no pattern is given; give at least one name of a {what}")
    for pattern, matched in found.items():
        if not matched:
            raise ConfigError(f"{argument} {pattern!r} matches no {what}; there are {_list(known)}")
    if outermost:
        return {pattern: _outermost(matched) for pattern, matched in found.items()}
    return found


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches a name."""
    return any(_matches(name, pattern) for pattern in patterns)


def is_inside(name: str, outer: str) -> bool:
    """Whether a module lies within another; the empty name is the whole model."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)


def _outermost(names: Sequence[str]) -> list[str]:
    taken = set(names)

    def parents(name: str) -> Iterable[str]:
        words = name.split(".")
        return (".".join(words[:length]) for length in range(1, len(words)))

    return [name for name in names if not any(outer in taken for outer in parents(name))]


def _list(names: Sequence[str]) -> str:
    if not names:
        return "none"
    shown = list(names[:_SHOWN])
    more = [f"... ({len(names) - _SHOWN} more)"] if len(names) > _SHOWN else []
    return ", ".join([*shown, *more])
