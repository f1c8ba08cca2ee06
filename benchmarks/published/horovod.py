"""Horovod's published scaling efficiencies, predicted from one of them. Simulated.

`python -m benchmarks.published.horovod [--save]`. The machine's bandwidth is fitted to VGG-16 on 16
GPUs, one number; all others are predicted. docs/plan.md has the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.published.architectures import MODELS
from hpctrain import log
from hpctrain.predict import Exchange, Layer, Machine, Profile, find_machine, predict

__all__ = ["CALIBRATION", "PUBLISHED", "calibrate", "exchange", "main", "predictions", "profile_of"]

ROOT = Path(__file__).resolve().parents[2]
BATCH = 64
IMAGES_PER_S = {"Inception V3": 134.4, "ResNet-101": 119.4, "VGG-16": 130.9}
"""One GPU of that cluster: Horovod's README of 2017-09, in github.com/horovod/horovod/pull/44."""

PUBLISHED = {
    # 4 servers of 4 Pascal GPUs, 25 Gbit/s RoCE, RDMA with NCCL: that README's 2022.6, 1746.2 and
    # 1787.4 images a second over 16 times those of one GPU.
    16: {"Inception V3": 0.941, "ResNet-101": 0.914, "VGG-16": 0.853},
    # 32 servers of 4: README of 2017-10 to 2018 ("90 %" twice, "79 %"); arXiv 1802.05799 has the
    # same curve, "over 90 percent" with RDMA for the first two.
    128: {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.79},
    # 128 servers of 4: horovod/docs/benchmarks.rst ("90 % ... and 68 % for VGG-16").
    512: {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68},
}
CALIBRATION = ("VGG-16", 16)
_BACKWARD_SHARE = 2 / 3
"""Backward multiplies twice as often as forward: by the weights' and by the inputs' gradients."""


def profile_of(model: str) -> Profile:
    """A step of one GPU: the published time, divided over layers by their multiplications."""
    parts = MODELS[model]()
    step_s = BATCH / IMAGES_PER_S[model]
    total = sum(part.multiplications for part in parts)
    layers = tuple(
        Layer(
            name=part.name,
            backward_s=_BACKWARD_SHARE * step_s * part.multiplications / total,
            gradient_bytes=4 * part.num_weights,
        )
        for part in reversed(parts)
    )
    return Profile(
        machine="one Pascal GPU, as published",
        model=model,
        batch=BATCH,
        input_s=0.0,
        forward_s=(1 - _BACKWARD_SHARE) * step_s,
        layers=layers,
        update_s=0.0,
        parameters=sum(part.num_weights for part in parts),
    )


def exchange(cycle_s_per_rank: float = 20e-6) -> Exchange:
    """Horovod of 2017: pieces of up to 64 MB every 5 ms, the defaults until release 0.21.

    Every rank tells rank 0 at each cycle, over TCP (the published command line has `-mca btl
    ^openib`): 20 us for each is an assumption. With 10 or 40 us no prediction moves by more than
    the 5 points that are asked for (tested).
    """
    return Exchange(bucket_bytes=64 << 20, cycle_s=5e-3, cycle_s_per_rank=cycle_s_per_rank)


def calibrate(machine: Machine, way: Exchange) -> Machine:
    """Find the bandwidth of a node at which the calibration point is as published, by bisection."""
    model, count = CALIBRATION
    profile, wanted = profile_of(model), PUBLISHED[count][model]
    low, high = 1e8, 2e10
    for _ in range(60):
        middle = (low * high) ** 0.5
        found = predict(profile, _with_bandwidth(machine, middle), count, exchange=way)
        low, high = (low, middle) if found.efficiency.value > wanted else (middle, high)
    return _with_bandwidth(machine, (low * high) ** 0.5)


def _with_bandwidth(machine: Machine, bytes_per_s: float) -> Machine:
    inter = replace(machine.costs.inter, bytes_per_s=bytes_per_s)
    return replace(machine, costs=replace(machine.costs, inter=inter))


def predictions(machine: Machine, way: Exchange) -> list[dict[str, object]]:
    """One row for each published number."""
    rows: list[dict[str, object]] = []
    for count, by_model in PUBLISHED.items():
        for model, published in by_model.items():
            found = predict(profile_of(model), machine, count, exchange=way)
            rows.append(
                {
                    "model": model,
                    "gpus": count,
                    "published": published,
                    "simulated": round(found.efficiency.value, 4),
                    "error_points": round(100 * (found.efficiency.value - published), 2),
                    "calibrated": (model, count) == CALIBRATION,
                    "messages": found.num_messages,
                }
            )
    return rows


def main() -> int:
    """Calibrate, predict, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.horovod")
    parser.add_argument("--save", action="store_true", help="keep it in benchmarks/results")
    args = parser.parse_args()
    way = exchange()
    machine = calibrate(find_machine("pascal-roce25"), way)
    rows = predictions(machine, way)
    today = datetime.now(UTC).date().isoformat()
    result = {
        "benchmark": "published_horovod",
        "date": today,
        "simulated": True,
        "calibrated_bytes_per_s": round(machine.costs.inter.bytes_per_s),
        "rows": rows,
    }
    print(log.table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"bandwidth of a node, fitted: {machine.costs.inter.bytes_per_s / 1e9:.2f} GB/s")
    if args.save:
        folder = ROOT / "benchmarks" / "results" / "plan"
        folder.mkdir(exist_ok=True)
        path = folder / f"published_horovod-{today}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
