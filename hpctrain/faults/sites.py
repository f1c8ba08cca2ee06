"""Where in the user's code a call was made: cheap to note, put into words only when asked for."""

from __future__ import annotations

import os
import sysconfig
from sys import _getframe
from types import CodeType, FrameType

__all__ = ["Site", "describe_site", "is_users", "users_site"]

Site = tuple[CodeType, int]
"""A function and the place in its bytecode. Frames are not kept: they hold the user's tensors."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    {
        os.path.abspath(path) + os.sep
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_known: dict[str, bool] = {}
_MOST_NAMES = 1024


def is_users(path: str) -> bool:
    """Whether a source file is the user's own: not hpctrain's, Python's or a library's."""
    return not path.startswith(("<", _OURS, *_LIBRARIES))


def users_site(call: str, depths: dict[str, int]) -> Site | None:
    """The innermost place of the user's code behind a call; None where there is none.

    On the path of every collective: it reads no file, looks no line number up, and goes straight to
    the frame where the call of this name had it before. Walking there costs far more.

    Args:
        call: The name of the call.
        depths: Where calls had it before, by name; kept from call to call.
    """
    depth = depths.get(call)
    if depth is not None:
        try:
            inner, frame = _getframe(depth - 1), _getframe(depth)
        except ValueError:
            pass  # the stack is not so deep this time
        else:
            code = frame.f_code
            if _known.get(code.co_filename) and not _known.get(inner.f_code.co_filename):
                return code, frame.f_lasti
    return _walk(call, depths)


def _walk(call: str, depths: dict[str, int]) -> Site | None:
    depth = 2
    frame: FrameType | None = _getframe(depth + 1)
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if path not in _known:
            _known[path] = is_users(path)
        if _known[path]:
            if len(depths) > _MOST_NAMES:
                depths.clear()
            depths[call] = depth
            return code, frame.f_lasti
        frame = frame.f_back
        depth += 1
    return None


def describe_site(site: Site | None) -> str:
    """`FILE:LINE in FUNCTION`, or nothing."""
    if site is None:
        return ""
    code, offset = site
    line = next(
        (number for start, end, number in code.co_lines() if start <= offset < end),
        code.co_firstlineno,
    )
    return f"{code.co_filename}:{line} in {code.co_qualname}"
