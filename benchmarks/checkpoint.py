"""What saving costs: time that training is blocked, time that a running save takes, and the disk.

`python -m benchmarks.checkpoint --help`; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import sys

from hpctrain.scaling.benches.checkpoint import (
    BLOCKED,
    CHECKSUMS,
    COMPARISONS,
    TRAINING,
    WRITING,
    add_arguments,
    main,
)
from hpctrain.scaling.harness.command import run_program

__all__ = ["BLOCKED", "CHECKSUMS", "COMPARISONS", "TRAINING", "WRITING", "add_arguments", "main"]

if __name__ == "__main__":
    sys.exit(run_program("benchmarks.checkpoint", __doc__, add_arguments, main))
