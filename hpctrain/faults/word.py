"""What a rank says at a step boundary, and what all ranks then know. Pure.

Everything becomes a few float64 whose maximum over the ranks says it all, so that one small
allreduce carries it. Who said something travels in the same number: the lowest rank wins.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import ConfigError

__all__ = ["NUM_SLOTS", "Agreed", "Said", "Word", "decode", "encode", "merge"]

_VALUES = 256  # room for a value beside the rank
_RANKS = 1 << 20
_TICKS = 1e6  # microseconds
_MOST_TICKS = (1 << 32) - 1

_FLAGS = ("signal", "save", "stop", "failure", "nonfinite")
_SILENCE = (0.0,) * len(_FLAGS)
NUM_SLOTS = len(_FLAGS) + 4
"""How many numbers a word takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """What one rank says about itself at a step boundary."""

    signal: str | None = None
    """The name of a signal that came, as `Preemption.requested` has it."""
    save: bool = False
    """A checkpoint is due."""
    stop: bool = False
    """The training must stop."""
    failure: bool = False
    """Something failed that all must know of, such as a write in the background."""
    nonfinite: bool = False
    """A loss or gradient is inf or NaN."""
    step_s: float | None = None
    """How long the last step took here, from boundary to boundary."""
    worked_s: float | None = None
    """The same without waiting for other ranks; the boundary measures it where none is given."""
    left_s: float | None = None
    """How much time the allocation has left, where this rank knows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """That somebody said something: the lowest of those ranks."""

    rank: int
    value: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What all ranks know after a step boundary; the same everywhere."""

    signal: str | None = None
    signal_by: Said | None = None
    save: Said | None = None
    stop: Said | None = None
    failure: Said | None = None
    nonfinite: Said | None = None
    step_s: float | None = None
    """The longest step that a rank spoke of."""
    slowest: Said | None = None
    """The rank that worked longest at the last step."""
    longest_s: float | None = None
    """How long it worked."""
    shortest_s: float | None = None
    """How long the rank worked that did so the shortest time."""
    left_s: float | None = None
    """The least time left that a rank knew of."""

    @property
    def quiet(self) -> bool:
        """Whether nobody said anything that must be acted on."""
        return not (self.signal_by or self.save or self.stop or self.failure or self.nonfinite)


def encode(word: Word, rank: int, size: int, worked_s: float | None = None) -> list[float]:
    """Write a rank's word as numbers of which the ranks take the maximum.

    Args:
        word: What it says.
        rank: Who says it.
        size: Of how many.
        worked_s: What counts where the word has none.

    Raises:
        ConfigError: the signal is no signal's name.
    """
    flags = _SILENCE
    if word.signal is not None or word.save or word.stop or word.failure or word.nonfinite:
        flags = _encode_flags(word, (size - rank) * _VALUES)
    if word.worked_s is not None:
        worked_s = word.worked_s
    slow = short = -math.inf
    if worked_s is not None:
        ticks = min(max(round(worked_s * _TICKS), 0), _MOST_TICKS)
        slow, short = float(ticks * _RANKS + (_RANKS - 1 - rank)), -worked_s
    left = -math.inf if word.left_s is None else -word.left_s
    step = -math.inf if word.step_s is None else word.step_s
    return [*flags, slow, short, left, step]


def _encode_flags(word: Word, mine: int) -> tuple[float, ...]:
    code = 0
    if word.signal is not None:
        try:
            code = int(signal.Signals[word.signal])
        except KeyError:
            raise ConfigError(f"signal={word.signal!r} is no signal; give SIGUSR2 or so") from None
    said = (word.signal is not None, word.save, word.stop, word.failure, word.nonfinite)
    return (
        float(mine + code) if said[0] else 0.0,
        *(float(mine) if one else 0.0 for one in said[1:]),
    )


def decode(slots: Sequence[float], size: int) -> Agreed:
    """Read the maximum over all ranks' words."""
    slow, short, left, step = slots[len(_FLAGS) :]
    slowest = longest_s = None
    if slow >= 0:
        ticks, behind = divmod(int(slow), _RANKS)
        slowest, longest_s = Said(rank=_RANKS - 1 - behind, value=ticks), ticks / _TICKS
    said: dict[str, Said] = {}
    if any(slots[: len(_FLAGS)]):
        for name, slot in zip(_FLAGS, slots, strict=False):
            if slot > 0:
                high, value = divmod(int(slot), _VALUES)
                said[name] = Said(rank=size - high, value=value)
    by = said.get("signal")
    return Agreed(
        signal=None if by is None else signal.Signals(by.value).name,
        signal_by=by,
        save=said.get("save"),
        stop=said.get("stop"),
        failure=said.get("failure"),
        nonfinite=said.get("nonfinite"),
        step_s=step if step >= 0 else None,
        slowest=slowest,
        longest_s=longest_s,
        shortest_s=None if math.isinf(short) else -short,
        left_s=None if math.isinf(left) and left < 0 else -left,
    )


def merge(words: Sequence[Sequence[float]]) -> list[float]:
    """What the ranks' allreduce does, slot by slot."""
    return [max(column) for column in zip(*words, strict=True)]
