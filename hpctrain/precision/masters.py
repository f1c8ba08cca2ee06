"""Float32 masters of bfloat16 weights.

The user's optimizer keeps the model's own parameters. While it steps, or loads a state, each of
them holds its master and a float32 gradient; afterwards it holds the master rounded to bfloat16.
So any optimizer works, with its state in float32, for any caller of `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from hpctrain.errors import ConfigError
from hpctrain.tensor_names import plain_keys

__all__ = ["Masters"]


@dataclass(eq=False, slots=True)
class _Entry:
    parameter: torch.nn.Parameter
    master: Tensor
    half: Tensor
    version: int
    gradient: Tensor | None = None


class Masters:
    """The masters of a model's trained parameters."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._entries: dict[int, _Entry] = {}
        self._is_full = False
        self._num_blocks = 0
        """`full` blocks that are open."""
        self._num_calls = 0
        """Steps and loads of the optimizer that have begun; one that raised does not end."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self._end()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._begin()),
            optimizer.register_load_state_dict_post_hook(lambda *_: self._end()),
        ]

    def adopt(self) -> None:
        """Make every float32 weight and buffer of the model bfloat16, with masters where trained.

        Modules with running statistics (BatchNorm) stay float32: these would lose small updates,
        and torch takes bfloat16 input with float32 statistics, but not with mixed parameters.
        """
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        kept: dict[int, _Entry] = {}
        with torch.no_grad():
            for module in self._model.modules():
                if isinstance(module, _NormBase):
                    continue
                for parameter in module.parameters(recurse=False):
                    self._convert(parameter, id(parameter) in trained, kept)
                for buffer in module.buffers(recurse=False):
                    if buffer.dtype == torch.float32:
                        buffer.data = buffer.data.bfloat16()
        self._entries = kept

    def _convert(
        self, parameter: torch.nn.Parameter, trained: bool, kept: dict[int, _Entry]
    ) -> None:
        known = self._entries.get(id(parameter))
        if known is not None and parameter.dtype == torch.bfloat16:
            kept[id(parameter)] = known
            return
        if id(parameter) in kept or parameter.dtype not in (torch.float32, torch.bfloat16):
            return
        master = parameter.data.float()
        if parameter.dtype == torch.float32:
            parameter.grad = None  # a gradient has its parameter's dtype
            parameter.data = parameter.data.bfloat16()
        if trained:
            kept[id(parameter)] = _Entry(
                parameter, master.clone(), parameter.data, parameter._version
            )

    @contextmanager
    def full(self) -> Iterator[None]:
        """Parameters hold their masters inside: to read, save or load them in float32."""
        self._num_blocks += 1
        try:
            self._enter()
            yield
        finally:
            self._num_blocks -= 1
            self._leave()

    def recover(self) -> None:
        """Outside of the optimizer: one that raised in a step or a load is done with it."""
        self._num_calls = 0
        self._leave()

    def _before_step(
        self, _optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            raise ConfigError(
                "optimizer.step(closure) would run the model on the float32 masters of "
                "precision='bf16-pure'; call backward before step"
            )
        self._begin()

    def _begin(self) -> None:
        self._num_calls += 1
        self._enter()

    def _end(self) -> None:
        if not self._num_calls:
            raise ConfigError(
                "replica(x) was called inside the optimizer's step, by a hook, while the weights "
                "were float32 masters; run the model before or after the step"
            )
        self._num_calls -= 1
        self._leave()

    @torch.no_grad()
    def _enter(self) -> None:
        if self._is_full:
            return
        self._is_full = True
        entries = [e for e in self._entries.values() if e.parameter.dtype == torch.bfloat16]
        self._entries = {id(e.parameter): e for e in entries}
        for entry in entries:
            parameter = entry.parameter
            if parameter._version != entry.version or parameter.data_ptr() != entry.half.data_ptr():
                # Written to since the last step; where the bits are the same, so is the master.
                same = parameter == entry.master.to(parameter.dtype)
                entry.master.copy_(torch.where(same, entry.master, parameter.to(torch.float32)))
            entry.gradient, parameter.grad = parameter.grad, None
            entry.half = parameter.data
            parameter.data = entry.master
        used = [e for e in entries if e.gradient is not None]
        if used:
            wide = [torch.empty_like(e.master) for e in used]
            torch._foreach_copy_(wide, [e.gradient for e in used if e.gradient is not None])
            for entry, gradient in zip(used, wide, strict=True):
                entry.parameter.grad = gradient

    @torch.no_grad()
    def _leave(self) -> None:
        """Back to bfloat16, unless a block or a call around this one still needs the masters."""
        if not self._is_full or self._num_blocks or self._num_calls:
            return
        self._is_full = False
        entries = list(self._entries.values())
        if entries:
            torch._foreach_copy_([e.half for e in entries], [e.parameter.data for e in entries])
        for entry in entries:
            parameter = entry.parameter
            parameter.grad = None
            entry.master = parameter.data
            parameter.data = entry.half
            parameter.grad, entry.gradient = entry.gradient, None
            entry.version = parameter._version

    def state_dict(self) -> dict[str, Tensor]:
        """The masters by the names of their parameters."""
        with self.full():
            pass  # takes in what the user has written to the weights since the last step
        return plain_keys(
            {
                # In a block of the user's own the parameters are still the masters.
                name: parameter.data if self._is_full else self._entries[id(parameter)].master
                for name, parameter in self._model.named_parameters()
                if id(parameter) in self._entries
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take masters; the weights become them, rounded."""
        saved = plain_keys(state)
        with torch.no_grad(), self.full():
            for name, parameter in plain_keys(dict(self._model.named_parameters())).items():
                if name in saved and id(parameter) in self._entries:
                    parameter.copy_(saved[name])

    def close(self) -> None:
        """Let the optimizer go; weights stay bfloat16."""
        for hook in self._hooks:
            hook.remove()
