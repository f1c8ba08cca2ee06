"""Allreduce from 1 KiB to 256 MiB on each engine, against one copy of the same memory.

`python -m benchmarks.collectives --help`; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from hpctrain import log
from hpctrain.bench import command
from hpctrain.bench.session import BenchPlan, Case, Variant, run_plan
from hpctrain.engines import probe_horovod

__all__ = ["SIZES", "VARIANTS", "add_arguments", "bandwidths", "main", "repeats_for"]

SIZES = (*(f"{4**i} KiB" for i in range(5)), *(f"{n} MiB" for n in (1, 4, 16, 64, 100, 256)))
VARIANTS = (
    Variant(name="memcpy", launch="memcpy"),
    Variant(name="mpi", launch="mpi"),
    Variant(name="mpi-allocated", launch="mpi"),
    Variant(name="torch", launch="torch"),
    Variant(name="horovod", launch="horovod"),
)
"""`mpi-allocated` is a buffer that the engine itself has allocated, the others are torch's own."""
# A block lasts about half a second; with less, the load, counted in ticks of 10 ms, is a guess.
_BYTES_A_BLOCK = 256 << 20
_MOST_REPEATS = 300


def repeats_for(size: int) -> int:
    """How often a block repeats a size: enough to be timed, not more than takes a moment. Pure."""
    return max(2, min(_MOST_REPEATS, _BYTES_A_BLOCK // size))


def bandwidths(size: int, seconds: float, copy_s: float, num_ranks: int) -> dict[str, float]:
    """The field's terms: algbw, busbw (both GB/s), and busbw in per cent of memcpy's. Pure.

    busbw is what an ideal ring would have to move per rank, so that it can be compared over
    numbers of ranks and with the speed of memory.
    """
    algbw = size / seconds / 1e9
    busbw = algbw * 2 * (num_ranks - 1) / num_ranks
    return {
        "algbw GB/s": algbw,
        "busbw GB/s": busbw,
        "% of memcpy": 100 * busbw * copy_s / size * 1e9,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command.add_arguments(parser, blocks=11)
    parser.add_argument("--sizes", metavar="A,B", help=f"from {', '.join(SIZES)} (default: all)")


def main(args: argparse.Namespace) -> int:
    """Measure, or be a rank that is measured."""
    if args.worker:
        from hpctrain.bench.collective_subjects import make_maker
        from hpctrain.bench.worker import serve

        serve(args.worker, args.variants.split(","), make_maker())
        return 0
    rules = command.rules_of(args)
    known = [variant.name for variant in VARIANTS]
    names = command.choose("variant", args.variants or ",".join(_built(known)), known)
    default = SIZES[:7:3] if args.quick else SIZES
    sizes = command.choose("size", args.sizes or ",".join(default), SIZES)
    plan = BenchPlan(
        name="collectives",
        module="hpctrain.bench.collectives",
        cases=[Case(name=s, warmup=1, repeats=repeats_for(command.parse_size(s))) for s in sizes],
        variants=[variant for variant in VARIANTS if variant.name in names],
        comparisons=[(name, "memcpy") for name in known[1:]],
        rules=rules,
        settings={"operation": "allreduce in place, sum, float32"},
    )
    result: dict[str, Any] = run_plan(plan, args.json)
    _add_metrics(result)
    return command.report(args, result)


def _built(known: list[str]) -> list[str]:
    """The variants that can run here."""
    horovod = probe_horovod()
    if not horovod.built:
        log.notice(f"horovod is left out: {horovod.why}")
    return [name for name in known if horovod.built or name != "horovod"]


def _add_metrics(result: dict[str, Any]) -> None:
    copies = {s["case"]: median(s["seconds"]) for s in result["series"] if s["variant"] == "memcpy"}
    for item in result["series"]:
        size, seconds = command.parse_size(item["case"]), median(item["seconds"])
        if item["variant"] == "memcpy":
            item["metrics"] = {"algbw GB/s": size / seconds / 1e9}
            continue
        metrics = bandwidths(size, seconds, copies.get(item["case"], 0.0), item["num_ranks"])
        item["metrics"] = {k: v for k, v in metrics.items() if v or k != "% of memcpy"}


if __name__ == "__main__":
    sys.exit(command.run_program("benchmarks.collectives", __doc__, add_arguments, main))
