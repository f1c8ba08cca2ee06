"""`hpctrain bench collectives`: the same as `python -m benchmarks.collectives` in a checkout."""

from __future__ import annotations

from hpctrain.scaling.benches.collectives import add_arguments, main

__all__ = ["add_arguments", "main"]
