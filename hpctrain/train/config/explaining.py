"""What keys mean, in words: one, all, as tables for the documentation, as a template. Pure."""

from __future__ import annotations

import textwrap

from hpctrain.errors import ConfigError
from hpctrain.tables import Key, keys_of, nearest, write_value
from hpctrain.train.config.root import SECTIONS, all_keys

__all__ = ["explain", "list_keys", "markdown", "template"]

_EXAMPLES = {
    "model.build": "my_model:build",
    "data.build": "my_data:load",
    "train.global_batch": 256,
    "train.loss": "cross_entropy",
    "optimizer.lr": 0.001,
}
"""What a template says where there is no default, or where the default alone cannot be."""


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
