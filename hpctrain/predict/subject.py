"""Find what a user wants profiled: a function in a file of theirs. Torch comes with the file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.predict.profiling import Subject

__all__ = ["load_subject"]


def load_subject(where: str) -> Subject:
    """Call `NAME()` of `FILE.py:NAME`.

    Raises:
        ConfigError: there is no such file or function, or it returns something else.
    """
    path, _, name = where.rpartition(":")
    if not path or not name.isidentifier():
        raise ConfigError(f"--subject {where}: write FILE.py:NAME, NAME a function in the file")
    file = Path(path)
    spec = importlib.util.spec_from_file_location("hpctrain_subject", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--subject {where}: there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles of the file look there
    sys.path.insert(0, str(file.parent.absolute()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--subject {where}: {path} has no function {name}")
    from hpctrain.predict.profiling import Subject

    subject = function()
    if not isinstance(subject, Subject):
        raise ConfigError(
            f"--subject {where}: {name}() returned a {type(subject).__name__}, and must return a "
            "hpctrain.predict.profiling.Subject"
        )
    return subject
