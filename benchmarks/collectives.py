"""Allreduce from 1 KiB to 256 MiB on each engine, against one copy of the same memory.

`python -m benchmarks.collectives --help`; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import sys

from hpctrain.bench import run_program
from hpctrain.bench.collectives import (
    SIZES,
    VARIANTS,
    add_arguments,
    bandwidths,
    main,
    repeats_for,
)

__all__ = ["SIZES", "VARIANTS", "add_arguments", "bandwidths", "main", "repeats_for"]

if __name__ == "__main__":
    sys.exit(run_program("benchmarks.collectives", __doc__, add_arguments, main))
