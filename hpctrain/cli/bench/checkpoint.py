"""`hpctrain bench checkpoint`: the same as `python -m benchmarks.checkpoint` in a checkout."""

from __future__ import annotations

from hpctrain.scaling.benches.checkpoint import add_arguments, main

__all__ = ["add_arguments", "main"]
