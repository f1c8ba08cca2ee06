"""The form of a data set: which columns it has, apart from what is in them. Pure.

A data set is one column, or a dict, tuple or named tuple of columns, nested as deep as one likes.
An array or a tensor is a column whose rows are the samples; a list is one whose items are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import ConfigError

__all__ = ["Outline", "flatten"]


@dataclass(frozen=True, slots=True)
class Outline:
    """A form that columns can be put back into."""

    made: type | None = None
    """The type of the container; None for a column."""
    keys: tuple[str, ...] = ()
    children: tuple[Outline, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What the columns are called in messages, in order."""
        return tuple(f"data{path}" for path in self._paths())

    def build(self, columns: Sequence[Any]) -> Any:
        """Put columns into the form."""
        left = list(columns)
        return self._take(left)

    def _paths(self) -> list[str]:
        if self.made is None:
            return [""]
        return [
            f"[{key!r}]" + rest if self.keys else f"[{number}]" + rest
            for number, (key, child) in enumerate(
                zip(self.keys or [""] * len(self.children), self.children, strict=True)
            )
            for rest in child._paths()
        ]

    def _take(self, left: list[Any]) -> Any:
        if self.made is None:
            return left.pop(0)
        parts = [child._take(left) for child in self.children]
        if self.keys:
            return dict(zip(self.keys, parts, strict=True))
        return self.made(*parts) if hasattr(self.made, "_fields") else tuple(parts)


def flatten(data: Any) -> tuple[Outline, list[Any]]:
    """Take a data set apart into its form and its columns.

    Raises:
        ConfigError: a container is empty, or a key is not a string.
    """
    columns: list[Any] = []
    return _visit(data, "data", columns), columns


def _visit(data: Any, path: str, columns: list[Any]) -> Outline:
    if isinstance(data, dict):
        odd = [key for key in data if not isinstance(key, str)]
        if odd:
            raise ConfigError(f"{path}: the key {odd[0]!r} is no string; name columns by strings")
        _refuse_empty(data, path)
        children = tuple(_visit(part, f"{path}[{key!r}]", columns) for key, part in data.items())
        return Outline(made=dict, keys=tuple(data), children=children)
    if isinstance(data, tuple):
        _refuse_empty(data, path)
        children = tuple(_visit(part, f"{path}[{i}]", columns) for i, part in enumerate(data))
        return Outline(made=type(data) if hasattr(data, "_fields") else tuple, children=children)
    columns.append(data)
    return Outline()


def _refuse_empty(data: Any, path: str) -> None:
    if not data:
        raise ConfigError(f"{path}: an empty {type(data).__name__} has no columns; give arrays")
