"""What a key of a configuration is: its meaning, kind and range, kept beside its default. Pure."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["Key", "key", "keys_of", "table", "trouble_with"]

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_MISSING = dataclasses.MISSING


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key, as people, editors and the reader see it."""

    name: str
    kind: Any
    """Its annotation: bool, int, float, str, Literal, tuple[X, ...], dict, or a union of these."""
    meaning: str
    default: Any = _MISSING
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    form: str | None = None
    """What a text must look like, as a regular expression; `form_in_words` says it."""
    form_in_words: str = ""

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is _MISSING

    @property
    def members(self) -> tuple[Any, ...]:
        """The kinds it may be of, without None."""
        parts = get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)
        return tuple(part for part in parts if part is not NoneType)

    @property
    def words(self) -> tuple[str, ...]:
        """The fixed words it may be, where it has some."""
        found = (get_args(part) for part in self.members if get_origin(part) is Literal)
        return tuple(word for words in found for word in words)

    def kind_in_words(self) -> str:
        """Say what may be written."""
        return " or ".join(_kind_in_words(part) for part in self.members)

    def range_in_words(self) -> str:
        """Say which numbers or texts are allowed; empty where all are."""
        bounds = (
            ("at least", self.low),
            ("above", self.above),
            ("at most", self.high),
            ("below", self.below),
        )
        said = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
        return " and ".join([*said, *([self.form_in_words] if self.form else [])])


def key(
    meaning: str,
    *,
    default: Any = _MISSING,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    form: tuple[str, str] | None = None,
    words: Callable[[], Sequence[str]] | None = None,
) -> Any:
    """Declare a field of a section.

    Args:
        meaning: A sentence for people.
        default: What it is when it is left out; without one it must be given.
        low: The lowest number allowed.
        above: Numbers must be above it.
        high: The highest number allowed.
        below: Numbers must be below it.
        form: What a text must look like: a regular expression, and the same in words.
        words: Gives the words that a text must be one of, where a type cannot list them: they are
            known when the keys are first read.
    """
    metadata = {
        "meaning": meaning,
        "low": low,
        "above": above,
        "high": high,
        "below": below,
        "form": form[0] if form else None,
        "form_in_words": form[1] if form else "",
        "words": words,
    }
    return dataclasses.field(default=default, metadata=metadata)


def table(meaning: str) -> Mapping[str, Any]:
    """The metadata of a field that is a table of the user's own, empty by default."""
    return {"meaning": meaning}


def keys_of(section: type) -> tuple[Key, ...]:
    """The keys of a section, in the order of their declaration."""
    if section not in _KNOWN:
        _KNOWN[section] = tuple(_read_keys(section))
    return _KNOWN[section]


_KNOWN: dict[type, tuple[Key, ...]] = {}


def _read_keys(section: type) -> Iterator[Key]:
    hints = get_type_hints(section)
    for field in dataclasses.fields(section):
        factory = field.default_factory
        default = field.default if factory is _MISSING else factory()
        metadata = dict(field.metadata)
        words = metadata.pop("words", None)
        kind = hints[field.name] if words is None else Literal[tuple(words())]
        yield Key(name=field.name, kind=kind, default=default, **metadata)


def trouble_with(key: Key, value: object) -> str | None:
    """Why a value cannot be that of a key; None where it can."""
    if value is None and NoneType in get_args(key.kind):
        return None
    if not any(_is_of(part, value) for part in key.members):
        return f"must be {key.kind_in_words()}"
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, float) and not math.isfinite(one):
            return "must be finite"
        if not _is_in_range(key, one):
            return f"must be {key.range_in_words()}"
    return None


def _is_in_range(key: Key, value: object) -> bool:
    if isinstance(value, str) and key.form is not None and value not in key.words:
        return re.fullmatch(key.form, value) is not None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return (
        (key.low is None or value >= key.low)
        and (key.above is None or value > key.above)
        and (key.high is None or value <= key.high)
        and (key.below is None or value < key.below)
    )


def _is_of(kind: Any, value: object) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(get_args(kind)[0], v) for v in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _kind_in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {_kind_in_words(get_args(kind)[0]).removeprefix('a ')}s"
    if get_origin(kind) is dict:
        return "a table"
    return _WORDS[kind]
