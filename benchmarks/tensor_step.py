"""A training step of a small model with divided layers: over hpctrain's process group, and Gloo.

`python -m benchmarks.tensor_step --help`; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys

from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan

__all__ = ["CASES", "COMPARISONS", "VARIANTS", "main"]

CASES = {"width 64": 64, "width 256": 256}
"""How wide the model is; sums over the ranks have 16 rows of that many numbers."""

VARIANTS = (
    Variant(name="compute", launch="plain"),
    Variant(name="hpctrain", launch="hpctrain"),
    Variant(name="hpctrain-split", launch="hpctrain"),
    Variant(name="gloo", launch="gloo"),
    Variant(name="sums", launch="hpctrain"),
    Variant(name="gloo-sums", launch="gloo"),
)
"""`hpctrain` and `gloo` are torch's parallelize_module, with the same code; `hpctrain-split` is
`split(tensor=...)`, which also checks; `sums` are the sums over ranks of a step alone."""

COMPARISONS = (
    ("hpctrain", "gloo"),
    ("hpctrain-split", "gloo"),
    ("sums", "gloo-sums"),
    ("hpctrain", "compute"),
    ("gloo", "compute"),
)
_WARMUP = 2


def main() -> int:
    """Measure, or be a rank that is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_step", description=__doc__)
    command.add_arguments(parser, blocks=15)
    parser.add_argument(
        "--steps", type=int, default=20, metavar="S", help="steps in a block (default: 20)"
    )
    args = parser.parse_args()
    if args.worker:
        from benchmarks.tensor_step_subjects import make
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make)
        return 0
    rules = command.rules_of(args)
    known = [variant.name for variant in VARIANTS]
    names = command.choose("variant", args.variants or ",".join(known), known)
    steps = 2 if args.quick else args.steps
    cases = list(CASES)[:1] if args.quick else list(CASES)
    plan = BenchPlan(
        name="tensor_step",
        module="benchmarks.tensor_step",
        cases=[Case(name=name, warmup=_WARMUP, repeats=steps) for name in cases],
        variants=[variant for variant in VARIANTS if variant.name in names],
        comparisons=COMPARISONS,
        rules=rules,
        settings={"steps": steps, "warmup": _WARMUP, "optimizer": "AdamW(fused)"},
    )
    return command.report(args, run_plan(plan, args.json))


if __name__ == "__main__":
    sys.exit(command.run_main(main))
