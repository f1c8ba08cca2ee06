"""Watch one step of a model: what each unit keeps for backward, sends and computes. Needs torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.errors import ConfigError
from hpctrain.name_patterns import is_inside
from hpctrain.predict.footprint import TiedWeight, Unit

__all__ = ["COPIED", "LiveBytes", "UnitWatch"]

COPIED = "copied"

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(eq=False, slots=True)
class _Made:
    """Memory that an operation took."""

    num_bytes: int
    label: object
    is_aside: bool = False


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all tensors that were made since it began and are still there."""

    def __init__(self, sources: Set[int] = frozenset()) -> None:
        """Begin.

        Args:
            sources: Storages whose copies in another format get the label COPIED.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = sources
        self.label: object = None
        """What is noted with a tensor that is made now."""
        self._alive: dict[int, _Made] = {}
        self._changes: list[tuple[_Made, int]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note what it has made."""
        known = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if _is_dense(tensor)}
        out = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and bool(known & self._sources)
        for tensor in tree_leaves(out):
            if _is_dense(tensor) and _key(tensor) not in known:
                self._add(tensor.untyped_storage(), (COPIED, self.label) if is_copy else self.label)
        return out

    def set_aside(self, tensor: Tensor) -> None:
        """Leave this tensor out of `most`, from its making on."""
        if made := self._alive.get(_key(tensor)):
            made.is_aside = True

    def alive(self) -> list[tuple[int, object]]:
        """Bytes and labels of what is still there."""
        return [(made.num_bytes, made.label) for made in self._alive.values()]

    def most(self) -> int:
        """The most bytes at a time, without what was set aside."""
        now = most = 0
        for made, change in self._changes:
            now += 0 if made.is_aside else change
            most = max(most, now)
        return most

    def knows(self, tensor: Tensor) -> bool:
        """Whether it was made since this began."""
        return _key(tensor) in self._alive

    def _add(self, storage: torch.UntypedStorage, label: object) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        made = self._alive[key] = _Made(storage.nbytes(), label)
        self._changes.append((made, made.num_bytes))
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        made = self._alive.pop(key)
        self._changes.append((made, -made.num_bytes))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _bytes_in(values: object) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(values) if isinstance(t, Tensor))


class _Seen:
    """What one unit was seen to do."""

    def __init__(self) -> None:
        self.order: int | None = None
        """Its first call's number; None: it was not called."""
        self.flops = self.tensor_flops = 0
        self.kept = self.tensor_kept = self.casts = self.output = 0
        self.messages = self.message_bytes = 0


class UnitWatch:
    """Forward and backward of one micro-batch, seen unit by unit.

    Tensor parallelism divides what is made from the entry of a `column` module to the entry of the
    next `row` module of the same unit, or to the unit's end, and the operations of both.
    """

    def __init__(
        self, model: nn.Module, units: Mapping[str, bool], styles: Mapping[str, str]
    ) -> None:
        """Watch these modules.

        Args:
            model: The whole.
            units: Names of its modules, none inside another, and whether they are the root's.
            styles: By name of a module that is divided: `column` or `row`.
        """
        self._model = model
        self._names = list(units)
        self._in_root = list(units.values())
        self._styles = styles
        self._seen = [_Seen() for _ in units]
        self._current = 0
        self._calls = 0
        self._computes_part = False
        self._settled = 0
        self._inputs: set[int] = set()
        weights = [*model.parameters(), *model.buffers()]
        self._weights = {_key(tensor) for tensor in weights if _is_dense(tensor)}
        self._live = LiveBytes(self._weights)
        self._mark(keeps=False, computes=False)
        self._counter = FlopCounterMode(display=False)
        self.transient_bytes = 0

    def run(self, loss: Callable[[], Tensor], precision: str = "fp32") -> None:
        """One step without its update."""
        known = self._weights
        given: dict[int, tuple[int, object]] = {}

        def pack(tensor: Tensor) -> Tensor:
            # The micro-batch itself was there before; each of those under way is held.
            if _is_dense(tensor) and not self._live.knows(tensor) and _key(tensor) not in known:
                size = tensor.untyped_storage().nbytes()
                given.setdefault(_key(tensor), (size, (self._current, False)))
            return tensor

        with ExitStack() as stack:
            for handle in self._hooks():
                stack.callback(handle.remove)
            stack.enter_context(self._counter)
            stack.enter_context(self._live)
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                self._casting(precision),
            ):
                value = loss()
            self._settle()
            gc.collect()
            for num_bytes, label in [*self._live.alive(), *given.values()]:
                self._keep(num_bytes, label)
            forward = self._settled
            torch.autograd.backward(value)
        kept = sum(seen.kept + seen.casts for seen in self._seen)
        self.transient_bytes = max(0, self._live.most() - kept)
        self._scale(self._counter.get_total_flops() / forward if forward else 1.0)

    def _keep(self, num_bytes: int, label: Any) -> None:
        is_copy = label[0] == COPIED
        unit, is_part = label[1] if is_copy else label
        seen = self._seen[unit]
        if is_copy:
            seen.casts += num_bytes
            return
        seen.kept += num_bytes
        seen.tensor_kept += num_bytes if is_part else 0

    def _scale(self, factor: float) -> None:
        """Backward's operations go with forward's."""
        for seen in self._seen:
            seen.flops = round(seen.flops * factor)
            seen.tensor_flops = round(seen.tensor_flops * factor)

    def _hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        handles = []
        for index, name in enumerate(self._names):
            unit = self._model.get_submodule(name)
            handles.append(unit.register_forward_pre_hook(self._entering(index)))
            handles.append(unit.register_forward_hook(self._leaving(index)))
        for name, style in self._styles.items():
            module = self._model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._dividing(style)))
            handles.append(module.register_forward_hook(self._divided(style)))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                handles.append(
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda p: self._live.set_aside(p.grad)
                    )
                )
        return handles

    def _entering(self, index: int) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._settle()
            if self._seen[index].order is None:
                self._seen[index].order = self._calls
                self._calls += 1
            self._current = index
            self._mark(keeps=False, computes=False)

        return hook

    def _leaving(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, out: Any) -> None:
            self._settle()
            self._seen[index].output = _bytes_in(out)
            self._mark(keeps=False, computes=False)
            self._inputs.clear()

        return hook

    def _dividing(self, style: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._settle()
            self._mark(keeps=style == "column", computes=True)
            if style != "column":
                return
            for tensor in tree_leaves(inputs):
                if _is_dense(tensor) and _key(tensor) not in self._inputs:
                    self._inputs.add(_key(tensor))
                    self._send(_bytes_in(tensor))  # its gradient's parts are added up

        return hook

    def _divided(self, style: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, out: Any) -> None:
            if style == "row":
                self._settle()
                self._mark(keeps=False, computes=False)
                self._send(_bytes_in(out))

        return hook

    def _send(self, num_bytes: int) -> None:
        self._seen[self._current].messages += 1
        self._seen[self._current].message_bytes += num_bytes

    def _mark(self, *, keeps: bool, computes: bool) -> None:
        self._computes_part = computes
        self._live.label = (self._current, keeps)

    def _settle(self) -> None:
        """Credit the operations since the last time."""
        total = self._counter.get_total_flops()
        seen = self._seen[self._current]
        seen.flops += total - self._settled
        seen.tensor_flops += total - self._settled if self._computes_part else 0
        self._settled = total

    def units(self, layers: Sequence[str] = ()) -> tuple[Unit, ...]:
        """What was seen, in the order of the first calls.

        Args:
            layers: Of a pipeline; units within one are marked by it.
        """
        owner, _ = self._owners()
        made = []
        for index in self._order():
            seen = self._seen[index]
            mine = [
                (name, p) for name, p in self._model.named_parameters() if owner[id(p)][0] == index
            ]
            made.append(
                Unit(
                    name=self._names[index] or type(self._model).__name__,
                    weights=sum(_bytes_in(p) for _, p in mine),
                    trained=sum(_bytes_in(p) for _, p in mine if p.requires_grad),
                    buffer_bytes=sum(
                        _bytes_in(b)
                        for name, b in self._model.named_buffers()
                        if self._home(name) == index
                    ),
                    activation_bytes=seen.kept,
                    cast_bytes=seen.casts,
                    output_bytes=seen.output,
                    flops=float(seen.flops),
                    tensor_weights=sum(_bytes_in(p) for name, p in mine if self._is_divided(name)),
                    tensor_activation_bytes=seen.tensor_kept,
                    tensor_flops=float(seen.tensor_flops),
                    tensor_messages=seen.messages,
                    tensor_message_bytes=seen.message_bytes,
                    in_root=self._in_root[index],
                    layer=next((o for o in layers if is_inside(self._names[index], o)), ""),
                )
            )
        return tuple(made)

    @property
    def ties(self) -> tuple[TiedWeight, ...]:
        """Parameters that several units have."""
        owners, sizes = self._owners()
        place = {index: number for number, index in enumerate(self._order())}
        return tuple(
            TiedWeight(first=place[units[0]], other=place[other], num_bytes=sizes[key])
            for key, units in owners.items()
            for other in units[1:]
        )

    def _order(self) -> list[int]:
        called = [index for index, seen in enumerate(self._seen) if seen.order is not None]
        if not called:
            raise ConfigError(
                f"the loss calls no module of {type(self._model).__name__}; it must call the model"
            )
        return sorted(called, key=lambda index: self._seen[index].order or 0)

    def _owners(self) -> tuple[dict[int, list[int]], dict[int, int]]:
        """By parameter: the units that have it, in the order of their calls; and its bytes."""
        place = {index: number for number, index in enumerate(self._order())}
        owners: dict[int, set[int]] = {}
        sizes: dict[int, int] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), set()).add(self._home(name))
            sizes[id(parameter)] = _bytes_in(parameter)
        return {key: sorted(units, key=place.__getitem__) for key, units in owners.items()}, sizes

    def _home(self, name: str) -> int:
        """The unit of a parameter: its own, else the first of the module that has it."""
        order = self._order()
        words = name.split(".")
        for length in range(len(words) - 1, -1, -1):
            prefix = ".".join(words[:length])
            for index in order:
                unit = self._names[index]
                if unit == prefix or not prefix or unit.startswith(f"{prefix}."):
                    return index
        return order[0]

    def _is_divided(self, name: str) -> bool:
        module, _, last = name.rpartition(".")
        style = self._styles.get(module)
        return style is not None and (last == "weight" or style == "column")

    def _casting(self, precision: str) -> AbstractContextManager[object]:
        dtype = _CASTS.get(precision)
        kind = next((p.device.type for p in self._model.parameters()), "cpu")
        return nullcontext() if dtype is None else torch.autocast(kind, dtype)
