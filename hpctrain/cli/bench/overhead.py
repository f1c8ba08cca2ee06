"""`hpctrain bench overhead`: the same as `python -m benchmarks.step_overhead` in a checkout."""

from __future__ import annotations

from hpctrain.scaling.benches.step_overhead import add_arguments, main

__all__ = ["add_arguments", "main"]
