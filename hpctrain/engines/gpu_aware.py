"""Whether the MPI in use reads and writes device memory by itself."""

from __future__ import annotations

import ctypes
import os

__all__ = ["mpi_reads_device_memory"]

_QUERIES = {"cuda": "MPIX_Query_cuda_support", "rocm": "MPIX_Query_rocm_support"}


def mpi_reads_device_memory(kind: str) -> bool:
    """Ask the MPI library that mpi4py has loaded.

    Open MPI answers by a function. Cray MPICH has the function too, and needs
    MPICH_GPU_SUPPORT_ENABLED=1 besides. An MPI without the function is taken not to.

    Args:
        kind: `cuda` (ROCm included, as in torch).
    """
    import torch
    from mpi4py import MPI

    if kind != "cuda":
        return False
    name = _QUERIES["rocm" if torch.version.hip else "cuda"]
    try:
        query = getattr(ctypes.CDLL(MPI.__file__), name)
    except (OSError, AttributeError):
        return False
    query.restype = ctypes.c_int
    if "CRAY MPICH" in MPI.Get_library_version().upper():
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    return bool(query())
