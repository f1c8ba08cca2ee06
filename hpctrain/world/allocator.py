"""What a step frees stays with the process, for the next step to take.

Every training step asks for the same blocks (activations, gradients) and frees them again. C
libraries give large free blocks back to the kernel, which hands them out anew page by page, zeroed:
thousands of page faults a step. From `distribute` on, free memory is kept instead.

The C library is told so in the running process. Where torch was built with an allocator of its own
(mimalloc, in its wheels for ARM), that one reads a variable when torch is loaded: `hpctrain run`
sets it. Whoever has set an allocator's variables keeps them, and `HPCTRAIN_KEEP_MEMORY=0` leaves
everything as it is.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import LaunchError

__all__ = ["VARIABLE", "find_choice", "keep_freed_memory", "launch_variables", "wants_it_kept"]

VARIABLE = "HPCTRAIN_KEEP_MEMORY"
_MIMALLOC = "MIMALLOC_PURGE_DELAY"
_MIMALLOC_MS = "60000"
"""Longer than a step; what is not asked for again within it goes back to the kernel."""
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Of `mallopt`: when the end of the heap is given back, and how many blocks lie outside of it."""
_GLIBC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc")


def wants_it_kept(environ: Mapping[str, str]) -> bool:
    """Whether free memory is to be kept. Pure.

    Raises:
        LaunchError: the variable says neither.
    """
    value = environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise LaunchError(f"{VARIABLE}={value!r} is neither 0 nor 1; mend or unset it")
    return value == "1"


def launch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks must find in their environment before they load torch. Pure."""
    return {_MIMALLOC: _MIMALLOC_MS} if wants_it_kept(environ) else {}


def find_choice(environ: Mapping[str, str]) -> str | None:
    """How the user has chosen to treat free memory, in words; None: not at all. Pure."""
    if not wants_it_kept(environ):
        return f"{VARIABLE}=0"
    preloaded = environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in _OTHERS):
        return f"LD_PRELOAD={preloaded}"
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return f"GLIBC_TUNABLES={environ['GLIBC_TUNABLES']}"
    return next((f"{name}={environ[name]}" for name in _GLIBC if name in environ), None)


@functools.cache
def keep_freed_memory() -> str:
    """Let this process keep what is freed from now on; what became of it, in words.

    What is free already is given back first: memory of a data set that was converted, say.
    """
    choice = find_choice(os.environ)
    if choice is not None:
        return f"as {choice} says"
    library = ctypes.CDLL(None)
    try:
        library.malloc_trim(0)
        kept = library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1)
    except AttributeError:
        kept = 0
    if not kept:
        return "given back to the system: this C library cannot be told otherwise"
    if _MIMALLOC not in os.environ and _torch_has_mimalloc():
        return (
            "torch gives it back to the system and takes it anew at each step; start by "
            f"`hpctrain run`, or export {_MIMALLOC}={_MIMALLOC_MS}"
        )
    return "kept for the next step"


def _torch_has_mimalloc() -> bool:
    """Whether torch's tensors come from an allocator of its own."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        library = Path(spec.origin).parent / "lib" / "libc10.so"
        return b"mimalloc" in library.read_bytes()
    except OSError:
        return False  # torch was built otherwise: nothing is known
