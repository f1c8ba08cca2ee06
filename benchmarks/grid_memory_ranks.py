"""What a rank holds of a model that several ranks train together, by `hpctrain.split`.

`hpctrain run -n 2 -m benchmarks.grid_memory_ranks 805M 1 parameters`: MODEL BATCH SHARD. On one GPU
that the ranks share, if there is one, else by the kernel. Rank 0 prints one line of JSON, of the
rank with the most. `benchmarks.grid_memory --together 2` starts it.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor
from torch.nn import functional

import hpctrain as hpc
from benchmarks.grid_memory_subjects import MODELS, SEQUENCE, Transformer, loss_of, now
from hpctrain.world import World

__all__ = ["main"]

_STEPS = 3


def _loss(scores: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(scores, words.flatten())


def measure(world: World, name: str, batch: int, shard: str) -> dict[str, int]:
    """Collective: bytes after an update with its gradients, and at the peak."""
    kind = world.device.type
    # Libraries make their work space at the first use.
    loss_of(Transformer(64, 1, 128).to(world.device), 1, kind).backward()
    before = now(kind)[0]
    held: list[int] = []
    with hpc.Grid(world) as grid:
        model = hpc.split(grid, lambda: Transformer(*MODELS[name]), shard=shard)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.register_step_post_hook(lambda *_: held.append(now(kind)[0]))
        replica = hpc.distribute(world, model, optimizer, grid=grid)
        x = torch.zeros(batch, SEQUENCE, dtype=torch.int64, device=world.device)
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(_STEPS):
            replica.learn(_loss, x, x, num_samples=batch)
        peak = now(kind)[1]
        replica.close()
    return {"held": held[-1] - before, "peak": peak - before}


def main() -> None:
    """Measure, and let rank 0 tell."""
    name, batch, shard = sys.argv[1:]
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with hpc.init(seed=1, device=device, allow_shared_device=True) as world:
        told = world.comm.gather(measure(world, name, int(batch), shard), root=0)
        if told is not None:
            most = {key: max(one[key] for one in told) for key in told[0]}
            where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
            print(json.dumps(most | {"device": where, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
