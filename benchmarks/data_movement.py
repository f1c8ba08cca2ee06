"""One data set from one rank to all: `scatter` against MPI_Send, a copy and pickles; `share`.

`python -m benchmarks.data_movement --help`; docs/data-movement.md says what is measured.
"""

from __future__ import annotations

import sys

from hpctrain.scaling.benches.data_movement import CASES, COMPARISONS, VARIANTS, add_arguments, main
from hpctrain.scaling.harness.command import run_program

__all__ = ["CASES", "COMPARISONS", "VARIANTS", "add_arguments", "main"]

if __name__ == "__main__":
    sys.exit(run_program("benchmarks.data_movement", __doc__, add_arguments, main))
