"""Signals that stop a training: they set a flag, and the next step boundary acts on it.

Batch systems warn a job by a signal before they end it. A handler runs between any two bytecodes,
perhaps inside a collective, so it may do nothing but remember.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from hpctrain import log
from hpctrain.errors import ConfigError

__all__ = [
    "SIGNALS",
    "NativeHandler",
    "Preemption",
    "find_native",
    "signal_number",
]

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
    """The library or program that contains its code; empty if unknown."""
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


SIGNALS = ("SIGUSR2", "SIGUSR1", "SIGTERM")
"""Warning signals of batch systems. Request USR2: NCCL uses USR1 itself."""

_NEVER = ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")
_PYTHONS_OWN = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)

Handler = Callable[[int, FrameType | None], Any]


def signal_number(name: str) -> signal.Signals:
    """The signal of a name such as `SIGUSR2` or `USR2`. Pure.

    Raises:
        ConfigError: there is no such signal, or it cannot be used to request a stop.
    """
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    known = {one.name for one in signal.Signals}
    if full not in known or full in _NEVER:
        valid = ", ".join((*SIGNALS, "SIGINT", "SIGHUP"))
        why = "cannot be used as a warning" if full in known else "is unknown here"
        raise ConfigError(f"signal {name!r} {why}; choose from {valid} and others")
    return signal.Signals[full]


class Preemption:
    """Remembers the first of some signals. A context manager; `close` puts everything back.

    Handlers that were set by Python code before are called as well, after the flag is set. Those of
    native code cannot be called from here: they are replaced until `close`, with a warning unless
    they are MPI's own (MPICH has one for SIGUSR1). In forked children
    the signals are ignored, except SIGTERM, which ends them as before: batch systems often send a
    signal to every process of a job, and a worker's death would end the training before its save.

    Args:
        signals: Names, with or without `SIG`.

    Raises:
        ConfigError: not in the main thread, or a name is unknown, missing or given twice.
    """

    def __init__(self, signals: Sequence[str] = SIGNALS) -> None:
        if isinstance(signals, str):
            raise ConfigError(f"signals={signals!r} is one text; give a tuple, ({signals!r},)")
        numbers = [signal_number(name) for name in signals]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ConfigError(f"signals={signals!r} must name at least one signal, each once")
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "Python handles signals in its main thread only, and this is the thread "
                f"{threading.current_thread().name!r}; make this object in the main thread"
            )
        self._requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._native = [found for number in numbers if (found := find_native(number)) is not None]
        for found in self._native:
            if not found.is_mpis:
                log.warn(
                    f"{signal.Signals(found.number).name} was handled by native code "
                    f"({found.owner or 'unknown'}), and now stops this training; choose "
                    "other signals if that handler is needed"
                )
        # Bound methods are created at each access; this one can be compared and has no cycle.
        itself = weakref.ref(self)

        def remember(number: int, frame: FrameType | None) -> None:
            if (kept := itself()) is not None:
                kept._remember(number, frame)

        self._handler: Handler = remember
        for number in numbers:
            self._previous[number] = signal.signal(number, self._handler)
        _open.add(self)

    @property
    def requested(self) -> str | None:
        """The name of the first received signal, or None."""
        return self._requested

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that are listened to."""
        return tuple(number.name for number in self._previous)

    def close(self) -> None:
        """Put the previous handlers back, where ours are still in place. May be called again."""
        _open.discard(self)
        ours = [n for n in self._previous if signal.getsignal(n) is self._handler]
        for number in ours:
            # None stands for native code, which follows below.
            previous = self._previous[number]
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        for found in self._native:
            if found.number in ours:
                found.restore()
        self._previous, self._native = {}, []

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._requested is None:
            self._requested = signal.Signals(number).name
        previous = self._previous.get(signal.Signals(number))
        if previous not in _PYTHONS_OWN and callable(previous):
            previous(number, frame)

    def _forget_in_child(self) -> None:
        for number in self._previous:
            mine = signal.getsignal(number) is self._handler
            if mine:
                default = signal.SIG_DFL if number is signal.SIGTERM else signal.SIG_IGN
                with contextlib.suppress(ValueError, OSError):
                    signal.signal(number, default)
        self._previous = {}


_open: weakref.WeakSet[Preemption] = weakref.WeakSet()


def _forget_all() -> None:
    for one in list(_open):
        one._forget_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
