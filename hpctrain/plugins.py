"""What other packages add to hpctrain: entry points, by the group of a seam."""

from __future__ import annotations

from collections.abc import Container
from importlib.metadata import EntryPoint, entry_points

from hpctrain.errors import ConfigError

__all__ = ["find_plugins", "load_plugin"]


def find_plugins(group: str, *, own: Container[str] = ()) -> dict[str, EntryPoint]:
    """The entry points of a group by name, sorted; nothing is imported.

    Args:
        group: As packages declare it, such as `hpctrain.engines`.
        own: Names of this package's own, which others cannot take.
    """
    found = sorted(entry_points(group=group), key=lambda point: point.name)
    return {point.name: point for point in found if point.name not in own}


def load_plugin(point: EntryPoint, what: str) -> object:
    """Import what an entry point names.

    Args:
        point: The entry point.
        what: What it is meant to be, for the message.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        loaded: object = point.load()
    except Exception as error:  # whatever another package raises
        raise ConfigError(
            f"{what} of the entry point {point.value} cannot be imported "
            f"({type(error).__name__}: {error}); fix or uninstall its package"
        ) from error
    return loaded
