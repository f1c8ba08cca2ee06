"""A training step of a sharded model, as a ratio to the same step without communication.

`python -m benchmarks.sharded_step --help`; docs/benchmarks.md says what is measured and how. A
transformer of 21 million parameters, with few tokens a step and with more.
"""

from __future__ import annotations

import argparse
import sys

from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan

__all__ = ["CASES", "COMPARISONS", "VARIANTS", "main"]

CASES = {"64 tokens": (1, 64), "256 tokens": (4, 64)}
"""Sequences of each rank, and their length."""

VARIANTS = (
    Variant(name="compute", launch="plain"),
    Variant(name="compute-again", launch="plain"),
    Variant(name="hpctrain-mpi", launch="mpi"),
    Variant(name="state", launch="split"),
    Variant(name="gradients", launch="split"),
    Variant(name="parameters", launch="split"),
    Variant(name="parameters-by-message", launch="split"),
    Variant(name="gloo-gradients", launch="gloo"),
    Variant(name="gloo-parameters", launch="gloo"),
)
"""`compute-again` shows the noise of the method; `hpctrain-mpi` is `distribute` without `split`;
`state`, `gradients` and `parameters` are what `split(shard=...)` takes; `parameters-by-message`
gathers by messages, as ranks of several nodes do; `gloo-...` is torch's own fully_shard."""

COMPARISONS = (
    *((variant.name, "compute") for variant in VARIANTS[1:]),
    ("gradients", "gloo-gradients"),
    ("parameters", "gloo-parameters"),
    ("parameters", "parameters-by-message"),
)
_QUICK = "8 tokens"
_WARMUP = 0


def main() -> int:
    """Measure, or be a rank that is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded_step", description=__doc__)
    command.add_arguments(parser, blocks=11)
    parser.add_argument(
        "--steps", type=int, default=1, metavar="S", help="steps in a block (default: 1)"
    )
    args = parser.parse_args()
    if args.worker:
        from benchmarks.sharded_step_subjects import make
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make)
        return 0
    rules = command.rules_of(args)
    known = [variant.name for variant in VARIANTS]
    names = command.choose("variant", args.variants or ",".join(known), known)
    steps = 1 if args.quick else args.steps
    cases = (_QUICK,) if args.quick else tuple(CASES)
    plan = BenchPlan(
        name="sharded_step",
        module="benchmarks.sharded_step",
        cases=[Case(name=name, warmup=_WARMUP, repeats=steps) for name in cases],
        variants=[variant for variant in VARIANTS if variant.name in names],
        comparisons=COMPARISONS,
        rules=rules,
        settings={"steps": steps, "warmup": _WARMUP, "optimizer": "AdamW(fused)"},
    )
    return command.report(args, run_plan(plan, args.json))


if __name__ == "__main__":
    sys.exit(command.run_main(main))
