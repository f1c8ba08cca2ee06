"""How long stages of a pipeline wait: GPipe and 1F1B with stages of known duration.

`python -m benchmarks.pipeline_bubble --help`; docs/benchmarks.md says what is measured and how. The
stages sleep, so that more ranks than cores wait for each other and not for a core. `alone` sleeps
as long as one stage works in one step: what a pipeline without a bubble would take.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan

__all__ = ["KINDS", "bubble_of", "expected_bubble", "main", "make_variants"]

KINDS = ("alone", "gpipe", "1f1b")
FORWARD_S, BACKWARD_S = 0.020, 0.040
"""What a stage takes for a micro-batch; a backward pass takes about twice a forward pass."""
MICRO_BATCHES = (4, 8, 12)


def expected_bubble(num_stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage waits, where all stages are equally fast. Pure."""
    return (num_stages - 1) / (micro_batches + num_stages - 1)


def bubble_of(seconds: float, micro_batches: int) -> float:
    """The share of a step of this length in which a stage waited. Pure."""
    return 1.0 - micro_batches * (FORWARD_S + BACKWARD_S) / seconds


def make_variants(kinds: Sequence[str], stages: Sequence[int]) -> list[Variant]:
    """Every kind at every number of stages; those of one number share a launch. Pure."""
    return [
        Variant(name=f"{kind}-{p}", launch=f"{p} stages", kind=kind, num_ranks=p)
        for p in stages
        for kind in kinds
    ]


def case_name(micro_batches: int) -> str:
    """What a case is called. Pure."""
    return f"{micro_batches} micro-batches"


def main() -> int:
    """Measure, or be a rank that is measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline_bubble", description=__doc__
    )
    command.add_arguments(parser, blocks=5, ranks=False)
    parser.add_argument(
        "--ranks", metavar="N,M", default="2,3,4", help="numbers of stages (default: 2,3,4)"
    )
    args = parser.parse_args()
    if args.worker:
        from benchmarks.pipeline_bubble_subjects import make
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make)
        return 0
    kinds = command.choose("variant", args.variants or ",".join(KINDS), KINDS)
    stages = command.numbers("ranks", args.ranks)
    counts = MICRO_BATCHES[:1] if args.quick else MICRO_BATCHES
    plan = BenchPlan(
        name="pipeline_bubble",
        module="benchmarks.pipeline_bubble",
        cases=[Case(name=case_name(m), warmup=0, repeats=1 if args.quick else 2) for m in counts],
        variants=make_variants(kinds, stages),
        comparisons=[(f"{kind}-{p}", f"{KINDS[0]}-{p}") for p in stages for kind in kinds[1:]],
        rules=command.rules_of(args),
        settings={"forward_s": FORWARD_S, "backward_s": BACKWARD_S},
    )
    result: dict[str, Any] = run_plan(plan, args.json)
    for item in result["series"]:
        kind, _, num_stages = item["variant"].rpartition("-")
        micro_batches = int(item["case"].split()[0])
        if kind != KINDS[0]:
            item["metrics"] = {
                "bubble": bubble_of(median(item["seconds"]), micro_batches),
                "(p-1)/(m+p-1)": expected_bubble(int(num_stages), micro_batches),
            }
    return command.report(args, result)


if __name__ == "__main__":
    sys.exit(command.run_main(main))
