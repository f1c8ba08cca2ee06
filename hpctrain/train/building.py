"""From a configuration to what it names: models, optimizers, data, loss, schedule."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.errors import ConfigError, DataError, HpcTrainError
from hpctrain.optim import Recipe, split_parameters
from hpctrain.train.config import Config
from hpctrain.train.config.parts import REFERENCE
from hpctrain.train.references import (
    call,
    find_function,
    find_loss,
    find_metric,
    find_optimizer,
    find_schedule,
)

if TYPE_CHECKING:
    from hpctrain.world import World

__all__ = [
    "build_data",
    "build_draw",
    "build_models",
    "build_optimizer",
    "build_schedule",
    "compile_model",
    "find_functions",
    "wants_world",
]

MAIN = "model"
"""What the model is called where there is only one."""


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
            f"model.build={config.model.build!r} returned {len(models)} models; several need "
            "train.step, which says how they are trained"
        )
    return models


def compile_model(model: torch.nn.Module, *, mode: str, backend: str) -> None:
    """Let torch compile what the model does when it is called; its state keeps its names.

    As `model.compile()`, which leaves modules of torch itself (a Sequential) uncompiled: a frame of
    torch's own is none that torch captures, so the one that calls it is captured here.
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
        except RuntimeError:  # how torch says that it has none for these parameters
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
            'schedule.name="recipe" must know the number of steps, and a stream does not say it; '
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
        world: The ranks; None only looks, for a plan.
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
    from hpctrain.data import open_npy

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
    from hpctrain.data import files, name_files, open_named, scatter, share
    from hpctrain.world import agree

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
