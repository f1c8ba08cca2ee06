"""How the rates of `large_batch` were chosen: `python -m benchmarks.large_batch_search`.

The test digits are left out; a fifth of the others validates. The plain recipe takes the rate that
is best for batches of 32, as the linear rule says; its own rows show what tuning it anew gives.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from statistics import mean

import hpctrain as hpc
from hpctrain import log

__all__ = ["main"]

_GRID = {
    "sgd 32": ((0.01, 0.02, 0.05, 0.1), (0.0,)),
    "sgd 1024 plain": ((0.003, 0.01, 0.03, 0.1), (0.0,)),
    "lars 1024": ((0.0125, 0.025, 0.05, 0.1), (0.1, 0.3)),
    "lamb 1024": ((0.0025, 0.005, 0.0075, 0.01), (0.1, 0.3)),
}


def main() -> int:
    """Train with every rate and warm-up, and print the mean accuracies."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_batch_search", description=__doc__
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="K", help="(default: 3)")
    args = parser.parse_args()
    rows = []
    with hpc.init(seed=7, device="cpu", num_threads=1) as world:
        from benchmarks.large_batch_training import EPOCHS, SETTINGS, load_digits, train

        engine = hpc.connect(world).engine
        data = load_digits(validation=True)
        for name, (rates, warmups) in _GRID.items():
            for rate in rates:
                for warmup in warmups:
                    setting = replace(SETTINGS[name], base_rate=rate, warmup=warmup)
                    found = [
                        train(world, engine, setting, data, epochs=EPOCHS, seed=100 + seed)[-1]
                        for seed in range(args.seeds)
                    ]
                    accuracies = (100 * mean(found), 100 * min(found), 100 * max(found))
                    rows.append((name, rate, warmup, *(f"{a:.2f}" for a in accuracies)))
        if world.rank == 0:
            headers = ("setting", "base rate", "warm-up", "validation accuracy %", "least", "most")
            print(log.table(headers, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
