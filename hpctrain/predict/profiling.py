"""Measure a profile: when backward makes which gradient, on this process alone. Needs torch."""

from __future__ import annotations

import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, pstdev
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.errors import ConfigError
from hpctrain.predict.profile import Layer, Profile
from hpctrain.replica import choose_update, optimizer_facts
from hpctrain.tables import count_of
from hpctrain.world import keep_freed_memory

__all__ = ["Subject", "find_subject", "load_subject", "measure_profile"]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a step consists of. A file for `hpctrain plan --subject FILE.py:NAME` returns one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]
    """Forward pass of one batch that is already loaded."""
    batch: int
    load: Callable[[], object] | None = None
    """Gets a batch; None: input costs nothing."""
    samples: int = 0
    """Samples of an epoch."""
    bytes_per_sample: int = 0
    name: str = ""


class _Pass(NamedTuple):
    input_s: float
    forward_s: float
    update_s: float
    ready_s: dict[int, float]
    """By parameter, since backward began."""


class _Clock:
    """Moments on the device of the work: the host's clock would give the launch times."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def between(self, first: object, last: object) -> float:
        if self._on_gpu:
            return float(first.elapsed_time(last)) / 1000  # type: ignore[attr-defined]
        return float(last) - float(first)  # type: ignore[arg-type]


def measure_profile(subject: Subject, *, repeats: int = 20, warmup: int = 3) -> Profile:
    """Take steps and note when each gradient is there; the model is trained by them.

    Args:
        subject: What a step consists of.
        repeats: Steps that count; times are medians.
        warmup: Steps before them.

    Raises:
        ConfigError: no parameter has a gradient.
    """
    names = {id(p): name for name, p in subject.model.named_parameters()}
    trained = [p for group in subject.optimizer.param_groups for p in group["params"]]
    parameters = [p for p in trained if p.requires_grad]
    if not parameters:
        raise ConfigError("the optimizer has no parameter that needs a gradient")
    clock = _Clock(parameters[0].device)
    if parameters[0].device.type == "cpu":
        keep_freed_memory()  # as training does
    passes = [
        _step(subject, parameters, clock)
        for _ in range(count_of(warmup, "warmup", least=0) + count_of(repeats, "repeats"))
    ][warmup:]
    seen = sorted({index for each in passes for index in each.ready_s})
    if not seen:
        raise ConfigError("the loss reaches no parameter of the optimizer")
    ready = {
        index: median(each.ready_s[index] for each in passes if index in each.ready_s)
        for index in seen
    }
    layers, before = [], 0.0
    for index in sorted(seen, key=lambda index: ready[index]):
        parameter = parameters[index]
        layers.append(
            Layer(
                name=names.get(id(parameter), f"parameter {index}"),
                backward_s=max(0.0, ready[index] - before),
                gradient_bytes=parameter.numel() * parameter.element_size(),
            )
        )
        before = max(before, ready[index])
    return Profile(
        machine=f"{platform.machine()}, {torch.get_num_threads()} threads",
        model=subject.name or type(subject.model).__name__,
        batch=subject.batch,
        input_s=median(each.input_s for each in passes),
        forward_s=median(each.forward_s for each in passes),
        layers=tuple(layers),
        update_s=median(each.update_s for each in passes),
        divides_update=_divides(subject.optimizer, parameters),
        samples=subject.samples,
        parameters=sum(parameter.numel() for parameter in parameters),
        bytes_per_sample=subject.bytes_per_sample,
        error=_uncertainty(passes),
    )


def _step(subject: Subject, parameters: Sequence[Tensor], clock: _Clock) -> _Pass:
    moments: dict[int, object] = {}

    def note(index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            moments[index] = clock.now()

        return hook

    hooks = [
        p.register_post_accumulate_grad_hook(note(index))  # type: ignore[no-untyped-call]
        for index, p in enumerate(parameters)
    ]
    subject.optimizer.zero_grad()
    clock.synchronize()
    begin = clock.now()
    if subject.load is not None:
        subject.load()
    loaded = clock.now()
    loss = subject.loss()
    forward = clock.now()
    torch.autograd.backward(loss)
    for hook in hooks:
        hook.remove()
    backward = clock.now()
    subject.optimizer.step()
    updated = clock.now()
    clock.synchronize()
    return _Pass(
        clock.between(begin, loaded),
        clock.between(loaded, forward),
        clock.between(backward, updated),
        {index: clock.between(forward, moment) for index, moment in moments.items()},
    )


def _divides(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether `distribute` would divide the update where ranks share a node."""
    names = [str(number) for number, _ in enumerate(parameters)]
    return choose_update(optimizer_facts(optimizer, names, parameters)).by is not None


def _uncertainty(passes: Sequence[_Pass]) -> float:
    """Relative, of the median of this many steps."""
    totals = [each.forward_s + max(each.ready_s.values(), default=0.0) for each in passes]
    if len(totals) < 2:
        return 0.0
    # 1.25 standard errors of a mean are one of a median.
    return float(1.25 * pstdev(totals) / len(totals) ** 0.5 / median(totals))


def load_subject(where: str) -> Subject:
    """Call `NAME()` of `FILE.py:NAME`.

    Raises:
        ConfigError: there is no such file or function, or it returns something else.
    """
    return find_subject(where)()


def find_subject(where: str) -> Callable[[], Subject]:
    """The function `NAME` of `FILE.py:NAME`, which raises where it returns something else.

    Raises:
        ConfigError: there is no such file or function.
    """
    path, _, name = where.rpartition(":")
    if not path or not name.isidentifier():
        raise ConfigError(f"--subject {where}: write FILE.py:NAME, NAME a function in the file")
    file = Path(path)
    spec = importlib.util.spec_from_file_location("hpctrain_subject", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--subject {where}: there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles of the file look there
    sys.path.insert(0, str(file.parent.absolute()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--subject {where}: {path} has no function {name}")

    def make() -> Subject:
        subject = function()
        if not isinstance(subject, Subject):
            raise ConfigError(
                f"--subject {where}: {name}() returned a {type(subject).__name__}, and must return "
                "a hpctrain.predict.Subject"
            )
        return subject

    return make
