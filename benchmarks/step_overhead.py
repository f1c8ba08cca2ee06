"""What a training step costs on several ranks, as a ratio to the same step without communication.

`python -m benchmarks.step_overhead --help`; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import sys

from hpctrain.scaling.benches.step_overhead import COMPARISONS, VARIANTS, add_arguments, main
from hpctrain.scaling.harness.command import run_program

__all__ = ["COMPARISONS", "VARIANTS", "add_arguments", "main"]

if __name__ == "__main__":
    sys.exit(run_program("benchmarks.step_overhead", __doc__, add_arguments, main))
