"""Every example of a folder in one job, one after the other: starting takes longer than training.

hpctrain run -n N mpi_tests/launch/examples_together.py SCRIPT...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    scripts = [Path(word) for word in sys.argv[1:]]
    sys.path.insert(0, str(scripts[0].parent))
    for script in scripts:
        print(f"=== {script.name}", flush=True)
        runpy.run_path(str(script), run_name="__main__")
