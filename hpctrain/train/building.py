"""From a configuration to what it names: models, optimizers, data, losses, metrics, schedules."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.data import files, name_files, open_named, open_npy, scatter, share
from hpctrain.errors import ConfigError, DataError, HpcTrainError
from hpctrain.optim import LAMB, LARS, Recipe, split_parameters
from hpctrain.tables import nearest
from hpctrain.train.computing import MAIN, prediction_of
from hpctrain.train.config import Config
from hpctrain.train.config.sections import REFERENCE
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.world import World

__all__ = [
    "METRICS",
    "build_data",
    "build_draw",
    "build_models",
    "build_optimizer",
    "build_schedule",
    "call",
    "compile_model",
    "find_function",
    "find_functions",
    "find_loss",
    "find_metric",
    "find_optimizer",
    "find_schedule",
    "search_beside",
    "wants_world",
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
            f"{key}={reference!r}: there is no module {missing!r}; it is searched for beside the "
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
        raise ConfigError(f"{key}={reference!r} is not a function")
    function: Callable[..., Any] = found
    return function


def call(function: Callable[..., Any], arguments: Mapping[str, Any], key: str, *given: Any) -> Any:
    """Call a user's function with the arguments of a table, once they are seen to fit.

    Raises:
        ConfigError: they do not; the message names the argument and the nearest.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature
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
        raise ConfigError(f"train.loss={name!r} is not a loss of torch.nn.functional{hint}")
    loss: Callable[..., Tensor] = getattr(functional, name)

    def of_prediction(out: Any, target: Any) -> Tensor:
        return loss(prediction_of(out), target)

    return of_prediction


def _by_sample(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).double().mean(1)


def accuracy(out: Any, target: Tensor) -> Tensor:
    """1 for every sample whose highest output is the target class, 0 for the others."""
    return _by_sample(prediction_of(out).argmax(1) == target)


def mae(out: Any, target: Tensor) -> Tensor:
    """The absolute error of every sample, over all of its values."""
    return _by_sample((prediction_of(out).double() - target.double()).abs())


def mse(out: Any, target: Tensor) -> Tensor:
    """The squared error of every sample, over all of its values."""
    return _by_sample((prediction_of(out).double() - target.double()).square())


METRICS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "accuracy": accuracy,
    "mae": mae,
    "mse": mse,
}
"""Metrics by name: one value a sample of what the model returns and the target."""


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


def build_models(config: Config) -> dict[str, torch.nn.Module]:
    """Make the model, or the models where the function returns a dict of them.

    Raises:
        ConfigError: the function cannot be found or called, or returns something else.
    """
    function = find_function(config.model.build, "model.build")
    made = call(function, config.model.args, "model.args")
    models = dict(made) if isinstance(made, Mapping) else {MAIN: made}
    for name, model in models.items():
        if not isinstance(model, torch.nn.Module) or not isinstance(name, str):
            raise ConfigError(
                f"model.build={config.model.build!r} returned {type(made).__name__} with "
                f"{type(model).__name__}; return a torch.nn.Module, or a dict of some by name"
            )
    if not models or (len(models) > 1 and config.train.step is None):
        raise ConfigError(
            f"model.build={config.model.build!r} returned {len(models)} models; several models "
            "need train.step, which trains them"
        )
    return models


def compile_model(model: torch.nn.Module, *, mode: str, backend: str) -> None:
    """Let torch compile what the model does when it is called; its state keeps its names.

    As `model.compile()`, which leaves modules of torch itself (a Sequential) uncompiled: torch
    does not capture its own frames, so the one that calls it is captured here.
    """
    module: Any = model  # what follows is torch's own, and untyped

    def call(*arguments: Any, **named: Any) -> Any:
        return module._call_impl(*arguments, **named)

    chosen = None if mode == "default" else mode
    module._compiled_call_impl = torch.compile(call, mode=chosen, backend=backend)


def build_optimizer(
    config: Config, model: torch.nn.Module, *, prefers_fused: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer of one model.

    Args:
        config: What to train, and how.
        model: On the device that it is trained on.
        prefers_fused: Take its fused form, where it has one for that device and the configuration
            does not say `fused` itself.

    Raises:
        ConfigError: it is unknown, or does not take these arguments.
    """
    function = find_optimizer(config.optimizer.name)
    if prefers_fused and _may_be_fused(function, config.optimizer.args):
        try:
            return _make_optimizer(config, model, function, {"fused": True})
        except RuntimeError:  # torch has none for these parameters
            pass
    return _make_optimizer(config, model, function, {})


def _may_be_fused(function: Callable[..., Any], given: Mapping[str, Any]) -> bool:
    try:
        return "fused" in inspect.signature(function).parameters and "fused" not in given
    except (TypeError, ValueError):
        return False


def _make_optimizer(
    config: Config, model: torch.nn.Module, function: Callable[..., Any], more: Mapping[str, Any]
) -> torch.optim.Optimizer:
    chosen = config.optimizer
    arguments = {"lr": chosen.lr, **chosen.args, **more}
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(f"model.build={config.model.build!r}: the model has nothing to train")
    if chosen.weight_decay is not None:
        arguments["weight_decay"] = chosen.weight_decay
        if chosen.exclude_norms:
            parameters = split_parameters(model, weight_decay=chosen.weight_decay)
    made = call(function, arguments, "optimizer.args", parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer.name={chosen.name!r} returned {type(made).__name__}; it must return an "
            "optimizer of torch"
        )
    return made


def build_schedule(
    config: Config, optimizer: torch.optim.Optimizer, num_steps: int | None
) -> Any | None:
    """Make the schedule of one optimizer; None where the rate stays.

    Raises:
        ConfigError: it is unknown, or does not take these arguments.
    """
    chosen = config.schedule
    if chosen.name == "none":
        return None
    if chosen.name != "recipe":
        arguments = dict(chosen.args)
        if chosen.is_plateau:
            arguments["mode"] = config.plateau_metric.partition(":")[0]
        return call(find_schedule(chosen.name), arguments, "schedule.args", optimizer)
    if num_steps is None:
        raise ConfigError(
            'schedule.name="recipe" needs the number of steps, which a stream does not have; '
            "give train.steps instead of train.epochs"
        )
    return Recipe(
        base_rate=config.optimizer.lr,
        base_batch=chosen.base_batch or config.train.global_batch,
        global_batch=config.train.global_batch,
        num_steps=chosen.decay_steps or num_steps,
        scaling=chosen.scaling,
        warmup_steps=chosen.warmup_steps,
        warmup_from=chosen.warmup_from,
        decay=chosen.decay,
        end=chosen.end,
        power=chosen.power,
        milestones=chosen.milestones,
        factor=chosen.factor,
    ).schedule(optimizer)


def build_data(
    config: Config, world: World | None, folder: Path, *, evaluation: bool = False
) -> Any | None:
    """Collective, with a world: open or make the data; without one, where that is possible.

    Args:
        config: The same on every rank.
        world: The ranks; None opens them for a plan only.
        folder: What relative files are relative to.
        evaluation: The data to evaluate on instead of those to train on; None where there are none.
    """
    data = config.data
    reference = data.evaluation if evaluation else data.build
    paths = [folder / name for name in (data.evaluation_files if evaluation else data.files)]
    if paths:
        return _open(config, world, paths)
    if reference is None:
        return None
    function = find_function(reference, "data.evaluation" if evaluation else "data.build")
    given = {"world": world} if wants_world(function) else {}
    return call(function, {**data.args, **given}, "data.args")


def build_draw(config: Config, data: Any, folder: Path) -> dict[str, Any]:
    """What a configuration says of drawing samples, as arguments of a Loader.

    Args:
        config: The same on every rank.
        data: The training data, for functions of them.
        folder: What relative files are relative to.

    Raises:
        ConfigError: the function cannot be found or called.
        DataError: the file is missing or broken.
    """
    chosen = config.data
    said: dict[str, Any] = {}
    for name in ("sample_weights", "lengths"):
        text = getattr(chosen, name)
        if text is None:
            continue
        if re.fullmatch(REFERENCE[0], text):
            function = find_function(text, f"data.{name}")
            said[name] = call(function, {}, f"data.{name}", data)
        elif text.endswith(".npy"):
            said[name] = open_npy(folder / text)
        else:
            raise ConfigError(
                f"data.{name}={text!r} must be a .npy file or MODULE:FUNCTION of the training data"
            )
    if said:
        said |= {"num_draws": chosen.num_draws, "bucket_batches": chosen.bucket_batches}
    return said


def wants_world(function: Callable[..., Any]) -> bool:
    """Whether a function of data has a parameter that is called world."""
    try:
        return "world" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _open(config: Config, world: World | None, paths: list[Path]) -> Any:
    names = list(config.data.columns) or None
    alone: list[Path] = []
    said: dict[str, Any] = {"rows": paths, "columns": names}
    if config.data.join == "columns":
        said = {"columns": paths}
    elif len(paths) == 1:
        alone, said = paths, {"columns": names}
    if world is None:
        return open_named(name_files("data.files", alone, **said))
    if config.data.access == "share":
        return share(world, *alone, **said)
    if config.data.access == "scatter":
        source, trouble = None, None
        if world.rank == 0:
            try:
                source = open_named(name_files("data.files", alone, **said))
            except HpcTrainError as error:
                trouble = str(error)
        agree(world.comm, trouble, error=DataError)
        return scatter(world, source)
    return files(world, *alone, **said)


def find_functions(config: Config) -> dict[str, Any]:
    """What a trainer computes with, by the names of its arguments.

    Raises:
        ConfigError: there is no such loss, step or metric.
    """
    train = config.train
    return {
        "loss": None if train.loss is None else find_loss(train.loss),
        "step": None if train.step is None else find_function(train.step, "train.step"),
        "metrics": dict(find_metric(name) for name in train.metrics),
    }
