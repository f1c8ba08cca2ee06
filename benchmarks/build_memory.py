"""Memory of a node while a model is built: whole on every rank, or tensor by tensor into shards.

`python -m benchmarks.build_memory` starts ranks that build one model by `hpctrain.split`, in two
ways: from a model that each rank has built whole, and from the function that builds it, which runs
on torch's meta device. Each rank's peak is counted by the kernel (VmHWM) beyond what it had before;
a node has the sum of its ranks. docs/larger_models.md has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hpctrain as hpc
from benchmarks.grid_memory import run_ranks
from benchmarks.grid_memory_subjects import MODELS, Transformer, now
from hpctrain import log
from hpctrain.bench import choose, numbers, run_main

__all__ = ["WAYS", "built", "main"]

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("whole", "function")


def built(name: str, way: str) -> dict[str, Any] | None:
    """Collective: bytes of this node while the ranks build a model; None but on rank 0."""
    with hpc.init(seed=7) as world, hpc.Grid(world) as grid:
        # Libraries make their work space at the first use.
        hpc.split(grid, lambda: Transformer(64, 2, 128), shard="parameters")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = now("cpu")[0]

        def build() -> Transformer:
            return Transformer(*MODELS[name])

        model = hpc.split(grid, build if way == "function" else build(), shard="parameters")
        held, peak = (each - before for each in now("cpu"))
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        told = world.comm.gather((held, peak), root=0)
    if told is None:
        return None
    held_by, peak_by = zip(*told, strict=True)
    return {
        "weight_bytes": weights,
        "node_held": sum(held_by),
        "node_peak": sum(peak_by),
        "rank_peak": max(peak_by),
    }


def _measure(name: str, num_ranks: int, way: str) -> dict[str, Any]:
    found = run_ranks(num_ranks, "benchmarks.build_memory", "--worker", name, "--ways", way)
    return {"ranks": num_ranks, "way": way, **found}


def main() -> int:
    """Measure, print; or be a rank that is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.build_memory", description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="25M")
    parser.add_argument("--ranks", default="2,4", metavar="N,M", help="(default: 2,4)")
    parser.add_argument("--ways", default=",".join(WAYS), metavar="A,B")
    parser.add_argument("--save", action="store_true", help="keep it in benchmarks/results/plan")
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    ways = choose("way", args.ways, WAYS)
    if args.worker:
        found = built(args.worker, ways[0])
        if found is not None:
            print(json.dumps(found))
        return 0
    rows = [_measure(args.model, n, way) for n in numbers("ranks", args.ranks) for way in ways]
    cells = [
        [
            *(each["ranks"], each["way"]),
            *(log.format_bytes(each[key]) for key in ("node_held", "node_peak", "rank_peak")),
            f"{each['node_peak'] / each['weight_bytes']:.2f}",
        ]
        for each in rows
    ]
    headers = ["ranks", "built", "node holds", "node peak", "rank peak", "peak / weights"]
    title = f"{args.model}: {log.format_bytes(rows[0]['weight_bytes'])} of weights, one node"
    print(log.table(headers, cells, title=title))
    if args.save:
        day = datetime.now(UTC).date().isoformat()
        place = f"{platform.machine()}-{os.cpu_count()}cores"
        path = ROOT / "benchmarks" / "results" / "plan" / f"build_memory-{day}-{place}.json"
        path.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")
        log.notice(f"saved as {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
