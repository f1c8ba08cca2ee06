"""The base of all sections of a configuration: checked whenever one is made. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hpctrain.errors import ConfigError
from hpctrain.tables import keys_of, mistake, trouble_with

__all__ = ["Section"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A table of a configuration: typed keys, and what does not go together."""

    title: ClassVar[str] = ""
    """Its name in the file."""

    def __post_init__(self) -> None:
        """Refuse wrong kinds, numbers out of range and impossible combinations, all at once."""
        wrong = []
        for key in keys_of(type(self)):
            value = getattr(self, key.name)
            trouble = trouble_with(key, value)
            if trouble is not None:
                wrong.append(mistake(f"{self.title}.{key.name}", value, trouble))
        wrong += [] if wrong else list(self.conflicts())
        if wrong:
            raise ConfigError("\n".join(wrong))

    def conflicts(self) -> Iterator[str]:
        """What does not go together, each with what to do."""
        return iter(())
