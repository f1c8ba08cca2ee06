"""How fast this rank multiplies matrices and moves memory, in under a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["measure_compute", "measure_memory"]

# Per kind of device: rows of the matrices, bytes of the copied block.
_SIZES = {"cpu": (1024, 64 << 20), "cuda": (4096, 256 << 20)}
_SPAN_S = 0.4
_FEWEST = 3


def measure_compute(device: torch.device, *, span_s: float = _SPAN_S) -> float:
    """Measure GFLOP/s of a single-precision matrix product: the best of several."""
    import torch

    rows = _SIZES.get(device.type, _SIZES["cpu"])[0]
    a = torch.ones(rows, rows, device=device)
    b = torch.ones(rows, rows, device=device)
    out = torch.empty(rows, rows, device=device)
    best_s = _best_time(lambda: torch.mm(a, b, out=out), device, span_s)
    return 2 * rows**3 / best_s / 1e9


def measure_memory(device: torch.device, *, span_s: float = _SPAN_S) -> float:
    """Measure GB/s of copying a block that no cache holds, read and write counted."""
    import torch

    num_bytes = _SIZES.get(device.type, _SIZES["cpu"])[1]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best_s = _best_time(lambda: target.copy_(source), device, span_s)
    return 2 * num_bytes / best_s / 1e9


def _best_time(work: Callable[[], object], device: torch.device, span_s: float) -> float:
    import torch

    def once() -> float:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    once()  # warms caches, clocks and threads
    times: list[float] = []
    end = time.perf_counter() + span_s
    while len(times) < _FEWEST or time.perf_counter() < end:
        times.append(once())
    return min(times)
