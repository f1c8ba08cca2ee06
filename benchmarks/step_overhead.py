"""What a training step costs on several ranks, as a ratio to the same step without communication.

`python -m benchmarks.step_overhead --help`; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys

from hpctrain import log
from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan
from hpctrain.engines import probe_horovod

__all__ = ["COMPARISONS", "VARIANTS", "add_arguments", "main"]

_YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}  # other MPIs do not look at it

VARIANTS = (
    Variant(name="compute", launch="plain"),
    Variant(name="compute-again", launch="plain"),
    Variant(name="compute-beside-idle", launch="mpi"),
    Variant(name="hpctrain-mpi", launch="mpi"),
    Variant(name="hpctrain-mpi-replicated", launch="mpi"),
    Variant(name="hpctrain-torch", launch="torch"),
    Variant(name="hpctrain-horovod", launch="hpctrain-horovod"),
    Variant(name="hpctrain-horovod-fusion", launch="hpctrain-horovod"),
    Variant(name="horovod", launch="horovod", environ=_YIELD),
    Variant(name="ddp", launch="ddp"),
    Variant(name="ddp-zero", launch="ddp"),
)
"""`compute-again` shows the noise of the method; `compute-beside-idle` the cost of an hpctrain that
is connected and does nothing; `hpctrain-mpi` updates as `auto` chooses, `-replicated` everything on
every rank; `hpctrain-horovod` is the arena, `-fusion` Horovod's own. Horovod and DDP have threads,
so each has processes of its own."""

COMPARISONS = (
    *((variant.name, "compute") for variant in VARIANTS[1:]),
    ("hpctrain-horovod", "horovod"),
    ("hpctrain-horovod-fusion", "horovod"),
    ("hpctrain-mpi", "horovod"),
    ("hpctrain-torch", "ddp"),
    ("hpctrain-mpi", "ddp"),
    ("hpctrain-mpi", "ddp-zero"),
    ("hpctrain-mpi", "hpctrain-mpi-replicated"),
)
# Names only: importing the workloads would import torch before a rank has set its threads.
_WORKLOADS = ("256-sgd", "512-adamw", "512-adamw-fused")
_WARMUP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command.add_arguments(parser, blocks=20)
    parser.add_argument(
        "--steps", type=int, default=8, metavar="S", help="steps in a block (default: 8)"
    )
    parser.add_argument(
        "--workloads", metavar="A,B", help=f"from {', '.join(_WORKLOADS)} (default: all)"
    )


def main(args: argparse.Namespace) -> int:
    """Measure, or be a rank that is measured."""
    if args.worker:
        from benchmarks.step_subjects import make_maker
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make_maker())
        return 0
    rules = command.rules_of(args)
    known = [variant.name for variant in VARIANTS]
    names = command.choose("variant", args.variants or ",".join(_built(known)), known)
    default = _WORKLOADS[:1] if args.quick else _WORKLOADS
    workloads = command.choose("workload", args.workloads or ",".join(default), _WORKLOADS)
    steps = 2 if args.quick else args.steps
    plan = BenchPlan(
        name="step_overhead",
        module="benchmarks.step_overhead",
        cases=[Case(name=name, warmup=_WARMUP, repeats=steps) for name in workloads],
        variants=[variant for variant in VARIANTS if variant.name in names],
        comparisons=COMPARISONS,
        rules=rules,
        settings={"steps": steps, "warmup": _WARMUP},
    )
    return command.report(args, run_plan(plan, args.json))


def _built(known: list[str]) -> list[str]:
    """The variants that can run here."""
    horovod = probe_horovod()
    if not horovod.built:
        log.notice(f"variants of Horovod are left out: {horovod.why}")
    return [name for name in known if horovod.built or "horovod" not in name]


if __name__ == "__main__":
    sys.exit(command.run_program("benchmarks.step_overhead", __doc__, add_arguments, main))
