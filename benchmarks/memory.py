"""Memory of a node for weights, gradients and optimizer state, as the kernel counts it.

`python -m benchmarks.memory --help`; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan

__all__ = ["FORMULAS", "formula", "main", "make_variants"]

FORMULAS: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    "compute": ((1, 0), (1, 0), (2, 0)),
    "hpctrain-mpi-replicated": ((1, 0), (1, 0), (2, 0)),
    "hpctrain-mpi-sharded": ((1, 0), (1, 0), (0, 3)),
    "ddp": ((1, 0), (1, 0), (2, 0)),
    "ddp-zero": ((1, 0), (1, 0), (0, 2)),
}
"""By kind, for weights, gradients and the update by Adam: how many times the model's size a node
needs for each of its ranks, and once for all. Of its n ranks' gradients hpctrain holds all that a
rank does not add up itself, n - 1 times the model, and the sum once; what a rank adds up itself has
a place as well, reserved but never touched, which the kernel counts nowhere. An update that is
divided holds the two moments once, and new weights on their way."""
PARTS = ("weights", "gradients", "update")
MODELS = {"32 MiB": (8, 1024), "128 MiB": (8, 2048)}
"""By name: how many linear layers, and how wide. Large ones, for what an allocator rounds up to
should be little beside them; and as many as make every gradient one rank's to add up."""
# Freed memory goes back to the kernel at once, so that what is counted is what is in use; some
# builds of torch bring mimalloc, the others use the C library's malloc.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",
}


def formula(kind: str, num_ranks: int, num_bytes: int) -> dict[str, int]:
    """Bytes that a node should need for a model of so many bytes. Pure."""
    parts = zip(PARTS, FORMULAS[kind], strict=True)
    return {part: (each * num_ranks + once) * num_bytes for part, (each, once) in parts}


def make_variants(kinds: Sequence[str], ranks: Sequence[int]) -> list[Variant]:
    """Every kind at every number of ranks, in fresh processes: nothing is left by others. Pure."""
    return [
        Variant(
            name=f"{kind}-{n}",
            launch=f"{kind}-{n}",
            kind=kind,
            num_ranks=n,
            environ=_MALLOC,
        )
        for n in ranks
        for kind in kinds
    ]


def main() -> int:
    """Measure, or be a rank that is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    command.add_arguments(parser, blocks=1, ranks=False)
    parser.add_argument("--ranks", default="2,4", metavar="N,M", help="(default: 2,4)")
    parser.add_argument("--model", choices=tuple(MODELS), help="its size (default: 128 MiB)")
    args = parser.parse_args()
    if args.worker:
        from benchmarks.memory_subjects import make_maker
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make_maker(MODELS))
        return 0
    rules = command.rules_of(args)
    kinds = command.choose("variant", args.variants or ",".join(FORMULAS), tuple(FORMULAS))
    default = "32 MiB" if args.quick else "128 MiB"
    (model,) = command.choose("model", args.model or default, tuple(MODELS))
    plan = BenchPlan(
        name="memory",
        module="benchmarks.memory",
        cases=[Case(name=model, warmup=0, repeats=1)],
        variants=make_variants(kinds, command.numbers("ranks", args.ranks)),
        comparisons=(),
        rules=rules,
        settings={"optimizer": "AdamW(fused)"},
    )
    result: dict[str, Any] = run_plan(plan, args.json)
    for item in result["series"]:
        item["metrics"] = _metrics(item)
    return command.report(args, result)


def _metrics(item: dict[str, Any]) -> dict[str, float]:
    """Measured and expected MiB of a node, and their ratio."""
    measured = item["outcome"]["pss_bytes"]
    expected = formula(item["kind"], item["num_ranks"], item["outcome"]["model_bytes"])
    metrics: dict[str, float] = {}
    for part in PARTS:
        metrics[f"{part} MiB"] = measured[part] / 2**20
        metrics[f"{part} by formula"] = expected[part] / 2**20
    metrics["all MiB"] = measured["all"] / 2**20
    metrics["all / formula"] = measured["all"] / sum(expected.values())
    return metrics


if __name__ == "__main__":
    sys.exit(command.run_main(main))
