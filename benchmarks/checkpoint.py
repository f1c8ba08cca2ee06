"""What saving costs: time that training is blocked, time that a running save takes, and the disk.

`python -m benchmarks.checkpoint --help`; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan

__all__ = ["BLOCKED", "CHECKSUMS", "COMPARISONS", "TRAINING", "WRITING", "add_arguments", "main"]

BLOCKED = "blocked"
TRAINING = "training"
WRITING = "writing"
CHECKSUMS = "checksums"
_CASES = (BLOCKED, TRAINING, WRITING, CHECKSUMS)
_OF = {
    "memcpy": BLOCKED,
    "save": BLOCKED,
    "steps": TRAINING,
    "steps-again": TRAINING,
    "steps-saving": TRAINING,
    "steps-waiting": TRAINING,
    "steps-torch-save": TRAINING,
    "disk": WRITING,
    "save-and-wait": WRITING,
    "crc32": CHECKSUMS,
    "sha256": CHECKSUMS,
    "blake2b": CHECKSUMS,
}
# One launch: a variant's thread sleeps while the others are measured.
VARIANTS = tuple(Variant(name=name, launch="checkpoint") for name in _OF)
COMPARISONS = (
    ("save", "memcpy"),
    ("steps-again", "steps"),
    ("steps-saving", "steps"),
    ("steps-waiting", "steps"),
    ("steps-torch-save", "steps"),
    ("save-and-wait", "disk"),
    ("sha256", "crc32"),
    ("blake2b", "crc32"),
)
_STEPS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command.add_arguments(parser, blocks=11)
    parser.add_argument("--cases", metavar="A,B", help=f"from {', '.join(_CASES)} (default: all)")


def main(args: argparse.Namespace) -> int:
    """Measure, or be a rank that is measured."""
    if args.worker:
        from benchmarks.checkpoint_subjects import make
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make)
        return 0
    known = [variant.name for variant in VARIANTS]
    names = command.choose("variant", args.variants or ",".join(known), known)
    cases = command.choose("case", args.cases or ",".join(_CASES), _CASES)
    steps = 4 if args.quick else _STEPS
    plan = BenchPlan(
        name="checkpoint",
        module="benchmarks.checkpoint",
        cases=[
            Case(
                name=case,
                warmup=0,
                repeats=steps if case == TRAINING else 1,
                without=frozenset(name for name, of in _OF.items() if of != case),
            )
            for case in cases
        ],
        variants=[v for v in VARIANTS if v.name in names and _OF[v.name] in cases],
        comparisons=COMPARISONS,
        rules=command.rules_of(args),
        settings={
            "steps": steps,
            "workload": "512-adamw-fused",
            "state of the other cases": "256 MiB",
        },
    )
    result: dict[str, Any] = run_plan(plan, args.json)
    for item in result["series"]:
        num_bytes = item["counts"].pop("state_bytes")
        seconds = median(item["seconds"])
        item["metrics"] = {"state MiB": num_bytes / 2**20}
        if item["case"] != TRAINING:
            item["metrics"]["GB/s"] = num_bytes / seconds / 1e9
    return command.report(args, result)


if __name__ == "__main__":
    sys.exit(command.run_program("benchmarks.checkpoint", __doc__, add_arguments, main))
