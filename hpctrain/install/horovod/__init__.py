"""Building, caching, installing and checking Horovod for exactly one torch and one MPI.

`facts` inspects an interpreter, `cache` and `recipe` decide what to build and where it is kept,
`build`, `deploy` and `check` do it.
"""

from __future__ import annotations

HOROVOD_VERSION = "0.28.1"

__all__ = ["HOROVOD_VERSION"]
