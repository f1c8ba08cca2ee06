"""What a step frees stays with the process, for the next step to take.

Every training step allocates the same blocks (activations, gradients) and frees them again. C
libraries return large free blocks to the kernel, which provides them again page by page, zeroed:
thousands of page faults a step. From `distribute` on, free memory is kept instead.

The C library is configured in the running process; torch's own allocator by a variable. Variables
set by the user are kept: `hpctrain.freed_memory` has the rules.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

from hpctrain.freed_memory import (
    MIMALLOC_VARIABLE,
    find_choice,
    launch_variables,
    wants_it_kept,
)
from hpctrain.world.launcher import environment

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Of `mallopt`: when the end of the heap is returned, and how many blocks lie outside of it."""


@functools.cache
def keep_freed_memory() -> str:
    """Let this process keep what is freed from now on; what became of it, in words.

    What is already free is returned first: memory of a converted data set, say.
    """
    choice = find_choice(environment())
    told = "kept for the next step"
    if choice is not None:
        told = f"as {choice} says"
    elif not _tell_c_library():
        told = "returned to the system: this C library cannot keep it"
    if not wants_it_kept(environment()):
        return told
    if MIMALLOC_VARIABLE not in environment() and _torch_has_mimalloc():
        cure = " ".join(f"{name}={value}" for name, value in launch_variables({}).items())
        return (
            "torch returns it to the system and allocates it again at each step; start with "
            f"`hpctrain run`, or export {cure}"
        )
    return told


def _tell_c_library() -> bool:
    library = ctypes.CDLL(None)
    try:
        library.malloc_trim(0)
        return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1))
    except AttributeError:
        return False


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
