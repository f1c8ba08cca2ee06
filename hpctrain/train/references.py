"""What a configuration names and Python has: functions, losses, metrics, optimizers, schedules."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.errors import ConfigError
from hpctrain.tables import nearest
from hpctrain.train.computing import prediction_of

__all__ = [
    "METRICS",
    "call",
    "find_function",
    "find_loss",
    "find_metric",
    "find_optimizer",
    "find_schedule",
    "search_beside",
]


def search_beside(path: Path | None) -> None:
    """Find modules beside the configuration file, and where the command was given."""
    here = [] if sys.flags.safe_path else [str(Path.cwd())]  # as Python does it itself
    for folder in (*here, *([str(path.resolve().parent)] if path else [])):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def find_function(reference: str, key: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION means.

    Raises:
        ConfigError: there is none; with the nearest name.
    """
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise  # the user's own module imports something that is not there
        raise ConfigError(
            f"{key}={reference!r}: there is no module {missing!r}; it is looked for beside the "
            "configuration file, in the current folder and in this Python's environment"
        ) from None
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{key}={reference!r}: {module_name} has no {part}{_hint(part, vars(found))}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key}={reference!r} is no function")
    function: Callable[..., Any] = found
    return function


def call(function: Callable[..., Any], arguments: Mapping[str, Any], key: str, *given: Any) -> Any:
    """Call a user's function with the arguments of a table, once they are seen to fit.

    Raises:
        ConfigError: they do not; the message names the argument and the nearest.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it must say so itself
        return function(*given, **arguments)
    try:
        signature.bind(*given, **arguments)
    except TypeError as error:
        takes = list(signature.parameters)
        strange = [name for name in arguments if name not in takes]
        shown = getattr(function, "__name__", str(function))
        why = str(error)
        if strange:
            why = f"has no argument {strange[0]!r}{_hint(strange[0], takes)}"
        raise ConfigError(f"{key}: {shown}() {why}; it takes {signature}") from None
    return function(*given, **arguments)


def _hint(word: str, known: Iterable[str]) -> str:
    guess = nearest(word, [name for name in known if not name.startswith("_")])
    return f"; did you mean {guess}?" if guess else ""


_OTHER_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "kl_div",
)
_LOSSES = sorted(
    {*_OTHER_LOSSES}
    | {name for name in dir(functional) if name.endswith("_loss") and name[0] != "_"}
)


def find_loss(name: str) -> Callable[..., Tensor]:
    """A loss of torch.nn.functional, or the user's own.

    Raises:
        ConfigError: there is none of that name; with the nearest.
    """
    if ":" in name:
        return find_function(name, "train.loss")
    if name not in _LOSSES:
        hint = _hint(name, _LOSSES) or f"; choose one of {', '.join(_LOSSES)}"
        raise ConfigError(f"train.loss={name!r} is no loss of torch.nn.functional{hint}")
    loss: Callable[..., Tensor] = getattr(functional, name)

    def of_prediction(out: Any, wanted: Any) -> Tensor:
        return loss(prediction_of(out), wanted)

    return of_prediction


def _by_sample(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).double().mean(1)


def accuracy(out: Any, wanted: Tensor) -> Tensor:
    """1 for every sample whose highest output is the wanted class, 0 for the others."""
    return _by_sample(prediction_of(out).argmax(1) == wanted)


def mae(out: Any, wanted: Tensor) -> Tensor:
    """The absolute error of every sample, over all of its values."""
    return _by_sample((prediction_of(out).double() - wanted.double()).abs())


def mse(out: Any, wanted: Tensor) -> Tensor:
    """The squared error of every sample, over all of its values."""
    return _by_sample((prediction_of(out).double() - wanted.double()).square())


METRICS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "accuracy": accuracy,
    "mae": mae,
    "mse": mse,
}
"""Metrics by name: one value a sample of what the model returns and what is wanted."""


def find_metric(name: str) -> tuple[str, Callable[..., Tensor]]:
    """A metric with the name it is written under.

    Raises:
        ConfigError: there is none of that name; with the nearest.
    """
    if ":" in name:
        return name.rpartition(":")[2].rpartition(".")[2], find_function(name, "train.metrics")
    if name not in METRICS:
        hint = _hint(name, METRICS) or f"; choose one of {', '.join(METRICS)} or MODULE:FUNCTION"
        raise ConfigError(f"train.metrics: {name!r} is unknown{hint}")
    return name, METRICS[name]


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """A class of torch.optim, LARS, LAMB, or the user's own function.

    Raises:
        ConfigError: there is none of that name; with the nearest.
    """
    if ":" in name:
        return find_function(name, "optimizer.name")
    from hpctrain.optim import LAMB, LARS

    known = _classes(torch.optim, torch.optim.Optimizer) | {"LARS": LARS, "LAMB": LAMB}
    if name not in known:
        hint = _hint(name, known) or f"; choose one of {', '.join(known)}"
        raise ConfigError(f"optimizer.name={name!r} is unknown{hint}")
    return known[name]


def find_schedule(name: str) -> Callable[..., Any]:
    """A class of torch.optim.lr_scheduler, or the user's own function.

    Raises:
        ConfigError: there is none of that name; with the nearest.
    """
    if ":" in name:
        return find_function(name, "schedule.name")
    known = _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if name not in known:
        hint = _hint(name, [*known, "recipe", "none"]) or f"; choose one of {', '.join(known)}"
        raise ConfigError(f"schedule.name={name!r} is unknown{hint}")
    return known[name]


def _classes(module: Any, base: type) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
