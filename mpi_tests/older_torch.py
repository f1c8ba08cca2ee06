"""On a torch without a feature, a test that meets the refusal is skipped, with its words.

Only there: the message must name a version that is newer than this one.
"""

from __future__ import annotations

import re

__all__ = ["refusal_in"]

_REFUSAL = re.compile(r"([^\n]*needs torch >= (\d+)\.(\d+)[^\n]*)")


def refusal_in(error: BaseException, installed: tuple[int, int]) -> str | None:
    """What this torch lacks, in the words of the product; None: the failure is another one. Pure.

    Args:
        error: What a test raised; a refusal may be behind it.
        installed: The first two numbers of torch's version.
    """
    seen: BaseException | None = error
    while seen is not None:
        found = _REFUSAL.search(str(seen))
        if found is not None and installed < (int(found[2]), int(found[3])):
            return found[1].strip()
        seen = seen.__cause__ or seen.__context__
    return None
