"""Predicted against measured memory of a rank whose model is sharded over many.

`python -m benchmarks.grid_memory` compares what `hpctrain plan --memory` says with what one rank of
8 and of 64 holds: by torch's own tracker on tensors without data, and, with `--real`, by the kernel
(or a GPU's allocator) in a process that trains. `--together 2` starts that many ranks, which train
one model with `hpctrain.split`, on one GPU if there is one. docs/plan.md has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.grid_memory_subjects import MODELS, Transformer, loss_of, tracked
from hpctrain import log
from hpctrain.bench import numbers, run_main
from hpctrain.errors import LaunchError
from hpctrain.predict import Footprint, Subject, measure_footprint, plan_grids
from hpctrain.predict.grid_choice import GridChoice

__all__ = ["footprint_of", "main", "predicted", "row", "run_ranks"]

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 900.0
# Freed memory goes back to the kernel at once, so that what is counted is what is in use.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",
}


def footprint_of(name: str, batch: int) -> Footprint:
    """What `hpctrain plan --memory` measures of the model."""

    def make() -> Subject:
        model = Transformer(*MODELS[name])
        return Subject(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            loss=lambda: loss_of(model, batch),
            batch=batch,
        )

    return measure_footprint(make)


def predicted(footprint: Footprint, num_ranks: int, shard: str) -> GridChoice:
    """What it says of one rank, with all ranks in the data dimension."""
    plan = plan_grids(
        footprint, num_ranks, memory_per_rank=None, micro_batch=footprint.batch, ranks_per_node=8
    )
    (found,) = [
        choice
        for choice in plan.choices
        if choice.shape.data == num_ranks and choice.shard == shard
    ]
    return found


def row(footprint: Footprint, num_ranks: int, shard: str, found: dict[str, Any]) -> dict[str, Any]:
    """One comparison."""
    need = predicted(footprint, num_ranks, shard).need
    ideal = 4 * footprint.weights / num_ranks  # 16 bytes for each of 4
    return {
        "ranks": num_ranks,
        "shard": shard,
        "16N/n": round(ideal),
        "held_predicted": need.held,
        "held_measured": found["held"],
        "held_error_percent": round(100 * (need.held / found["held"] - 1), 1),
        "held_over_16N/n": round(found["held"] / ideal, 3),
        "peak_predicted": need.total,
        "peak_measured": found["peak"],
        "peak_error_percent": round(100 * (need.total / found["peak"] - 1), 1),
    }


def _real(name: str, num_ranks: int, batch: int, shard: str) -> dict[str, Any]:
    """In a process of its own: nothing is left by others."""
    words = [name, str(num_ranks), str(batch), shard]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.grid_memory_subjects", *words],
        cwd=ROOT,
        env=os.environ | _MALLOC,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise LaunchError(f"measuring {' '.join(words)} failed: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_ranks(num_ranks: int, *words: str) -> dict[str, Any]:
    """Start ranks of a module of benchmarks; rank 0 prints one line of JSON.

    Raises:
        LaunchError: they failed; with the end of what they said.
    """
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "run", "-n", str(num_ranks), "--quiet", "-m", *words],
        cwd=ROOT,
        env=os.environ | _MALLOC,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise LaunchError(f"measuring {' '.join(words)} failed: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _together(name: str, num_ranks: int, batch: int, shard: str) -> dict[str, Any]:
    """Ranks that train one model; what the one with the most holds."""
    return run_ranks(num_ranks, "benchmarks.grid_memory_ranks", name, str(batch), shard)


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    names = ("16N/n", "held_predicted", "held_measured", "peak_predicted", "peak_measured")
    cells = [
        [
            *(each["ranks"], each["shard"]),
            *(log.format_bytes(each[name]) for name in names),
            *(f"{each[name]} %" for name in ("held_error_percent", "peak_error_percent")),
        ]
        for each in rows
    ]
    headers = ["ranks", "shard", "16 N/n", "held, predicted", "held, measured"]
    headers += ["peak, predicted", "peak, measured", "error held", "error peak"]
    return log.table(headers, cells, title=title)


def main() -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grid_memory", description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="805M")
    parser.add_argument("--ranks", default="8,64", metavar="N,M", help="(default: 8,64)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="(default: 1)")
    parser.add_argument("--shards", default="parameters,gradients", metavar="A,B")
    parser.add_argument("--real", action="store_true", help="train for real as well")
    parser.add_argument("--together", type=int, metavar="N", help="N ranks train one model as well")
    parser.add_argument("--save", action="store_true", help="keep it in benchmarks/results/plan")
    args = parser.parse_args()
    footprint = footprint_of(args.model, args.batch)
    cases = [(n, s) for n in numbers("ranks", args.ranks) for s in args.shards.split(",")]
    result: dict[str, Any] = {
        "model": args.model,
        "weight_bytes": footprint.weights,
        "batch": args.batch,
        "torch": torch.__version__,
        "tracked": [row(footprint, n, s, tracked(args.model, n, args.batch, s)) for n, s in cases],
    }
    told = f"{args.model}: {log.format_bytes(footprint.weights)} of weights, AdamW, float32"
    print(_table(f"{told}; by torch's tracker", result["tracked"]))
    if args.real:
        found = [(n, s, _real(args.model, n, args.batch, s)) for n, s in cases]
        result["device"] = found[0][2]["device"]
        result["real"] = [row(footprint, n, s, one) for n, s, one in found]
        print(_table(f"{told}; allocated on {result['device']}", result["real"]))
    if args.together:
        shards = args.shards.split(",")
        found = [
            (args.together, s, _together(args.model, args.together, args.batch, s)) for s in shards
        ]
        result["device"] = found[0][2]["device"]
        result["together"] = [row(footprint, n, s, one) for n, s, one in found]
        where = f"{args.together} ranks share {result['device']}"
        print(_table(f"{told}; {where}", result["together"]))
    if args.save:
        day = datetime.now(UTC).date().isoformat()
        place = f"{platform.machine()}-{os.cpu_count()}cores"
        path = ROOT / "benchmarks" / "results" / "plan" / f"grid_memory-{day}-{place}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        log.notice(f"saved as {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
