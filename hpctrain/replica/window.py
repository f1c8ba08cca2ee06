"""The window between two steps: how many backward calls it has, and what their sum is divided by.

Pure: what may follow what, the arithmetic of the average, and what the step then did.

- Within `accumulate=k` the k calls are parts of one batch: their average counts.
- Otherwise calls add up, as they do in torch: each is averaged over the ranks, then summed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.precision import UpdateResult

__all__ = ["Step", "Turn", "Window"]

_MIXED = (
    "replica.backward(loss) and loss.backward() were both called before one exchange, and they "
    "weight samples differently; use one of them within a step"
)

Number = TypeVar("Number", float, Tensor)


@dataclass(eq=False, slots=True)
class Window:
    """What has been collected on this rank since the last step."""

    accumulate: int
    calls: int = 0
    weight: float = 0.0
    weighted: bool | None = None
    """Whether calls had sample counts; all or none of a window's calls do."""
    exchanged: bool = False
    closed: int = 0
    """How often it has been exchanged since the last step."""
    broken: str = ""
    """What interrupted a backward pass, while its incomplete gradients are still there."""
    plain: bool = False
    """Whether its calls were `loss.backward()`: their gradients are not weighted yet."""
    share: float = 1.0
    """This rank's weight in a plain window: its samples over the mean of all ranks."""
    stepped: bool = False
    """Whether `optimizer.step()` was called since the exchange."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ConfigError(f"accumulate={self.accumulate} must be at least 1")

    def admit(self, num_samples: int | None) -> float:
        """Check that a backward call may come now, and tell its weight.

        Raises:
            ConfigError: it comes after a failed one, counts samples where others did not, or comes
                between the last call of an accumulation and its step.
        """
        if self.broken:
            raise ConfigError(
                f"a backward pass was interrupted by {self.broken} and left incomplete "
                "gradients; call replica.zero_grad() before the next backward"
            )
        if num_samples is not None:
            num_samples = _whole(num_samples)
        if num_samples is not None and num_samples < 0:
            raise ConfigError(f"num_samples={num_samples} must not be negative")
        if self.exchanged and self.accumulate > 1:
            raise ConfigError(
                f"accumulate={self.accumulate} backward calls were made and the next one followed "
                "without a step; call replica.step() after every backward (it returns False while "
                "accumulating)"
            )
        weighted = num_samples is not None
        fresh = self.calls == 0 or self.exchanged
        if not fresh and self.plain:
            raise ConfigError(_MIXED)
        if not fresh and self.weighted is not None and self.weighted != weighted:
            raise ConfigError(
                "some backward calls of this step were given num_samples and some were not; give "
                "it to all of them or to none"
            )
        return float(num_samples) if num_samples is not None else 1.0

    def add(self, weight: float, *, weighted: bool) -> None:
        """Count a backward call."""
        if self.exchanged:  # a further call before the step begins a sum of its own
            self._reopen()
        self.calls += 1
        self.weight += weight
        self.weighted = weighted
        self.plain = False

    def add_plain(self, share: float) -> None:
        """Count a `loss.backward()`.

        Raises:
            ConfigError: it cannot be added to what is there.
        """
        if self.exchanged:
            self._reopen()
        if self.calls and not self.plain:
            raise ConfigError(_MIXED)
        if self.calls and share != self.share:
            raise ConfigError(
                f"this rank's shares of the batches of one step differ ({self.share:g} and "
                f"{share:g} of the mean over all ranks), and calls of loss.backward() under "
                "no_sync() cannot be weighted one by one; call replica.backward(loss, "
                "num_samples=...), or exchange after every call"
            )
        self.calls += 1
        self.weight += 1.0
        self.weighted = False
        self.plain, self.share = True, share

    def _reopen(self) -> None:
        self.calls, self.weight, self.exchanged, self.stepped = 0, 0.0, False, False

    @property
    def counted(self) -> int:
        """How many of the calls had sample counts."""
        return self.calls if self.weighted else 0

    def mark_exchanged(self) -> None:
        """Gradients are the averages over all ranks now."""
        self.exchanged = True
        self.closed += 1

    def clear(self) -> None:
        """Begin a new window."""
        self.calls, self.weight, self.weighted = 0, 0.0, None
        self.exchanged, self.closed, self.broken = False, 0, ""
        self.plain, self.share, self.stepped = False, 1.0, False

    def divisor(self, weight: Number, calls: Number, ranks: Number) -> Number:
        """What the sum over all ranks is divided by, from the totals over all ranks.

        Numbers, or tensors of one element where reading them would wait for a GPU.
        """
        return weight if self.accumulate > 1 else weight * ranks / calls


@dataclass(eq=False, slots=True)
class Turn:
    """One batch of an epoch, until the next one; tracks where the epoch's steps end.

    A loop may split a batch and step after each piece. So the last batch is complete when it has
    had as many `step()` calls as the batch before it. Only calls are counted, no samples: the
    answer must be the same on all ranks.
    """

    is_last: bool = False
    num_steps: int = 0
    """Calls of `step()` on this batch."""
    usual_steps: int | None = None
    """Calls of `step()` on an earlier batch; None: there was none yet."""
    closed: bool = False
    """Whether the epoch's last window, only partly filled, was stepped on this batch."""

    def begin(self, *, last: bool) -> None:
        """A batch was returned."""
        self.usual_steps = self.num_steps or self.usual_steps
        self.is_last, self.num_steps, self.closed = last, 0, False

    def admit(self) -> None:
        """Check that a backward call may come on this batch.

        Raises:
            ConfigError: the epoch's last step has been made.
        """
        if self.closed:
            raise ConfigError(
                f"step() call {self.num_steps} on the last batch of the epoch completed the open "
                f"accumulation window, because earlier batches had {self.usual_steps} step() "
                "calls each, and then another backward followed on the same batch; make the same "
                "number of step() calls on every batch"
            )

    def count_step(self) -> bool:
        """Count a call of `step()`; whether it is the last one of the epoch."""
        self.num_steps += 1
        return self.is_last and self.num_steps == self.usual_steps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """What a call of `step()` or `learn()` did. True when the weights moved.

    With `precision="fp16"` on a GPU and a fused optimizer, reading `moved`, `skipped`, `reason` or
    the truth of this object waits for the GPU, and so do `scale` and `norm` on any GPU.
    """

    due: bool
    """Whether a full window of gradients was available."""
    note: str
    """`stepped`, `accumulating`, `no gradients` or `no samples`, before overflow is checked."""
    learning_rates: tuple[float | Tensor, ...] = ()
    """Of each parameter group, for this step."""
    loss: Tensor | None = field(default=None, repr=False)
    """Of `learn()`: this rank's loss, without its graph; None after `step()`."""
    done: UpdateResult = field(default=UpdateResult(), repr=False)
    """The same, as a device tensor; the properties below read it."""

    @property
    def skipped(self) -> bool:
        """Whether an inf or NaN on some rank made all ranks leave this step out."""
        return bool(self.done.overflow)

    @property
    def moved(self) -> bool:
        """Whether the weights moved."""
        return self.due and not self.skipped

    @property
    def reason(self) -> str:
        """`stepped`, `skipped`, `accumulating`, `no gradients` or `no samples`."""
        return "skipped" if self.due and self.skipped else self.note

    @property
    def scale(self) -> float | None:
        """What the losses of this step were multiplied by; None: they were not scaled."""
        return None if self.done.scale is None else self.done.scale.item()

    @property
    def norm(self) -> float | None:
        """The gradients' norm, unscaled and before clipping, without groups that say `clip=False`.

        None if not computed: without `clip_norm` and loss scaling it is computed only for the
        lines of a trainer's log. None, too, where gradients of a step were exchanged several times.
        """
        if self.done.norm_parts is None:
            return None
        squared, factor = self.done.norm_parts
        return (squared.sqrt() * factor).item()

    @property
    def learning_rate(self) -> float | None:
        """Of the first parameter group; None: no step was due."""
        return float(self.learning_rates[0]) if self.learning_rates else None

    def __bool__(self) -> bool:
        return self.moved


def _whole(num_samples: object) -> int:
    """A count as a whole number; numpy's and torch's integers are, too."""
    try:
        return operator.index(num_samples)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(
            f"num_samples={num_samples!r} must be a whole number; give the number of samples that "
            "the loss is the mean over, such as len(y)"
        ) from None
