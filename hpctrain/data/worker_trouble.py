"""Why worker processes cannot be started, in words: what does not travel, what reads the script."""

from __future__ import annotations

import ast
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["explain_start", "explain_unpicklable", "has_main_guard", "trouble_with_function"]

_DEPTH = 5
_PRIVATE = {"_source": None, "_stream": None, "_dataset": "dataset", "_collate": "collate"}
"""What the loader's own attributes are called in messages; None leaves them out."""


class _Nowhere:
    """Takes what a pickler writes, and keeps none of it: data sets are large."""

    def write(self, content: Any) -> int:
        return len(content)


def trouble_with_function(name: str, function: Callable[..., Any] | None) -> str | None:
    """Why a function cannot be sent to worker processes, or None.

    Only plain functions are tried: they travel by name, which costs nothing.
    """
    if not isinstance(function, types.FunctionType) or (error := _try(function)) is None:
        return None
    return _tell(name, function, error)


def explain_unpicklable(source: Any, initialize: Any, error: Exception) -> str:
    """Which part of the data cannot be sent to worker processes, and what to do.

    Args:
        source: What the workers were to get.
        initialize: The user's function that begins each of them.
        error: What starting them raised.
    """
    if initialize is not None and (own := _try(initialize)) is not None:
        return _tell("worker_init_fn", initialize, own)
    path, found, reason = _find([], source, error, _DEPTH)
    return _tell(".".join(path) or "the data set", found, reason)


def _find(
    path: list[str], found: Any, error: Exception, depth: int
) -> tuple[list[str], Any, Exception]:
    """Follow what cannot be pickled to the attribute that is to blame."""
    inside = getattr(found, "__dict__", None)
    if depth == 0 or not isinstance(inside, dict) or isinstance(found, types.FunctionType | type):
        return path, found, error
    for name, part in inside.items():
        own = None if name == "_generators" else _try(part)
        if own is not None:
            told = _PRIVATE.get(name, name)
            return _find([*path, *([told] if told else [])], part, own, depth - 1)
    return path, found, error


def _try(part: Any) -> Exception | None:
    try:
        pickle.Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(part)
    except Exception as error:  # whatever __reduce__ and __getstate__ raise
        return error
    return None


def _tell(name: str, part: Any, error: Exception) -> str:
    if isinstance(part, types.FunctionType):
        code = part.__code__
        what = f"{part.__qualname__}, {Path(code.co_filename).name} line {code.co_firstlineno}"
        cure = "define it with def at the top level of a module"
    elif isinstance(part, type):
        what, cure = part.__qualname__, "define the class at the top level of a module"
    else:
        what = f"a {type(part).__module__}.{type(part).__qualname__}"
        cure = (
            "define its class at the top level of a module, or make what cannot travel (files, "
            "locks, connections) in __getitem__ when it is first used"
        )
    return (
        f"{name} ({what}) cannot be sent to worker processes: {type(error).__name__}: {error}; "
        f"{cure}, or use num_workers=0"
    )


def explain_start(number: int, process: int | None, code: int) -> str:
    """Why a worker ended with this exit code before it gave a batch, and what to do."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and not has_main_guard(_read(Path(script))):
        return (
            f"worker processes read {Path(script).name} again, and it starts the training while it "
            'is read: it has no `if __name__ == "__main__":`; put everything but imports, '
            "functions and classes under it"
        )
    return (
        f"worker {number} of the loader (process {process}) did not start: exit code {code}, its "
        "traceback is above. Worker processes read the script again: what the data set needs "
        'must be defined at the top level of a module, outside `if __name__ == "__main__":`, and '
        "what starts the training inside of it"
    )


def has_main_guard(source: str) -> bool:
    """Whether a script asks for its own name at the top level; True where it cannot be read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return True
    return any(
        isinstance(node, ast.Name) and node.id == "__name__"
        for statement in tree.body
        if isinstance(statement, ast.If)
        for node in ast.walk(statement.test)
    )


def _read(script: Path) -> str:
    """The text of a script; what cannot be read counts as one with a guard."""
    try:
        return script.read_text()
    except (OSError, UnicodeDecodeError):
        return "if __name__: pass"
