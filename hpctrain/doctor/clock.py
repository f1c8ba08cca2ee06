"""Judges the clock: does anything keep it in time with the other nodes'?"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.doctor.verdict import Check
from hpctrain.programs import Answer

__all__ = ["ClockState", "judge_clock", "parse_chronyc", "parse_timedatectl", "read_clock"]

_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_TIMEX_BYTES = 256  # struct timex needs 208
_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockState:
    """Whether the clock is synchronised (None: nobody can tell), and who says so."""

    synchronised: bool | None
    source: str


def judge_clock(state: ClockState) -> Check:
    """Is the clock kept in time?"""
    name = "clock"
    details = {"synchronised": state.synchronised, "source": state.source}
    if state.synchronised is None:
        text = "nothing here tells whether it is kept in time"
        return Check(name=name, status="ok", text=text, details=details)
    if state.synchronised:
        text = f"kept in time, says {state.source}"
        return Check(name=name, status="ok", text=text, details=details)
    return Check(
        name=name,
        status="warning",
        text=f"not synchronised, says {state.source}: logs of several nodes may not line up",
        cure="start the time service (`systemctl enable --now chronyd`, or systemd-timesyncd); a "
        "virtual machine or container relies on its host's",
        details=details,
    )


def parse_timedatectl(text: str) -> bool | None:
    """Read `timedatectl show --property=NTPSynchronized`. Pure."""
    values = {"NTPSynchronized=yes": True, "NTPSynchronized=no": False}
    return values.get(text.strip())


def parse_chronyc(text: str) -> bool | None:
    """Read the leap status, the last field of `chronyc -c tracking`. Pure."""
    fields = text.strip().split(",")
    return fields[-1] != "Not synchronised" if len(fields) > 10 else None


def read_clock(which: Callable[[str], Path | None], ask: Callable[..., Answer]) -> ClockState:
    """Ask the time services, then the kernel."""
    questions = (
        ("timedatectl", ("show", "--property=NTPSynchronized"), parse_timedatectl),
        ("chronyc", ("-c", "tracking"), parse_chronyc),
    )
    for tool, words, parse in questions:
        path = which(tool)
        answer = ask(str(path), *words, limit_s=_LIMIT_S) if path else None
        if answer is not None and answer.code == 0 and (said := parse(answer.out)) is not None:
            return ClockState(synchronised=said, source=tool)
    return ClockState(synchronised=_ask_kernel(), source="the kernel")


def _ask_kernel() -> bool | None:
    """Read the kernel's clock state; adjtimex(2) with modes = 0 changes nothing."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (AttributeError, OSError):
        return None
    if state < 0:
        return None
    # modes, offset, freq, maxerror, esterror, status: C's own alignment
    status = struct.unpack_from("@IllllI", timex.raw)[-1]
    return not status & _UNSYNCHRONISED
