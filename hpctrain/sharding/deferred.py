"""Models that no rank ever holds whole: built without data, then filled piece by piece.

The function that builds a model runs on torch's meta device, and what it does to tensors is
recorded: fills, draws, copies. Then every rank repeats the record with data, in the same order and
from the same state of the generator, so that the values are those that one process would have. A
tensor begins to exist at its first operation and is given back after its last one: by then the rank
has taken its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.errors import ConfigError
from hpctrain.pieces import local_tensor
from hpctrain.sharding.shards import block_of

__all__ = ["Deferred", "build_deferred"]

_MADE_FROM_DATA = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray)
_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_LOOKS_AT_VALUES = "_no_grad_trunc_normal_"
"""Of torch.nn.init: draws until all values are inside, so it is repeated as one operation."""


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor of the record: which memory it lies in, and how."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, held: dict[int, Tensor]) -> Tensor:
        """The same of the data."""
        return torch.as_strided(held[self.memory], self.size, self.stride, self.offset)


@dataclass(slots=True)
class _Operation:
    """One call that was recorded, with views in the place of tensors."""

    call: Callable[..., Any]
    args: Any
    kwargs: Any
    makes: list[tuple[int, int]] = field(default_factory=list)
    """Which of its results are new memory, and the number of it."""

    def touches(self) -> Iterator[int]:
        """The memory that it reads or writes, or makes."""
        yield from (number for _, number in self.makes)
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, _View):
                yield leaf.memory


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation on tensors, while they have no data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # memory whose address must not be used again

    def number_of(self, tensor: Tensor) -> int | None:
        """The memory that a tensor lies in; None: not of this record."""
        return self.numbers.get(tensor.untyped_storage()._cdata)

    def note_memory(self, tensor: Tensor) -> int:
        """New memory."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return self.numbers.setdefault(storage._cdata, len(self.numbers))

    def view_of(self, tensor: Tensor) -> _View | Tensor:
        """How an argument is written down; data that is there already stays."""
        number = self.number_of(tensor)
        if number is None:
            if _has_no_data(tensor):
                raise ConfigError(
                    "split: the model uses a tensor on the meta device that was made before it; "
                    "make it inside the function that builds the model"
                )
            return tensor.detach().clone()
        return _View(
            number, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        noted = pytree.tree_map_only(Tensor, self.view_of, (args, kwargs))
        operation = _Operation(func, *noted)
        result = func(*args, **kwargs)
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        if any(not _has_no_data(one) for one in tensors):
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise ConfigError(
                    f"split: {func} draws random numbers on {tensors[0].device} while the model is "
                    "built; leave device= out there, so that draws can be repeated in their order"
                )
            return result  # with data: it is a constant wherever it is used
        for place, one in enumerate(tensors):
            if self.number_of(one) is None:
                operation.makes.append((place, self.note_memory(one)))
        self.operations.append(operation)
        return result


class _Constants(torch.overrides.TorchFunctionMode):
    """Tensors that are made from numbers keep them."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:
            return False  # or torch's own initialisations would leave out what is to be recorded
        if func not in _MADE_FROM_DATA:
            return func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            data = func(*args, **{**kwargs, **_on_cpu(func)})
            if _has_no_data(data):
                return func(*args, **kwargs)
            made = torch.empty_strided(data.size(), data.stride(), dtype=data.dtype, device="meta")
        copied = _Operation(torch.clone, (data,), {})
        copied.makes.append((0, self._recorder.note_memory(made)))
        self._recorder.operations.append(copied)
        return made


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


@contextmanager
def _as_one_operation(recorder: _Recorder) -> Iterator[None]:
    """Record an initialisation of torch's whole that looks at values."""
    original = getattr(nn.init, _LOOKS_AT_VALUES, None)
    if original is None:
        yield
        return

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        recorder.operations.append(_Operation(original, (recorder.view_of(tensor), *args), kwargs))
        return tensor

    setattr(nn.init, _LOOKS_AT_VALUES, record)
    try:
        yield
    finally:
        setattr(nn.init, _LOOKS_AT_VALUES, original)


def _on_cpu(func: Any) -> dict[str, Any]:
    return {} if func is torch.from_numpy else {"device": "cpu"}


@dataclass(eq=False, slots=True)
class Deferred:
    """A model without data, and how its data come about."""

    model: nn.Module
    generator: Tensor
    """The state of torch's generator when the model was built."""
    operations: list[_Operation]
    places: dict[str, _View]
    """Parameters and buffers by name; tied ones lie in the same memory."""

    def materialize(self, device: torch.device) -> int:
        """Give the model its data on a device, after it was cut into shards.

        Returns:
            The most bytes of whole tensors that were held at a time.
        """
        self.model.to_empty(device=device)
        tied = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        targets = dict(tied)

        def take(name: str, whole: Tensor) -> None:
            target = targets[name].detach()
            local_tensor(target).copy_(block_of(target, whole, name))

        return self.fill(take)

    @torch.no_grad()
    def fill(self, take: Callable[[str, Tensor], None]) -> int:
        """Make the data, tensor by tensor.

        Args:
            take: Called once with each name and its whole tensor, which is given back afterwards.

        Returns:
            The most bytes that were held at a time.
        """
        last = {
            number: place
            for place, operation in enumerate(self.operations)
            for number in operation.touches()
        }
        wanted: dict[int, list[str]] = {}
        for name, view in self.places.items():
            wanted.setdefault(view.memory, []).append(name)
        held: dict[int, Tensor] = {}
        peak = 0
        torch.set_rng_state(self.generator)
        for place, operation in enumerate(self.operations):
            self._repeat(operation, held)
            peak = max(peak, sum(t.untyped_storage().nbytes() for t in held.values()))
            for number in set(operation.touches()):
                if last[number] == place and number in held:
                    for name in wanted.get(number, ()):
                        take(name, self.places[name].of(held))
                    del held[number]
        return peak

    def _repeat(self, operation: _Operation, held: dict[int, Tensor]) -> None:
        args, kwargs = pytree.tree_map_only(
            _View, lambda view: view.of(held), (operation.args, operation.kwargs)
        )
        args, kwargs = pytree.tree_map_only(torch.device, _with_data, (args, kwargs))
        results = [
            one
            for one in pytree.tree_leaves(operation.call(*args, **kwargs))
            if isinstance(one, Tensor)
        ]
        for place, number in operation.makes:
            held[number] = results[place]


def _with_data(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def build_deferred(build: Callable[[], nn.Module]) -> Deferred:
    """Build a model without data.

    Raises:
        ConfigError: building it looks at values, or does what cannot be repeated.
    """
    recorder = _Recorder()
    generator = torch.get_rng_state()
    try:
        with torch.device("meta"), recorder, _Constants(recorder), _as_one_operation(recorder):
            model = build()
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"split: the model cannot be built without data ({error}); code that looks at values "
            "of tensors (.item(), .tolist()) needs device='cpu' there, or build the model yourself "
            "and give it to split"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"split: the function that builds the model gave a {type(model).__name__}, and must "
            "give a torch.nn.Module"
        )
    places: dict[str, _View] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        view = recorder.view_of(tensor)
        if not isinstance(view, _View):
            raise ConfigError(
                f"split: {name} is on {tensor.device} although the model was built on the meta "
                "device; leave device= out where it is made"
            )
        places[name] = view
    return Deferred(model, generator, recorder.operations, places)
