"""One data set from one rank to all: `scatter` against MPI_Send, a copy and pickles; `share`.

`python -m benchmarks.data_movement --help`; docs/data-movement.md says what is measured.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from hpctrain.bench import BenchPlan, Case, Variant, command, parse_size, run_plan

__all__ = ["CASES", "COMPARISONS", "VARIANTS", "add_arguments", "main", "make_plan", "measure"]

CASES = ("16 MiB", "1024 MiB")
_NAMES = (
    "memcpy",
    "mpi-send",
    "mpi-send-fresh",
    "scatter",
    "scatter-stored",
    "pickled-arrays",
    "pickled-lists",
    "share",
)
# One launch: none of them leaves a thread behind, and all use one copy of the data.
VARIANTS = tuple(Variant(name=name, launch="data") for name in _NAMES)
COMPARISONS = (
    ("scatter", "mpi-send"),
    ("scatter", "mpi-send-fresh"),
    ("scatter", "memcpy"),
    ("scatter-stored", "memcpy"),
    ("pickled-arrays", "scatter"),
    ("pickled-lists", "scatter"),
)


def make_plan(args: argparse.Namespace) -> BenchPlan:
    """What to measure."""
    rules = command.rules_of(args)
    names = command.choose("variant", args.variants or ",".join(_NAMES), _NAMES)
    cases = CASES[:1] if args.quick else CASES[1:]
    return BenchPlan(
        name="data_movement",
        module="benchmarks.data_movement",
        cases=[
            Case(name=case, warmup=1, repeats=1 if parse_size(case) > 2**26 else 8)
            for case in cases
        ],
        variants=[variant for variant in VARIANTS if variant.name in names],
        comparisons=COMPARISONS,
        rules=rules,
        settings={"row": "3,072 float32"},
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command.add_arguments(parser, blocks=11)


def main(args: argparse.Namespace) -> int:
    """Measure, or be a rank that is measured."""
    if args.worker:
        from benchmarks.data_movement_subjects import make
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make)
        return 0
    return measure(args)


def measure(args: argparse.Namespace) -> int:
    """Measure and report; also as a part of `benchmarks.data`."""
    result: dict[str, Any] = run_plan(make_plan(args), args.json)
    for item in result["series"]:
        moved = parse_size(item["case"]) * (args.ranks - 1) / args.ranks
        item["metrics"] = {"moved GB/s": moved / median(item["seconds"]) / 1e9, **item["outcome"]}
    return command.report(args, result)


if __name__ == "__main__":
    sys.exit(command.run_program("benchmarks.data_movement", __doc__, add_arguments, main))
