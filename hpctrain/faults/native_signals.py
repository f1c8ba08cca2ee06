"""Signal handlers that are not Python's: who has one, and how it is put back afterwards.

Python's `signal` module knows its own handlers only. Libraries install others: MPICH takes SIGUSR1
at its start, faulthandler whatever it is given, NCCL may take SIGUSR1, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass

__all__ = ["NativeHandler", "find_native"]

_BYTES = 256  # more than a struct sigaction anywhere
_WORD = ctypes.sizeof(ctypes.c_void_p)


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeHandler:
    """A handler that native code installed."""

    number: int
    owner: str
    """The library or program that its code is in; nothing where that is not known."""
    _action: bytes

    @property
    def is_mpis(self) -> bool:
        """Whether it is MPI's own, for news of failed processes that hpctrain gets otherwise."""
        return "mpi" in os.path.basename(self.owner).lower()

    def restore(self) -> None:
        """Put it back."""
        action = ctypes.create_string_buffer(self._action, _BYTES)
        ctypes.CDLL(None).sigaction(self.number, action, None)


def find_native(number: signal.Signals) -> NativeHandler | None:
    """The native handler of a signal; None where there is none, or Python has one of its own."""
    if callable(signal.getsignal(number)):
        return None
    try:
        libc = ctypes.CDLL(None)
        action = ctypes.create_string_buffer(_BYTES)
        if libc.sigaction(int(number), None, action) != 0:
            return None
    except (OSError, AttributeError):
        return None  # a system without it: nothing can be said
    # The handler's address comes first; 0 and 1 are "default" and "ignore".
    address = int.from_bytes(action.raw[:_WORD], "little")
    if address in (0, 1):
        return None
    return NativeHandler(number=int(number), owner=_owner(libc, address), _action=action.raw)


def _owner(libc: ctypes.CDLL, address: int) -> str:
    symbol = _Symbol()
    try:
        found = libc.dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
    except AttributeError:
        return ""
    return os.fsdecode(symbol.file) if found and symbol.file else ""
