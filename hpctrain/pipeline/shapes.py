"""The shapes of what travels between stages, found without running the modules themselves.

torch's own shape inference runs the real modules on uninitialised memory: BatchNorm's statistics
are ruined by it. Here a copy without data runs on tensors without data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hpctrain.pipeline.raised import (
    describe_raised,
    needs_values,
    quiet_fake_tensors,
    shown_tensors,
)

__all__ = [
    "TensorFacts",
    "facts_of",
    "follow",
    "look_at_loss",
    "look_at_stage",
    "signature_of",
    "skeleton_of",
    "trouble_with_parameters",
]

_ANEW = "build the model anew with all its parameters, and split it"


class TensorFacts(NamedTuple):
    """What must be known of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def on_meta(self) -> Tensor:
        """A tensor with these facts and no data."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad
        )


def facts_of(tensors: Sequence[Tensor]) -> tuple[TensorFacts, ...]:
    """The facts of tensors, as they are."""
    return tuple(TensorFacts(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def look_at_stage(
    module: nn.Module,
    given: Sequence[TensorFacts],
    device: torch.device,
    *,
    call: Callable[[nn.Module, tuple[Any, ...]], Any],
    is_last: bool,
) -> tuple[tuple[TensorFacts, ...], str | None]:
    """What a stage makes of its inputs, or why that cannot be sent, in words.

    Args:
        module: Left as it is: parameters, buffers, attributes, and the random numbers too. May be
            a skeleton.
        given: Its inputs.
        device: Where it runs.
        call: How it is run, in the precision that was chosen.
        is_last: Whether what it gives goes to the loss function.
    """
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        copied = _copy_without_data(module, mode, device)
        with _without_data(mode, device), quiet_fake_tensors():
            output = call(copied, tuple(_fake(facts, device) for facts in given))
    except Exception as error:
        return (), _why_not(error, given)
    trouble = trouble_with_output(output, is_last=is_last)
    if trouble is not None:
        return (), trouble
    return facts_of(output if isinstance(output, tuple | list) else [output]), None


def _why_not(error: Exception, given: Sequence[TensorFacts]) -> str:
    """Why a stage did not run without data, in words. Pure."""
    told = describe_raised(error)
    if needs_values(error):
        return (
            f"its shapes cannot be found without data: {told}; what a stage gives must follow from "
            "the shapes of its inputs"
        )
    inputs = shown_tensors([facts.on_meta() for facts in given])
    return f"it failed on a micro-batch of {inputs} (tried without data): {told}"


def trouble_with_output(output: Any, *, is_last: bool) -> str | None:
    """Why an output cannot be sent to another rank, in words; None: it can. Pure."""
    if isinstance(output, Tensor):
        parts: Sequence[Any] = [output]
    elif isinstance(output, tuple | list) and len(output) > 1:
        parts = output
    else:
        kind = type(output).__name__
        kind = f"{kind} of length {len(output)}" if isinstance(output, tuple | list) else kind
        return f"it returns a {kind}; a stage returns a tensor, or a tuple of two or more"
    for number, part in enumerate(parts):
        if not isinstance(part, Tensor):
            return f"output {number} is {type(part).__name__}; all outputs must be tensors"
        if not part.is_floating_point() and not is_last:
            return (
                f"output {number} has dtype {str(part.dtype).removeprefix('torch.')}; what stages "
                "send each other must be floating: keep whole numbers within one stage"
            )
        if part.dim() == 0:
            return f"output {number} has no dimension; the first dimension must be the samples"
    return None


def look_at_loss(
    loss_fn: Callable[..., Any],
    outputs: Sequence[TensorFacts],
    target: TensorFacts,
    device: torch.device,
) -> str | None:
    """Why a loss cannot be differentiated, in words, as far as that shows without data."""
    try:
        with _without_data(FakeTensorMode(allow_non_fake_inputs=True), device):
            given = [_fake(facts, device) for facts in outputs]
            loss = loss_fn(given[0] if len(given) == 1 else tuple(given), _fake(target, device))
    except Exception:  # it may look at values; the real call tells what is wrong with it
        return None
    if not isinstance(loss, Tensor):
        return f"the loss function returned {type(loss).__name__}; it must return a tensor"
    if loss.numel() != 1:
        return (
            f"the loss function returned a tensor of shape {tuple(loss.shape)}; it must return one "
            "number, the mean over its samples"
        )
    return None


@contextmanager
def _without_data(mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    # Of the other GPUs of a node nothing is kept: torch would look at them all, and warn of it.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), mode:
        yield


def _fake(facts: TensorFacts, device: torch.device) -> Tensor:
    return torch.empty(
        facts.shape, dtype=facts.dtype, device=device, requires_grad=facts.requires_grad
    )


def _copy_without_data(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy whose parameters and buffers have no data; memory and the module stay untouched."""
    with mode:
        memo = _like_tensors_of(module, lambda tensor: device if tensor.is_meta else tensor.device)
    return copy.deepcopy(module, memo)  # tensors that are plain attributes are copied with data


def skeleton_of(module: nn.Module) -> nn.Module:
    """A copy without data, made before torch divides the tensors of a module, and runs hooks in it.

    Its shapes are found on this.
    """
    meta = torch.device("meta")
    return copy.deepcopy(module, _like_tensors_of(module, lambda _tensor: meta))


def follow(skeleton: nn.Module, module: nn.Module) -> None:
    """Let a skeleton train, evaluate and be frozen as its module is now."""
    modules, parameters = dict(skeleton.named_modules()), dict(skeleton.named_parameters())
    for name, one in module.named_modules():
        if name in modules:
            modules[name].training = one.training
    for name, parameter in module.named_parameters():
        if name in parameters:
            parameters[name].requires_grad_(parameter.requires_grad)


def _like_tensors_of(
    module: nn.Module, device_of: Callable[[Tensor], torch.device]
) -> dict[int, Any]:
    """By id of a parameter or buffer: one like it, without its values."""
    made: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        like: Tensor = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device_of(tensor)
        )
        if isinstance(tensor, nn.Parameter):
            like = nn.Parameter(like, requires_grad=tensor.requires_grad)
        made[id(tensor)] = like
    return made


def signature_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Names, shapes and whether they learn, of the parameters."""
    return {
        name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()
    }


def trouble_with_parameters(
    before: dict[str, tuple[Any, ...]], now: dict[str, tuple[Any, ...]]
) -> str | None:
    """Which parameters came, went or changed their shape, in words; None: none."""
    for name in [*now, *before]:
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            what = "was added" if old is None else "is gone"
            return f"the parameter {name} {what} since the model was distributed; {_ANEW}"
        if old[:2] != new[:2]:
            return (
                f"the parameter {name} has become {new[1]} {new[0]} and was {old[1]} {old[0]}; "
                f"{_ANEW}"
            )
    return None
