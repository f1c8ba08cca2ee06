"""From TOML and `--set` to a configuration: every mistake at once, with the nearest name. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from hpctrain.errors import ConfigError
from hpctrain.tables import Key, adapt, keys_of, mistake, nearest, trouble_with
from hpctrain.train.config.root import SECTIONS, Config, all_keys
from hpctrain.train.config.section import Section

__all__ = ["build_config", "load_config", "parse_config"]


def load_config(path: Path, settings: Sequence[str] = ()) -> Config:
    """Read a configuration file; `settings` are `key=value` texts that come on top.

    Raises:
        ConfigError: the file cannot be read, or with everything that is wrong in it.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name a TOML file") from error
    return parse_config(text, settings, name=str(path))


def parse_config(text: str, settings: Sequence[str] = (), *, name: str = "config") -> Config:
    """Read the text of a configuration file.

    Raises:
        ConfigError: with everything that is wrong.
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from error
    return build_config(tree, settings, name=name)


def build_config(
    tree: Mapping[str, Any], settings: Sequence[str] = (), *, name: str = "config"
) -> Config:
    """Make a configuration of plain tables.

    Args:
        tree: Sections of keys, as TOML has them.
        settings: `section.key=value` texts that replace what is there.
        name: Where this comes from, for messages.

    Raises:
        ConfigError: with everything that is wrong.
    """
    wrong: list[str] = []
    tables: dict[str, dict[str, Any]] = {title: {} for title in SECTIONS}
    for title, table in tree.items():
        if title not in SECTIONS:
            wrong.append(_unknown_section(title, table))
        elif not isinstance(table, Mapping):
            wrong.append(f"{title}={table!r} must be a section: write [{title}]")
        else:
            tables[title] = dict(table)
    for setting in settings:
        trouble = _set(tables, setting)
        wrong += [trouble] if trouble else []
    sections: dict[str, Section] = {}
    for title, cls in SECTIONS.items():
        section, troubles = _read_section(cls, tables[title])
        wrong += troubles
        if section is not None:
            sections[title] = section
    if not wrong:
        try:
            return Config(**sections)  # type: ignore[arg-type]  # each under its own title
        except ConfigError as error:
            wrong += str(error).split("\n")
    lines = "\n".join(f"  {line}" for line in wrong)
    count = "1 mistake" if len(wrong) == 1 else f"{len(wrong)} mistakes"
    raise ConfigError(f"{name}: {count}\n{lines}\n`hpctrain config explain KEY` explains a key")


def _read_section(cls: type[Section], table: Mapping[str, Any]) -> tuple[Section | None, list[str]]:
    known = {key.name: key for key in keys_of(cls)}
    wrong = [_unknown_key(cls.title, word, known) for word in table if word not in known]
    values: dict[str, Any] = {}
    for name, key in known.items():
        if name not in table:
            if key.is_required:
                wrong.append(f"{cls.title}.{name} is missing: {_first_sentence(key.meaning)}")
            continue
        value = adapt(key, table[name])
        trouble = trouble_with(key, value)
        if trouble is not None:
            wrong.append(mistake(f"{cls.title}.{name}", value, trouble + _meant(key, value)))
        values[name] = value
    if wrong:
        return None, wrong
    try:
        return cls(**values), []
    except ConfigError as error:
        return None, str(error).split("\n")


def _set(tables: dict[str, dict[str, Any]], setting: str) -> str | None:
    """Put one `section.key=value` into the tables; or say what is wrong with it."""
    name, equals, text = setting.partition("=")
    path = [part.strip() for part in name.split(".")]
    if not equals or len(path) < 2 or not all(path):
        return f"--set {setting}: write section.key=value"
    title, word, *inside = path
    if title not in SECTIONS:
        return f"--set {setting}: {_unknown_section(title, {word: None})}"
    known = {key.name: key for key in keys_of(SECTIONS[title])}
    if word not in known:
        return f"--set {setting}: {_unknown_key(title, word, known)}"
    table, last = tables[title], word
    if inside:
        if not any(get_origin(part) is dict for part in known[word].members):
            return f"--set {setting}: {title}.{word} has no keys inside it"
        for step in (word, *inside[:-1]):
            table[step] = dict(table.get(step, {})) if isinstance(table.get(step), dict) else {}
            table = table[step]
        last = inside[-1]
    table[last] = _parse_value(text, None if inside else known[word])
    return None


def _parse_value(text: str, key: Key | None) -> Any:
    """A value as TOML writes it; what is none is text, so that quotes can be left out."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
    if key is not None and trouble_with(key, adapt(key, value)) is not None:
        return text if trouble_with(key, text) is None else value
    return value


def _unknown_section(title: str, table: object) -> str:
    home = [name for name in all_keys() if name.endswith(f".{title}")]
    if home:
        section = home[0].partition(".")[0]
        return f"{title} is unknown at the top; it is {home[0]}: write it under [{section}]"
    guess = nearest(title, SECTIONS)
    hint = f"did you mean [{guess}]?" if guess else f"sections are {', '.join(SECTIONS)}"
    return (
        f"[{title}] is unknown; {hint}"
        if isinstance(table, Mapping)
        else f"{title} is unknown; {hint}"
    )


def _unknown_key(title: str, word: str, known: Mapping[str, Key]) -> str:
    elsewhere = [name for name in all_keys() if name.endswith(f".{word}")]
    guess = nearest(word, known)
    if guess is not None:
        hint = f"did you mean {title}.{guess}?"
    elif elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    else:
        other = nearest(word, (name.partition(".")[2] for name in all_keys()))
        full = next((name for name in all_keys() if name.endswith(f".{other}")), None)
        hint = f"did you mean {full}?" if full else f"keys are {', '.join(known)}"
    return f"{title}.{word} is unknown; {hint}"


def _meant(key: Key, value: object) -> str:
    guess = nearest(value, key.words) if isinstance(value, str) and key.words else None
    return f'; did you mean "{guess}"?' if guess else ""


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")
