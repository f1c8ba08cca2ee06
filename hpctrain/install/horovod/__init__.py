"""Building, caching, installing and checking Horovod for exactly one torch and one MPI.

`facts` looks at an interpreter, `key` and `recipe` decide purely, `build` and `check` do.
"""

from __future__ import annotations

HOROVOD_VERSION = "0.28.1"

__all__ = ["HOROVOD_VERSION"]
