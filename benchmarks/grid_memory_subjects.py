"""What one rank of many holds of a sharded model, measured on torch's `fake` process group.

The fake group has any number of ranks and sends nothing, so one process is one rank of 64. Memory
is counted in three ways that know nothing of `hpctrain.predict`: by torch's own tracker on tensors
without data, by the kernel, and by CUDA's allocator. Free of MPI.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from hpctrain.sharding import choose_units, module_facts

__all__ = ["MODELS", "SEQUENCE", "Transformer", "allocated", "fake_ranks", "now", "tracked"]

MODELS = {
    "8M": (256, 10, 128),
    "9M": (512, 3, 128),
    "23M": (256, 8, 32768),
    "25M": (512, 8, 128),
    "805M": (2048, 16, 128),
}
"""By name: width, blocks and words; of 23M most is words, which the root gathers."""
SEQUENCE = 128
_HEAD = 64


class Block(nn.Module):
    """Attention and two layers, each with a norm before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, -1, _HEAD).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Head(nn.Module):
    """Words out, one row for each word: what a unit gives must not be a view."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.words = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x.flatten(0, 1))


class Transformer(nn.Module):
    """Words in, words out; where words are few, nearly all parameters are in blocks."""

    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = Head(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of words."""
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: int, device: str = "cpu") -> Tensor:
    """One micro-batch."""
    x = torch.zeros(batch, SEQUENCE, dtype=torch.int64, device=device)
    return functional.cross_entropy(model(x), x.flatten())


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """A default process group of so many ranks, of which this process is the first."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _shard(model: Transformer, mesh: Any, shard: str) -> None:
    """FSDP2 over the units of `hpctrain.split`, with the options that it gives torch."""
    options = {} if shard == "parameters" else {"reshard_after_forward": False}
    for name in choose_units(*module_facts(model)):
        fully_shard(model.get_submodule(name), mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def tracked(name: str, num_ranks: int, batch: int, shard: str = "parameters") -> dict[str, int]:
    """Bytes by torch's own tracker, on tensors without data: held after a step, and at the peak."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    with fake_ranks(num_ranks):
        mesh = init_device_mesh("cpu", (num_ranks,))  # it looks at values: before the fake mode
        with FakeTensorMode():
            model = Transformer(*MODELS[name])
            _shard(model, mesh, shard)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            tracker = FSDPMemTracker(model, optimizer)
            with tracker:
                for _ in range(2):
                    loss_of(model, batch).backward()
                    optimizer.step()
                    held = _total(tracker, "current")
                    optimizer.zero_grad()
                    tracker.reset_mod_stats()  # it follows one step at a time; its peak stays
            return {"held": held, "peak": _total(tracker, "peak")}


def _total(tracker: Any, kind: str) -> int:
    (found,) = tracker.get_tracker_snapshot(kind).values()
    return int(found["Total"])


def allocated(name: str, num_ranks: int, batch: int, shard: str = "parameters") -> dict[str, int]:
    """Bytes of a process that trains for real, in a process of its own.

    On a GPU by its allocator, elsewhere by the kernel; what was there before does not count.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    with fake_ranks(num_ranks):
        with torch.device("meta"):
            model = Transformer(*MODELS[name])
        if shard != "none":
            _shard(model, init_device_mesh(device, (num_ranks,)), shard)
        # Libraries make their work space at the first use.
        loss_of(Transformer(64, 1, 128).to(device), 1, device).backward()
        before = now(device)[0]
        model.to_empty(device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                _local(parameter).fill_(1e-3)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss_of(model, batch, device).backward()
            computed = now(device)[1]
            optimizer.step()
            held, peak = now(device)
            optimizer.zero_grad()
    return {
        "held": held - before,
        "peak": peak - before,
        "peak_before_update": computed - before,
    }


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def now(device: str) -> tuple[int, int]:
    """Bytes now, and at the most so far."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(found["VmRSS"]) << 10, int(found["VmHWM"]) << 10


def main() -> None:
    """Measure in this process: MODEL RANKS BATCH SHARD; one line of JSON."""
    name, ranks, batch, shard = sys.argv[1:]
    found = allocated(name, int(ranks), int(batch), shard)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps(found | {"device": where, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
