"""One batch on one machine: a process with all cores, against every way to divide cores by ranks.

`python -m benchmarks.layout --help`; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from statistics import median
from typing import Any

from hpctrain import freed_memory, log
from hpctrain.bench import BenchPlan, Case, Variant, command, paired_ratio, run_plan
from hpctrain.errors import ConfigError

__all__ = [
    "BASELINE",
    "BATCHES",
    "KEPT",
    "KINDS",
    "OURS",
    "best_pairs",
    "divisors",
    "main",
    "make_variants",
]

BASELINE = "one-process"
KEPT = "one-process-kept"
"""The same with what hpctrain does about free memory, which is no part of distributing."""
OURS = ("hpctrain-mpi", "hpctrain-mpi-one-copy")
"""The second holds the weights once a node (`share_parameters=True`)."""
PEERS = ("ddp", "ddp-kept", "ddp-zero")
KINDS = (BASELINE, KEPT, *OURS, "ddp", "ddp-kept")
"""`ddp-zero` can be asked for as well."""
_KNOWN = (*KINDS, "ddp-zero")
_PLAIN = (BASELINE, "ddp", "ddp-zero")
"""Torch as its users start it."""
# Names and batches only: importing the workloads would import torch before its threads are set.
BATCHES = {"small": 32, "mlp": 256, "transformer": 64, "transformer-dropout": 64, "cnn": 128}
_DEFAULT = ("mlp", "transformer", "cnn")
_WARMUP = 2


def divisors(number: int) -> list[int]:
    """What divides a number evenly, in order. Pure."""
    return [n for n in range(1, number + 1) if number % n == 0]


def make_variants(kinds: Sequence[str], ranks: Sequence[int], *, num_cores: int) -> list[Variant]:
    """Every kind in every layout; each is a launch of its own, with its own threads. Pure.

    Raises:
        ConfigError: a number of ranks does not divide the cores.
    """
    uneven = [n for n in ranks if num_cores % n]
    if uneven:
        choices = ", ".join(map(str, divisors(num_cores)[1:]))
        raise ConfigError(f"{uneven[0]} ranks do not divide {num_cores} cores; choose {choices}")
    alone = [(kind, 1) for kind in (BASELINE, KEPT) if kind in kinds]
    layouts = alone + [(kind, n) for kind in kinds if (kind, 1) not in alone for n in ranks]
    names = [(f"{kind}-{n}x{num_cores // n}", kind, n) for kind, n in layouts]
    return [
        Variant(
            name=name,
            launch=name,
            kind=kind,
            num_ranks=n,
            num_threads=num_cores // n,
            environ={freed_memory.VARIABLE: "0" if kind in _PLAIN else "1"},
        )
        for name, kind, n in names
    ]


def best_pairs(result: Mapping[str, Any]) -> list[dict[str, object]]:
    """Compare each case's fastest layouts of hpctrain with the fastest of all others. Pure."""
    ratios: list[dict[str, object]] = []
    for case in dict.fromkeys(item["case"] for item in result["series"]):
        best: dict[str, Mapping[str, Any]] = {}
        for item in result["series"]:
            if item["case"] == case:
                rival = best.get(item["kind"], item)
                best[item["kind"]] = min(item, rival, key=lambda one: median(one["seconds"]))
        for own, peer in product(OURS, (KEPT, *PEERS)):
            if own in best and peer in best:
                mine, theirs = best[own], best[peer]
                ratio = paired_ratio(mine["seconds"], theirs["seconds"])
                pair = {"variant": mine["variant"], "baseline": theirs["variant"]}
                ratios.append({"case": case, **pair, **asdict(ratio)})
    return ratios


def main() -> int:
    """Measure, or be a rank that is measured."""
    args = _parse()
    if args.worker:
        from benchmarks.step_subjects import make_maker
        from hpctrain.bench import serve

        make = make_maker()
        names = args.variants.split(",")
        serve(args.worker, names, lambda world, name: make(world, _subject_of(name)))
        return 0
    rules = command.rules_of(args)
    kinds = command.choose("variant", args.variants or ",".join(KINDS), _KNOWN)
    default = ("small",) if args.quick else _DEFAULT
    workloads = command.choose("workload", args.workloads or ",".join(default), tuple(BATCHES))
    num_cores = args.cores or len(os.sched_getaffinity(0))
    ranks = _choose_ranks(args.ranks, num_cores, [BATCHES[name] for name in workloads])
    variants = make_variants(kinds, ranks, num_cores=num_cores)
    steps = 1 if args.quick else args.steps
    plan = BenchPlan(
        name="layout",
        module="benchmarks.layout",
        cases=[Case(name=name, warmup=_WARMUP, repeats=steps) for name in workloads],
        variants=variants,
        comparisons=[(v.name, f"{BASELINE}-1x{num_cores}") for v in variants[1:]],
        rules=rules,
        settings={
            "steps": steps,
            "warmup": _WARMUP,
            "num_cores": num_cores,
            "batches": {name: BATCHES[name] for name in workloads},
            "best_of_kind": True,
        },
    )
    result: dict[str, Any] = run_plan(plan, args.json)
    result["ratios"] += best_pairs(result)
    return command.report(args, result)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layout", description=__doc__)
    command.add_arguments(parser, blocks=9, ranks=False, bind="numa")
    parser.add_argument(
        "--ranks", metavar="N,M", help="numbers of ranks (default: all that divide the cores)"
    )
    parser.add_argument(
        "--cores", type=int, metavar="C", help="cores to use (default: all that are allowed)"
    )
    parser.add_argument(
        "--steps", type=int, default=5, metavar="S", help="steps in a block (default: 5)"
    )
    parser.add_argument(
        "--workloads",
        metavar="A,B",
        help=f"from {', '.join(BATCHES)} (default: {', '.join(_DEFAULT)})",
    )
    return parser.parse_args()


def _choose_ranks(text: str | None, num_cores: int, batches: Sequence[int]) -> list[int]:
    """The numbers of ranks that are asked for, or all that share cores and batches evenly."""
    if text is not None:
        asked = command.numbers("ranks", text)
        uneven = [(n, batch) for n in asked for batch in batches if batch % n]
        if uneven:
            raise ConfigError(f"{uneven[0][0]} ranks do not divide a batch of {uneven[0][1]}")
        return asked
    all_of_them = divisors(num_cores)[1:]
    good = [n for n in all_of_them if not any(batch % n for batch in batches)]
    if good != all_of_them:
        left_out = ", ".join(str(n) for n in all_of_them if n not in good)
        log.notice(f"{left_out} ranks are left out: a batch cannot be divided among them evenly")
    return good


def _subject_of(variant: str) -> str:
    """What a variant measures, without its layout; memory is kept by how it was started."""
    return variant.rpartition("-")[0].removesuffix("-kept")


if __name__ == "__main__":
    sys.exit(command.run_main(main))
