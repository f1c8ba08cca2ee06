"""A package's door whose names are loaded on first use.

A room that needs torch or MPI for some of its names only, keeps the others free of them this way.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

__all__ = ["lazy"]


def lazy(
    package: str,
    names: Mapping[str, Sequence[str]],
    *,
    modules: Sequence[str] = (),
    moved: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[str], object]:
    """Make the `__getattr__` of a package.

    Args:
        package: Its `__name__`.
        names: By module, relative to the package (`.store`) or absolute: the names it holds.
        modules: Modules of the package that are names themselves.
        moved: The same for names that live elsewhere now; they still work, with a warning.
    """
    former = {name: module for module, held in (moved or {}).items() for name in held}
    homes = {name: module for module, held in names.items() for name in held}

    def load(name: str) -> object:
        if name in modules:
            return import_module(f".{name}", package)
        if name in former:
            module = import_module(former[name], package)
            if sys._getframe(1).f_code.co_name == "_handle_fromlist":
                return getattr(module, name)  # `from package import name` asks twice; warn once
            warnings.warn(
                f"{package}.{name} is now {module.__name__}.{name}; the old name will be removed",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(module, name)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    return load
