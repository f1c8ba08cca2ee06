"""Data for all ranks: how fast batches come, and whether a step ever waits for one.

`python -m benchmarks.data --help`; docs/data.md says what is measured.
"""

from __future__ import annotations

import sys

from hpctrain.scaling.benches.data import PARTS, Part, add_arguments, main, part_of
from hpctrain.scaling.harness.command import run_program

__all__ = ["PARTS", "Part", "add_arguments", "main", "part_of"]

if __name__ == "__main__":
    sys.exit(run_program("benchmarks.data", __doc__, add_arguments, main))
