"""Fault injection: what `hpctrain chaos` breaks inside a training process.

One instruction a job, in the variable HPCTRAIN_CHAOS, as JSON. The saver acts on it at a step
boundary; without one it does nothing.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from hpctrain.atomic import write_atomically
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.world import World

__all__ = ["CHAOS_VARIABLE", "FaultKind", "Injection", "injection_of", "parse_injection"]

CHAOS_VARIABLE = "HPCTRAIN_CHAOS"
"""Where the ranks read which faults to inject."""
FaultKind = Literal["signal", "pause", "hold", "bit", "nan", "disk"]
_HOLD_S = 60.0
_POLL_S = 0.02
_MANTISSA_BIT = 20
"""Of a float32: the weight changes by an eighth to a quarter of itself, and stays finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """What happens on one rank at one step boundary."""

    what: FaultKind
    """`signal`: send one to itself; `pause`: SIGSTOP, until SIGCONT; `hold`: wait until the
    mark is removed; `bit`: flip one of a weight; `nan`: into a weight; `disk`: no file may grow
    beyond `num_bytes`."""
    rank: int
    step: int
    signal: str | None = None
    mark: str | None = None
    """A file that marks the moment of the fault: it holds the process id."""
    num_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse an instruction that is not whole."""
        needs = {"signal": "signal", "pause": "mark", "hold": "mark", "disk": "num_bytes"}
        if self.what not in get_args(FaultKind):
            raise ConfigError(
                f"what={self.what!r} is unknown; choose one of {', '.join(get_args(FaultKind))}"
            )
        needed = needs.get(self.what)
        if needed is not None and getattr(self, needed) is None:
            raise ConfigError(f"what={self.what!r} needs {needed}")
        if self.signal is not None and self.signal not in signal.Signals.__members__:
            raise ConfigError(f"there is no signal {self.signal!r} here")
        if self.rank < 0 or self.step < 1:
            raise ConfigError(f"rank={self.rank}, step={self.step}: from rank 0 and step 1 on")

    def text(self) -> str:
        """As it stands in the environment."""
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value is not None}
        )

    def act(self, step: int, replicas: Iterable[Any]) -> None:
        """Let it happen, if this is the step."""
        if step != self.step:
            return
        if self.mark is not None:
            self._say(Path(self.mark))
        if self.what == "signal":
            os.kill(os.getpid(), signal.Signals[self.signal or ""])
        elif self.what == "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.what == "hold":
            self._hold()
        elif self.what == "disk":
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes or 0, hard))
        else:
            _spoil(next(iter(replicas)).model, nan=self.what == "nan")

    @staticmethod
    def _say(mark: Path) -> None:
        write_atomically(mark, str(os.getpid()))

    def _hold(self) -> None:
        mark, end = Path(self.mark or ""), time.monotonic() + _HOLD_S
        while mark.exists() and time.monotonic() < end:
            time.sleep(_POLL_S)


def _spoil(model: torch.nn.Module, *, nan: bool) -> None:
    """Change one element of the largest parameter: its first one that is not 0."""
    with torch.no_grad():
        weight = max(model.parameters(), key=lambda parameter: parameter.numel())
        flat = weight.detach().reshape(-1)
        place = int(torch.argmax((flat != 0).to(torch.int8)))
        if nan:
            value = torch.tensor(float("nan"))
        else:
            bits = flat[place].float().cpu().reshape(1).view(torch.int32) ^ (1 << _MANTISSA_BIT)
            value = bits.view(torch.float32)[0]
        index = torch.unravel_index(torch.tensor(place), weight.shape)
        weight[index] = value.to(weight.dtype)


def parse_injection(text: str) -> Injection:
    """Read what `Injection.text` wrote. Pure.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return Injection(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{CHAOS_VARIABLE} is not in the format of `hpctrain chaos` ({error}); unset it"
        ) from None


def injection_of(world: World) -> Injection | None:
    """The fault to inject on this rank; None: none."""
    text = world.launch.settings.get(CHAOS_VARIABLE)
    if text is None:
        return None
    found = parse_injection(text)
    return found if found.rank == world.rank else None
