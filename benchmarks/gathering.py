"""Allgather and reduce-scatter of large tensors on each engine, against copies of the output.

`python -m benchmarks.gathering --help`; docs/benchmarks.md says how it is measured. Each rank gives
80 MB. The baseline is the copy of what an allgather gives, on all ranks at the same time.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan

__all__ = ["CASES", "KINDS", "main"]

KINDS = ("memcpy", "mpi", "torch")
CASES = ("allgather", "allgather_into", "reduce_scatter")
NUM_BYTES = 80_000_000


def main() -> int:
    """Measure, or be a rank that is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gathering", description=__doc__)
    command.add_arguments(parser, blocks=11)
    args = parser.parse_args()
    if args.worker:
        from benchmarks.gathering_subjects import make_maker
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make_maker(NUM_BYTES))
        return 0
    rules = command.rules_of(args)
    names = command.choose("variant", args.variants or ",".join(KINDS), KINDS)
    plan = BenchPlan(
        name="gathering",
        module="benchmarks.gathering",
        cases=[Case(name=name, warmup=1, repeats=1 if args.quick else 3) for name in CASES],
        variants=[Variant(name=name, launch=name) for name in names],
        comparisons=[(name, KINDS[0]) for name in names if name != KINDS[0]],
        rules=rules,
        settings={"bytes of each rank": NUM_BYTES, "dtype": "float32"},
    )
    result: dict[str, Any] = run_plan(plan, args.json)
    return command.report(args, result)


if __name__ == "__main__":
    sys.exit(command.run_main(main))
