"""What happens to gradients between exchange and update: unscale, decide, clip, step or skip.

All ranks see the same bits after an exchange, so each decides alone and all decide the same: no
message is sent for it. Over the gradients goes one pass that reads (a norm, which also finds inf
and NaN) and one that multiplies (average, unscale and clip in one factor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain.errors import ConfigError, NonFiniteError
from hpctrain.precision.loss_scaling import LossScaling, Scaler
from hpctrain.world import World, agree

__all__ = [
    "Gradients",
    "ScaleAndClip",
    "UpdateResult",
    "clip_factor",
    "excluded_from_clipping",
    "multiply",
    "sum_of_squares",
]


_ROW = 1024
_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_WIDE = (torch.float64, torch.complex128)


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements, which is inf or NaN if one of them is.

    In float32, or in float64 if a tensor is; on the CPU in rows, so that rounding neither grows
    with the size nor depends on the number of threads: ranks with equal bits get equal sums.
    """
    dtype = torch.float64 if any(t.dtype in _WIDE for t in tensors) else torch.float32
    norms = [norm.to(device, dtype) for tensor in tensors for norm in _norms(tensor)]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.cat(norms).square().sum()


def _norms(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().reshape(-1)
    dtype = torch.float32 if flat.dtype in (torch.float16, torch.bfloat16) else None
    if flat.device.type != "cpu" or flat.numel() <= _ROW:
        return [torch.linalg.vector_norm(flat, dtype=dtype).reshape(1)]
    whole = flat.numel() // _ROW * _ROW
    parts = [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)]
    if whole < flat.numel():
        parts.append(torch.linalg.vector_norm(flat[whole:], dtype=dtype).reshape(1))
    return parts


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of that norm are multiplied by so that it does not exceed the limit."""
    return (limit / (norm + _TINY)).clamp(max=1.0)


def multiply(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply in place by a number that may be on a GPU; nothing is read back from there."""
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.device))


def excluded_from_clipping(groups: Iterable[dict[str, Any]]) -> frozenset[int]:
    """Indices, in the order of the groups, of parameters in groups that say `clip=False`."""
    found: list[int] = []
    index = 0
    for group in groups:
        count = len(group["params"])
        if group.get("clip", True) is False:
            found.extend(range(index, index + count))
        index += count
    return frozenset(found)


class Gradients(Protocol):
    """Gradients that have been summed over all ranks, in any storage."""

    def average(self, divisor: float | Tensor) -> None:
        """Turn the sums into averages."""

    def rest_of(self, divisor: float | Tensor) -> float | Tensor:
        """What is still to be divided by, where some of it was divided by on the way."""

    def norm_squared(self, excluded: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Sums of squares without the excluded parameters, and of these; 0-d, on one device.

        Equal bits on all ranks; collective where each holds a share alone.
        """

    def scale(self, factor: Tensor, excluded: frozenset[int], excluded_factor: Tensor) -> None:
        """Multiply, the excluded parameters by a separate factor."""

    def clamp(self, limit: float, excluded: frozenset[int]) -> None:
        """Limit each element's size, but for the excluded parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """The outcome of a step; tensors if reading would synchronize a GPU."""

    overflow: bool | Tensor = False
    scale: Tensor | None = None
    norm_parts: tuple[Tensor, Tensor] | None = None
    """Sum of squares of the gradients, and what its root is to be multiplied by."""
    collapsed: bool = False
    """Whether the last allowed step was skipped too; the same on all ranks."""
    finding: str | None = None
    """What was not finite on this rank, if checked."""


class ScaleAndClip:
    """Loss scaling and clipping of a replica.

    Args:
        world: The ranks, which raise together when the scale collapses.
        device: Where the parameters are.
        scaling: For `fp16`; None: losses are not scaled and no step is skipped.
        clip_norm: Limit of the norm of all gradients.
        clip_value: Limit of each element.
        spread: Collective: overwrites a tensor with rank 0's, where ranks compute on different
            hardware, whose norms may differ in the last bit; None: nothing has to be sent.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        scaling: LossScaling | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        spread: Callable[[Tensor], object] | None = None,
    ) -> None:
        self.world = world
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.scaler = None if scaling is None else Scaler(scaling, device)
        self.measures_norm = False
        """Whether to compute the norm even if nothing is clipped or scaled; for logs."""
        self._spread = spread
        self._one = torch.ones((), device=device)
        self._overflow: Tensor | None = None
        self._norm_parts: tuple[Tensor, Tensor] | None = None
        self._finding: str | None = None
        self._num_exchanges = 0
        self._has_stepped = False

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.clip_norm is not None or self.clip_value is not None

    @property
    def owns_step(self) -> bool:
        """Whether an update without this object would be another one."""
        return self.clips or self.scaler is not None

    def admit(self, *, exchanged: bool) -> None:
        """Before a backward pass: refuse to add to gradients that were clipped.

        Raises:
            ConfigError: with what to do.
        """
        if exchanged and self.clips:
            raise ConfigError(
                "gradients are clipped when they are exchanged, and another backward call before "
                "replica.step() would add to clipped ones; make the earlier calls of a step under "
                "replica.no_sync(), or use accumulate (replica.zero_grad() starts over)"
            )

    def seed(self, loss: Tensor, share: float) -> Tensor | None:
        """What a loss is differentiated with; None: with 1."""
        if self.scaler is not None:
            wide = torch.float64 if loss.dtype == torch.float64 else torch.float32
            scaled = self.scaler.scale.to(loss.device, wide) * share
            return scaled.to(loss.dtype).expand_as(loss)
        return None if share == 1.0 else torch.full_like(loss, share)

    # Examination, when one more skip is one too many

    @property
    def examines(self) -> bool:
        """Whether to check the gradients of this step before they are summed."""
        return self.scaler is not None and self.scaler.is_last_chance

    def examine(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Before an exchange: note this rank's first gradient that is not finite."""
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and self._finding is None:
                num_bad = gradient.numel() - int(torch.isfinite(gradient).sum().item())
                if num_bad:
                    self._finding = (
                        f"the gradient of {name} has {num_bad} of {gradient.numel()} elements that "
                        "are inf or NaN"
                    )

    # After the exchange

    def average(
        self, gradients: Gradients, divisor: float | Tensor, groups: Sequence[dict[str, Any]]
    ) -> None:
        """Turn sums into averages, unscaled and clipped."""
        excluded = excluded_from_clipping(groups) if self.clips else frozenset()
        if self.scaler is None and self.clip_norm is None:
            gradients.average(divisor)
            if self.measures_norm:
                self._note_norm(gradients.norm_squared(excluded)[0], self._one)
            self._clamp(gradients, groups)
            return
        squared = torch.stack(gradients.norm_squared(excluded)).to(self._one.device)
        if self._spread is not None:
            self._spread(squared)
        factor = self._one_over(gradients.rest_of(divisor), squared.dtype)
        if self.scaler is not None:
            factor = factor / self.scaler.scale
            if self._overflow is None:
                self._overflow = torch.zeros((), device=squared.device)
            # Looks, and multiplies by one.
            torch._amp_foreach_non_finite_check_and_unscale_([squared], self._overflow, self._one)
        clipping = factor
        if self.clip_norm is not None:
            clipping = factor * clip_factor(squared[0].sqrt() * factor, self.clip_norm)
        gradients.scale(clipping, excluded, factor)
        self._clamp(gradients, groups)
        self._note_norm(squared[0], factor)

    def _note_norm(self, squared: Tensor, factor: Tensor) -> None:
        self._num_exchanges += 1
        # The norm of a sum of several is not known.
        self._norm_parts = (squared, factor) if self._num_exchanges == 1 else None

    def _one_over(self, divisor: float | Tensor, dtype: torch.dtype) -> Tensor:
        """On the device, by as few kernels as can be: on a GPU each of them shows."""
        one = self._one.to(dtype)
        if not isinstance(divisor, Tensor) and divisor == 1.0:
            return one
        return 1.0 / (one * divisor)

    def _clamp(self, gradients: Gradients, groups: Sequence[dict[str, Any]]) -> None:
        if self.clip_value is not None:
            gradients.clamp(self.clip_value, excluded_from_clipping(groups))

    def follow(self) -> None:
        """Others step and this rank does not: move the loss scale as theirs does."""
        if self.scaler is not None and self._overflow is not None:
            self.scaler.update(self._overflow)

    def forget(self) -> None:
        """Gradients were dropped without a step."""
        self._overflow = self._norm_parts = self._finding = None
        self._num_exchanges = 0

    # The update

    def step(self, optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> UpdateResult:
        """Update, unless something overflowed on any rank.

        Args:
            optimizer: The user's.
            update: What moves the weights.
        """
        norm_parts, overflow, finding = self._norm_parts, self._overflow, self._finding
        examined = self.examines
        if self.scaler is None or overflow is None:
            update()
            self.forget()
            return UpdateResult(norm_parts=norm_parts)
        scale = self.scaler.scale.clone()
        skipped: bool | Tensor
        if self._can_skip_on_device(optimizer, overflow) and not examined:
            skipped = overflow
            _update_unless(optimizer, update, overflow)
        else:
            skipped = bool(overflow.item())
            if not skipped:
                update()
                self._has_stepped = True
        self.forget()
        self.scaler.update(overflow)
        if examined and skipped is False:
            self.scaler.pass_last_chance()
        collapsed = examined and skipped is True and self.scaler.has_collapsed()
        return UpdateResult(
            overflow=skipped,
            scale=scale,
            norm_parts=norm_parts,
            collapsed=collapsed,
            finding=finding,
        )

    def _can_skip_on_device(self, optimizer: torch.optim.Optimizer, overflow: Tensor) -> bool:
        """Whether the optimizer's own kernels check the overflow, without synchronization.

        Fused optimizers do. Not at their first update, which allocates what it would then not fill.
        """
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        parameter = optimizer.param_groups[0]["params"][0]
        is_shard = hasattr(parameter, "to_local")  # its kernels take shards alone, not this tensor
        return bool(fused) and overflow.is_cuda and self._has_stepped and not is_shard

    def check_collapse(self, done: UpdateResult, *, number: int) -> None:
        """Collective after the last chance: end the run on all ranks, with what was found on each.

        Args:
            done: The outcome of the step.
            number: Of the step.

        Raises:
            NonFiniteError: on all ranks; too many steps in a row were skipped.
        """
        scaler, finding = self.scaler, done.finding
        if scaler is None or not done.collapsed:
            return
        history = (
            f"{scaler.num_in_a_row} steps in a row were skipped, the last of them step {number}, "
            f"and the loss scale has fallen to {scaler.scale.item():g}"
        )
        cure = (
            "check this rank's batch, the learning rate, and operations that overflow in float16 "
            "(precision='bf16' has the range of float32)"
        )
        trouble = None if finding is None else f"{finding}; {history}; {cure}"
        agree(self.world.comm, trouble, error=NonFiniteError)
        raise NonFiniteError(
            f"every rank's gradients are finite, and their sum is not; {history}; lower the "
            "learning rate or the loss, or use precision='bf16'"
        )


def _update_unless(
    optimizer: torch.optim.Optimizer, update: Callable[[], object], overflow: Tensor
) -> None:
    """Let a fused optimizer's kernels skip, by the attributes that torch.amp sets for them."""
    holder: Any = optimizer
    holder.grad_scale, holder.found_inf = None, overflow
    try:
        update()
    finally:
        del holder.grad_scale, holder.found_inf
