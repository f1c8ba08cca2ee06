"""Ranks of a node that wait for each other: spinning against sleeping, and who pays for it.

`python -m benchmarks.barrier --help`; docs/benchmarks.md says what is measured and how. This is
where the rule of `hpctrain.world.barrier.must_sleep` comes from.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan

__all__ = ["CASES", "KINDS", "main", "make_variants"]

KINDS = ("nobody-waits", "mpi", "spinning", "sleeping")
"""`nobody-waits` does the work alone: the baseline. `mpi` is MPI's own barrier, as it comes."""
CASES = ("nothing to do", "one rank works", "all ranks work")


def make_variants(kinds: Sequence[str], ranks: Sequence[int]) -> list[Variant]:
    """Every kind at every number of ranks; those of one number share a launch. Pure."""
    return [
        Variant(name=f"{kind}-{n}", launch=f"{n} ranks", kind=kind, num_ranks=n)
        for n in ranks
        for kind in kinds
    ]


def main() -> int:
    """Measure, or be a rank that is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.barrier", description=__doc__)
    command.add_arguments(parser, blocks=11, ranks=False)
    parser.add_argument(
        "--ranks", metavar="N,M", help="numbers of ranks (default: as many as cores, and twice)"
    )
    args = parser.parse_args()
    if args.worker:
        from benchmarks.barrier_subjects import make_maker
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make_maker(CASES))
        return 0
    rules = command.rules_of(args)
    kinds = command.choose("variant", args.variants or ",".join(KINDS), KINDS)
    num_cores = len(os.sched_getaffinity(0))
    ranks = command.numbers("ranks", args.ranks or f"{max(2, num_cores)},{2 * num_cores}")
    variants = make_variants(kinds, ranks)
    idle = frozenset(f"{KINDS[0]}-{n}" for n in ranks)
    plan = BenchPlan(
        name="barrier",
        module="benchmarks.barrier",
        cases=[
            Case(name=CASES[0], warmup=20, repeats=50 if args.quick else 400, without=idle),
            Case(name=CASES[1], warmup=2, repeats=5 if args.quick else 100),
            Case(name=CASES[2], warmup=2, repeats=5 if args.quick else 100),
        ],
        variants=variants,
        comparisons=[
            *((f"{kind}-{n}", f"{KINDS[0]}-{n}") for n in ranks for kind in kinds[1:]),
            *((f"sleeping-{n}", f"spinning-{n}") for n in ranks),
        ],
        rules=rules,
        settings={"num_cores": num_cores, "work": "matrix products"},
    )
    result: dict[str, Any] = run_plan(plan, args.json)
    for item in result["series"]:
        if item["case"] == CASES[0]:
            item["metrics"] = {"us a barrier": 1e6 * median(item["seconds"])}
    return command.report(args, result)


if __name__ == "__main__":
    sys.exit(command.run_main(main))
