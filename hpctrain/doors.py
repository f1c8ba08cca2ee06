"""A package's door whose names are loaded on first use.

A room that needs torch or MPI for some of its names only, keeps the others free of them this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

__all__ = ["lazy"]


def lazy(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Make the `__getattr__` of a package.

    Args:
        package: Its `__name__`.
        names: By module, relative to the package (`.store`) or absolute: the names it holds. With
            no names, the module itself is the name: `.metrics` gives `metrics`.
    """
    homes = {name: module for module, held in names.items() for name in held}
    modules = {module.rpartition(".")[2]: module for module, held in names.items() if not held}

    def load(name: str) -> object:
        if name in modules:
            return import_module(modules[name], package)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    return load
