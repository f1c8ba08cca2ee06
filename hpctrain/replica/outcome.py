"""What a call of `step()` or `learn()` did, read from a GPU only when somebody asks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hpctrain.precision import Treated

__all__ = ["Step"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """What a call of `step()` or `learn()` did. True when the weights moved.

    With `precision="fp16"` on a GPU and a fused optimizer, reading `moved`, `skipped`, `reason` or
    the truth of this object waits for the GPU, and so do `scale` and `norm` on any GPU.
    """

    due: bool
    """Whether there were gradients of a whole window to step with."""
    note: str
    """`stepped`, `accumulating`, `no gradients` or `no samples`, before overflow is looked at."""
    learning_rates: tuple[float | Tensor, ...] = ()
    """Of each parameter group, for this step."""
    loss: Tensor | None = field(default=None, repr=False)
    """Of `learn()`: this rank's loss, without its graph; None after `step()`."""
    done: Treated = field(default=Treated(), repr=False)
    """The same as it is on the device; the properties below read it."""

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

        None where nobody asked: without `clip_norm` and loss scaling it is computed only for the
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
