"""Tables of keys, as TOML and JSON have them: what a key is, whether a value can be its. Pure.

Configurations, site profiles, machine files and results are all read through this module, and TOML
is written by it (`tomli_w`: the standard library reads TOML and does not write it).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from hpctrain.errors import ConfigError

__all__ = [
    "Key",
    "adapt",
    "bytes_in",
    "check_keys",
    "count_of",
    "is_of",
    "key",
    "keys_of",
    "kind_in_words",
    "mistake",
    "nearest",
    "number_of",
    "positive",
    "table",
    "text_of",
    "trouble_with",
    "write_toml",
    "write_value",
]

_BYTES = {"": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("IB", 1024))
}

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
}
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
    """A regular expression for texts; `form_in_words` describes it."""
    form_in_words: str = ""

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is _MISSING

    @property
    def members(self) -> tuple[Any, ...]:
        """The kinds it may be of, without None."""
        return tuple(part for part in _parts(self.kind) if part is not NoneType)

    @property
    def words(self) -> tuple[str, ...]:
        """The fixed words it may be, where it has some."""
        found = (get_args(part) for part in self.members if get_origin(part) is Literal)
        return tuple(word for words in found for word in words)

    def kind_in_words(self) -> str:
        """Say what may be written."""
        return " or ".join(kind_in_words(part) for part in self.members)

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
        metadata = {"meaning": "", **field.metadata}
        words = metadata.pop("words", None)
        kind = hints[field.name] if words is None else Literal[tuple(words())]
        yield Key(name=field.name, kind=kind, default=default, **metadata)


def trouble_with(key: Key, value: object) -> str | None:
    """Why a value cannot be that of a key; None where it can."""
    if not is_of(key.kind, value):
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


def adapt(key: Key, value: Any) -> Any:
    """A value as TOML has it, as the key has it: lists are tuples, and 1 is 1.0 where that is."""
    if isinstance(value, list) and any(get_origin(part) is tuple for part in key.members):
        return tuple(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if float in key.members and int not in key.members else value
    return value


def is_of(kind: Any, value: object) -> bool:
    """Whether a value is of a kind; true and false are no numbers, and 1 is a float, too.

    Kinds are bool, int, float, str, list, dict, None, Literal, tuple[X, ...], Mapping[str, X], or
    unions of these.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(is_of(part, value) for part in inside)
    if kind in (None, NoneType):
        return value is None
    if origin is Literal:
        return isinstance(value, str) and value in inside
    if origin is tuple:
        return isinstance(value, tuple) and all(is_of(inside[0], each) for each in value)
    if origin is dict:
        return isinstance(value, dict)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            is_of(inside[0], name) and is_of(inside[1], each) for name, each in value.items()
        )
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def kind_in_words(kind: Any) -> str:
    """Say what may be written for a kind."""
    if get_origin(kind) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {kind_in_words(get_args(kind)[0]).removeprefix('a ')}s"
    if get_origin(kind) is Mapping:
        return f"a table of {kind_in_words(get_args(kind)[1]).removeprefix('a ')}s"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(kind_in_words(p) for p in get_args(kind) if p is not NoneType)
    return _WORDS[get_origin(kind) or kind]


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def mistake(name: str, value: object, trouble: str) -> str:
    """Say what was given and what is required."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{name}={shown} {trouble}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that a word was probably meant to be."""
    names = list(known)
    same = [name for name in names if name.lower() == word.lower()]
    if same:
        return same[0]
    found = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    inside = [name for name in names if word and (word in name or name in word)]
    return found[0] if found else min(inside, key=len, default=None)


def check_keys(
    table: object, where: str, *, needed: Collection[str], known: Collection[str]
) -> Mapping[str, Any]:
    """The table itself, if it has all the keys that it needs and no unknown one.

    Raises:
        ConfigError: with what is missing or unknown, and where.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is a {type(table).__name__}, and must be a table of keys")
    if missing := sorted(set(needed) - set(table)):
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(set(table) - set(known)):
        raise ConfigError(
            f"{where} has unknown keys: {', '.join(map(str, unknown))}; the known ones are "
            f"{', '.join(sorted(known))}"
        )
    return table


def number_of(value: object, where: str) -> float:
    """A finite number that is not negative.

    Raises:
        ConfigError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}={value!r} must be a number")
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}={value!r} must be finite and not negative")
    return float(value)


def positive(value: object, where: str) -> float:
    """A finite number above 0.

    Raises:
        ConfigError: it is not one.
    """
    number = number_of(value, where)
    if number <= 0:
        raise ConfigError(f"{where}={value!r} must be above 0")
    return number


def count_of(value: object, where: str, *, least: int = 1) -> int:
    """A whole number, at least so large.

    Raises:
        ConfigError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where}={value!r} must be a whole number, at least {least}")
    return value


def bytes_in(value: object, where: str) -> int:
    """Bytes, as a whole number or a text: 1000000, `80GB`, `40 GiB`.

    Raises:
        ConfigError: it is none of these.
    """
    found = 0
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    elif isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?B)?", value.strip())
        found = round(float(match[1]) * _BYTES[(match[2] or "").upper()]) if match else 0
    if found < 1:
        raise ConfigError(f"{where} {value}: write it as 80GB, 40GiB or a number of bytes")
    return found


def text_of(value: object, where: str) -> str:
    """A string.

    Raises:
        ConfigError: it is not one.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{where}={value!r} must be a string")
    return value


def write_toml(tree: Mapping[str, Any]) -> str:
    """Write a tree of tables as TOML.

    Raises:
        ConfigError: TOML has no such value.
    """
    _check_names(tree)
    try:
        return tomli_w.dumps(tree)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{tree!r} cannot be written as TOML: {error}") from error


def write_value(value: Any) -> str:
    """Write one value as TOML does, on one line.

    Raises:
        ConfigError: TOML has no such value.
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(write_value(each) for each in value)}]"
    # In a list that has more than tables, tables are written inline.
    lines = write_toml({"value": [0, value]}).rstrip("\n").split("\n")
    return " ".join(line.strip() for line in lines[2:-1]).removesuffix(",")


def _check_names(tree: object) -> None:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if not isinstance(name, str):
                raise ConfigError(f"key {name!r} must be text to be written as TOML")
            _check_names(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _check_names(value)
