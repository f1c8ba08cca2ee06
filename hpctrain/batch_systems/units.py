"""Walltime and memory: read once, in any usual form, and written in each batch system's own.

The same text means different things to different batch systems: `30` is 30 minutes to Slurm and LSF
and 30 seconds to PBS; `1:30` is 90 seconds to Slurm and PBS and 90 minutes to LSF. Here a number
needs a unit, and a clock has three fields.
"""

from __future__ import annotations

import re
from fractions import Fraction

from hpctrain.errors import ConfigError

__all__ = [
    "format_clock",
    "format_memory",
    "parse_duration",
    "parse_memory",
    "read_clock",
]

_LONGEST_S = 366 * 86400
_LARGEST_MIB = 1 << 40
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):(\d{1,3}):(\d{1,3})", re.ASCII)
_TOLD = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+(?:\.\d+)?)", re.ASCII)
_PIECE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([a-z]+)\s*", re.ASCII)
_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_MEMORY = re.compile(r"(\d{1,12})(\.\d+)?\s*([kmgt])(i?b)?", re.ASCII | re.IGNORECASE)
_KIB = {"k": 1, "m": 1 << 10, "g": 1 << 20, "t": 1 << 30}


def parse_duration(text: str, *, what: str = "walltime") -> int:
    """Read `2h30m`, `90 min`, `1.5 h`, `02:30:00` or `1-02:30:00` as seconds.

    Raises:
        ConfigError: it is none of these, not positive, not whole seconds, or a clock like 00:61:00.
    """
    given = text.strip()
    if clock := _CLOCK.fullmatch(given):
        days, hours, minutes, seconds = (int(field or 0) for field in clock.groups())
        if minutes > 59 or seconds > 59 or (clock.group(1) and hours > 23):
            raise ConfigError(
                f"{what} {text!r} has a field past its end; write it as HH:MM:SS with minutes and "
                "seconds below 60"
            )
        total = Fraction(86400 * days + 3600 * hours + 60 * minutes + seconds)
    else:
        total = _sum_pieces(given, text, what)
    if not 0 < total <= _LONGEST_S:
        raise ConfigError(f"{what} {text!r} is not possible; give more than 0 s and at most a year")
    if total.denominator != 1:
        raise ConfigError(f"{what} {text!r} is not a whole number of seconds; round it")
    return int(total)


def _sum_pieces(given: str, text: str, what: str) -> Fraction:
    total, position, seen = Fraction(0), 0, set()
    lowered = given.lower()
    while position < len(lowered):
        piece = _PIECE.match(lowered, position)
        unit = _SECONDS.get(piece.group(2)) if piece else None
        if piece is None or unit is None or unit in seen:
            position = -1
            break
        seen.add(unit)
        total += Fraction(piece.group(1)) * unit
        position = piece.end()
    if position <= 0:
        raise ConfigError(
            f"{what} {text!r} is not understood; write it with units, as 2h30m, 90 min or "
            "02:30:00 (a bare number means minutes to one batch system and seconds to another)"
        )
    return total


def format_clock(seconds: int) -> str:
    """`HH:MM:SS`, hours without limit: unambiguous for Slurm and PBS."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def read_clock(text: str) -> float | None:
    """Seconds of `[days-][[hours:]minutes:]seconds[.fraction]`; None for anything else."""
    match = _TOLD.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (float(field or 0) for field in match.groups())
    return 86400 * days + 3600 * hours + 60 * minutes + seconds


def parse_memory(text: str) -> int:
    """Read `64G`, `64 GiB`, `512M` as MiB; G and GiB are the same, as batch systems have it.

    Raises:
        ConfigError: no unit, a fraction, zero, or less than a MiB.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"memory {text!r} is not understood; write a whole number and a unit, as 64G or 512 MiB"
        )
    number, fraction, unit, _ = match.groups()
    if fraction:
        raise ConfigError(
            f"memory {text!r} has a fraction, which batch systems refuse; write it in the next "
            "smaller unit, as 1536M for 1.5G"
        )
    kib = int(number) * _KIB[unit.lower()]
    if kib % 1024 or not 0 < kib // 1024 <= _LARGEST_MIB:
        raise ConfigError(f"memory {text!r} is not possible; give a whole number of MiB above 0")
    return kib // 1024


def format_memory(mib: int, *, unit: str = "M", gib: str = "G") -> str:
    """The shortest whole number with a unit; the suffixes are the dialect's."""
    return f"{mib // 1024}{gib}" if mib % 1024 == 0 else f"{mib}{unit}"
