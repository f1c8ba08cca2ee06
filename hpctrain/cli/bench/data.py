"""`hpctrain bench data`: the same as `python -m benchmarks.data` in a checkout."""

from __future__ import annotations

from hpctrain.scaling.benches.data import add_arguments, main

__all__ = ["add_arguments", "main"]
