"""The learning rate of large batches: scaling with the global batch, warm-up, decay.

And which parameters decay and are scaled by a trust ratio, and which are left alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.lr_scheduler import LRScheduler

from hpctrain.errors import ConfigError

__all__ = ["Recipe", "RecipeSchedule", "is_excluded", "split_parameters"]


_NORMALISATIONS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def split_parameters(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Make two groups: what decays, and biases and normalisation, which do not. Pure.

    For any optimizer; LARS and LAMB also leave the second group's trust ratios out. Shared
    parameters are listed once, and are excluded only if they are everywhere they are used.

    Args:
        model: Its parameters, frozen ones too.
        weight_decay: Of the first group.

    Raises:
        ConfigError: the model has no parameters.
    """
    excluded: dict[Tensor, bool] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            alone = is_excluded(module, name, parameter)
            excluded[parameter] = excluded.get(parameter, True) and alone
    if not excluded:
        raise ConfigError(f"{type(model).__name__} has no parameters to split")
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p, out in excluded.items() if not out],
            "weight_decay": weight_decay,
            "trust_ratio": True,
        },
        {
            "params": [p for p, out in excluded.items() if out],
            "weight_decay": 0.0,
            "trust_ratio": False,
        },
    ]
    return [group for group in groups if group["params"]]


def is_excluded(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether a module's own parameter is a bias, or scales or shifts a normalisation. Pure.

    Vectors and scalars count as such whatever their name: they are biases, gains and gates of
    modules that cannot be known here.
    """
    return isinstance(module, _NORMALISATIONS) or name.endswith("bias") or parameter.dim() < 2


_SCALINGS: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "none": lambda ratio: 1.0,
}
_DECAYS = ("cosine", "polynomial", "step", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the learning rate follows from the global batch and the step. Pure.

    `base_rate` is right for `base_batch`; `scaling` carries it over to `global_batch`. From there
    it rises during the warm-up and falls until `num_steps`, every step.
    """

    base_rate: float
    """The rate that works with `base_batch`."""
    base_batch: int
    """Samples in the batch that `base_rate` was found with."""
    global_batch: int
    """Samples in the batch of all ranks and all accumulated parts together."""
    num_steps: int
    """Steps of the whole training; later ones keep the last rate."""
    scaling: Literal["linear", "sqrt", "none"] = "linear"
    """`linear` for SGD and LARS, `sqrt` for Adam and LAMB, as their authors recommend."""
    warmup_steps: int = 0
    """The rate rises linearly and peaks at the last of these steps."""
    warmup_from: float = 0.0
    """Where the warm-up starts, as a fraction of the peak; the first step is already above it."""
    decay: Literal["cosine", "polynomial", "step", "none"] = "cosine"
    """How it falls after the warm-up."""
    end: float = 0.0
    """Final rate with `cosine` and `polynomial`, as a fraction of the peak."""
    power: float | None = None
    """Of `polynomial`; None: 2."""
    milestones: tuple[int, ...] = ()
    """With `step`: the steps at which it is multiplied by `factor` again."""
    factor: float | None = None
    """Of `step`; None: 0.1."""

    def __post_init__(self) -> None:
        for name in ("base_rate", "base_batch", "global_batch", "num_steps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if self.scaling not in _SCALINGS:
            raise ConfigError(f"scaling={self.scaling!r}; choose {', '.join(_SCALINGS)}")
        if self.decay not in _DECAYS:
            raise ConfigError(f"decay={self.decay!r}; choose {', '.join(_DECAYS)}")
        if not 0 <= self.warmup_steps <= self.num_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} must lie between 0 and "
                f"num_steps={self.num_steps}"
            )
        for name in ("warmup_from", "end"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is a fraction of the peak, 0 to 1")
        self._check_combination()

    def _check_combination(self) -> None:
        """Refuse options that the chosen decay would ignore, or that it misses."""
        owners = {
            "end": (self.end != 0, ("cosine", "polynomial")),
            "power": (self.power is not None, ("polynomial",)),
            "milestones": (bool(self.milestones), ("step",)),
            "factor": (self.factor is not None, ("step",)),
        }
        for name, (given, decays) in owners.items():
            if given and self.decay not in decays:
                raise ConfigError(
                    f"{name}={getattr(self, name)} belongs to decay={' or '.join(decays)}, and "
                    f"decay={self.decay!r} would ignore it; leave it out"
                )
        if self.warmup_from != 0 and not self.warmup_steps:
            raise ConfigError(f"warmup_from={self.warmup_from} needs warmup_steps above 0")
        if self.decay == "step" and not self.milestones:
            raise ConfigError("decay='step' needs milestones, the steps at which the rate falls")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError(f"milestones={self.milestones} must rise")
        for name in ("power", "factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be above 0")

    @property
    def peak(self) -> float:
        """The rate after the warm-up."""
        return self.base_rate * _SCALINGS[self.scaling](self.global_batch / self.base_batch)

    def rate(self, step: int) -> float:
        """The learning rate of a step, the first of which is 0."""
        if step < 0:
            raise ConfigError(f"step={step} must be 0 or more")
        if step < self.warmup_steps:
            risen = (step + 1) / self.warmup_steps
            return self.peak * (self.warmup_from + (1 - self.warmup_from) * risen)
        return self.peak * self._decayed(step)

    def _decayed(self, step: int) -> float:
        """What the decay leaves of the peak."""
        if self.decay == "none":
            return 1.0
        if self.decay == "step":
            factor = 0.1 if self.factor is None else self.factor
            return float(factor ** bisect_right(self.milestones, step))
        left = self.num_steps - self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / left) if left else 1.0
        if self.decay == "cosine":
            height = 0.5 * (1 + math.cos(math.pi * done))
        else:
            height = (1 - done) ** (2.0 if self.power is None else self.power)
        return float(self.end + (1 - self.end) * height)

    def schedule(self, optimizer: torch.optim.Optimizer, *, step: int = 0) -> RecipeSchedule:
        """Set the rate of an optimizer now, and at every `step()` of what is returned.

        Args:
            optimizer: Its own `lr` is replaced. A group whose `lr` is k times the optimizer's stays
                k times the recipe's.
            step: The next step, for a training that resumes.
        """
        return RecipeSchedule(optimizer, self, step=step)


class RecipeSchedule(LRScheduler):
    """A torch schedule that follows a recipe; call `step()` after each step of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, *, step: int = 0) -> None:
        own = float(optimizer.defaults.get("lr", 0.0))
        if not own > 0:
            raise ConfigError(
                f"the optimizer's lr={own} must be above 0: groups keep their ratio to it"
            )
        self.recipe = recipe
        self._own_rate = own
        super().__init__(optimizer)
        self._move_to(step)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate of each group at the step that comes next."""
        rate = self.recipe.rate(self.last_epoch)
        return [
            # In the group, so that it goes with the optimizer's state to a run with another peak.
            rate * group.setdefault("rate_ratio", self._ratio_of(group))
            for group in self.optimizer.param_groups
        ]

    def _ratio_of(self, group: dict[str, Any]) -> float:
        return float(group.setdefault("initial_lr", group["lr"])) / self._own_rate

    def state_dict(self) -> dict[str, Any]:
        """The step and the recipe, as plain values."""
        return {"step": self.last_epoch, "recipe": asdict(self.recipe)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step, and set the optimizer's rates.

        Raises:
            ConfigError: it was saved with another recipe; the message names what differs.
        """
        step, saved = state_dict["step"], dict(state_dict["recipe"])
        saved["milestones"] = tuple(saved["milestones"])  # JSON has lists
        # Where the rate does not fall towards the end, a training of another length is the same.
        free = {"num_steps"} if self.recipe.decay in ("step", "none") else set()
        differing = [
            f"{field.name} {saved.get(field.name)!r} -> {getattr(self.recipe, field.name)!r}"
            for field in fields(Recipe)
            if field.name not in free and saved.get(field.name) != getattr(self.recipe, field.name)
        ]
        if differing:
            raise ConfigError(
                f"the schedule was saved with another recipe: {', f'.join(differing)}; use that "
                f"one, or change it explicitly with recipe.schedule(optimizer, step={step})"
            )
        self._move_to(step)

    def _move_to(self, step: int) -> None:
        self.last_epoch = step
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates
