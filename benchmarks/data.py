"""Data for all ranks: how fast batches come, and whether a step ever waits for one.

`python -m benchmarks.data --help`; docs/data.md says what is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import data_movement
from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan

__all__ = ["PARTS", "Part", "add_arguments", "main", "part_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Cases and variants that belong together; a result of its own, `data_NAME`."""

    subjects: str
    """The module whose `make_maker()` makes the subjects; imported on the ranks alone."""
    cases: Sequence[Case]
    variants: Sequence[str]
    """Names are unique over all parts."""
    comparisons: Sequence[tuple[str, str]]
    settings: dict[str, object]


_WIDTHS = ("64 features", "3072 features")
PARTS = {
    "loader": Part(
        subjects="benchmarks.data_loader_subjects",
        cases=[
            Case(name=name, warmup=20, repeats=n)
            for name, n in (("64 features", 1200), ("3072 features", 300))
        ],
        variants=("dataloader", "dataloader-tuned", "loader", "loader-keyed", "loader-thread"),
        comparisons=[
            (peer, ours)
            for ours in ("loader", "loader-keyed", "loader-thread")
            for peer in ("dataloader", "dataloader-tuned")
        ],
        settings={"batch": "64 samples a rank, float32 and a label, shuffled", "repeat": "batch"},
    ),
    "stall": Part(
        subjects="benchmarks.data_loader_subjects",
        cases=[Case(name=name, warmup=3, repeats=60) for name in _WIDTHS],
        variants=(
            "step",
            "step-again",
            "step-dataloader",
            "step-tuned",
            "step-loader",
            "step-thread",
        ),
        comparisons=[
            (name, "step")
            for name in (
                "step-again",
                "step-dataloader",
                "step-tuned",
                "step-loader",
                "step-thread",
            )
        ],
        settings={"batch": "64 samples a rank", "repeat": "batch, then 10 ms of computation"},
    ),
}


MOVEMENT = "movement"
"""The part that `data_movement` measures."""


def part_of(variants: Sequence[str]) -> Part:
    """The part that these variants belong to. Pure."""
    return next(part for part in PARTS.values() if set(variants) <= set(part.variants))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command.add_arguments(parser, blocks=11)
    known = ", ".join([*PARTS, MOVEMENT])
    parser.add_argument("--parts", metavar="A,B", help=f"from {known} (default: all)")


def main(args: argparse.Namespace) -> int:
    """Measure, or be a rank that is measured."""
    if args.worker:
        from hpctrain.bench import serve

        variants = args.variants.split(",")
        serve(args.worker, variants, import_module(part_of(variants).subjects).make_maker())
        return 0
    codes = []
    out: Path | None = args.json
    known = [*PARTS, MOVEMENT]
    for name in command.choose("part", args.parts or ",".join(known), known):
        args.json = None if out is None else out.with_stem(f"{out.stem}_{name}")
        if name == MOVEMENT:
            codes.append(data_movement.measure(args))
            continue
        result: dict[str, Any] = run_plan(_plan(name, args), args.json)
        for item in result["series"]:
            item["metrics"] = dict(item["outcome"])
        codes.append(command.report(args, result))
    return max(codes)


def _plan(name: str, args: argparse.Namespace) -> BenchPlan:
    part = PARTS[name]
    chosen = command.choose("variant", args.variants or ",".join(part.variants), part.variants)
    return BenchPlan(
        name=f"data_{name}",
        module="benchmarks.data",
        cases=part.cases,
        variants=[Variant(name=variant, launch=name) for variant in chosen],
        comparisons=part.comparisons,
        rules=command.rules_of(args),
        settings=part.settings,
    )


if __name__ == "__main__":
    sys.exit(command.run_program("benchmarks.data", __doc__, add_arguments, main))
