"""Who decides what becomes of memory that a training step frees. Pure.

`hpctrain.world.allocator` says why it is kept, and does so in a process. Where torch was built with
an allocator of its own (mimalloc, in its wheels for ARM), that one reads a variable when torch is
loaded: whatever starts ranks sets it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import LaunchError

__all__ = ["MIMALLOC_VARIABLE", "VARIABLE", "find_choice", "launch_variables", "wants_it_kept"]

VARIABLE = "HPCTRAIN_KEEP_MEMORY"
MIMALLOC_VARIABLE = "MIMALLOC_PURGE_DELAY"
_MIMALLOC_MS = "60000"
"""Longer than a step; memory not reused within this time is returned to the kernel."""
_GLIBC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc")


def wants_it_kept(environ: Mapping[str, str]) -> bool:
    """Whether free memory is to be kept. Pure.

    Raises:
        LaunchError: the variable says neither.
    """
    value = environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise LaunchError(f"{VARIABLE}={value!r} is neither 0 nor 1; correct or unset it")
    return value == "1"


def launch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks must find in their environment before they load torch. Pure."""
    return {MIMALLOC_VARIABLE: _MIMALLOC_MS} if wants_it_kept(environ) else {}


def find_choice(environ: Mapping[str, str]) -> str | None:
    """The user's own setting for free memory, in words; None: there is none. Pure."""
    if not wants_it_kept(environ):
        return f"{VARIABLE}=0"
    preloaded = environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in _OTHERS):
        return f"LD_PRELOAD={preloaded}"
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return f"GLIBC_TUNABLES={environ['GLIBC_TUNABLES']}"
    return next((f"{name}={environ[name]}" for name in _GLIBC if name in environ), None)
