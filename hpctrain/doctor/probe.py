"""Two ranks add numbers: the program that `hpctrain doctor` starts under mpirun.

Prints one JSON line per rank. Takes the path of the MPI library, to query it about GPU buffers.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

__all__ = ["main"]

# Beyond what MPIs send eagerly, so that the real transport is used.
NUM_ELEMENTS = 1 << 17


def main(library: str) -> int:
    """Collective: add up arrays over all ranks and check every element."""
    import mpi4py

    mpi4py.rc.initialize = False
    import numpy as np
    from mpi4py import MPI

    level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    own = np.arange(NUM_ELEMENTS, dtype=np.float64) + rank
    total = np.empty_like(own)
    world.Allreduce(own, total)
    begin = time.perf_counter()
    world.Allreduce(own, total)
    elapsed_s = time.perf_counter() - begin
    expected = size * np.arange(NUM_ELEMENTS, dtype=np.float64) + size * (size - 1) / 2
    right = bool((total == expected).all())
    names = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    facts = {
        "rank": rank,
        "size": size,
        "right": right,
        "threads": names[level],
        "allreduce_s": elapsed_s,
        "cuda_aware": _is_cuda_aware(library),
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
    MPI.Finalize()
    return 0 if right else 1


def _is_cuda_aware(library: str) -> bool | None:
    """Query the MPI library; None if it has no such function."""
    try:
        return bool(ctypes.CDLL(library or None).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
