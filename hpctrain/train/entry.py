"""What every rank of `hpctrain train` runs: from the file to a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from hpctrain import log
from hpctrain.connection import connect, init
from hpctrain.data import Loader, is_stream
from hpctrain.errors import CheckpointError, ConfigError, HpcTrainError
from hpctrain.grid import Grid
from hpctrain.launch import tee_output
from hpctrain.optim import EMA, sync_batchnorm
from hpctrain.precision import LossScaling
from hpctrain.replica import Replica, distribute
from hpctrain.splitting import split
from hpctrain.train.arguments import count_batches, refuse_no_batch
from hpctrain.train.building import (
    build_data,
    build_draw,
    build_models,
    build_optimizer,
    build_schedule,
    compile_model,
    find_functions,
    search_beside,
)
from hpctrain.train.checkpoints import describe_changes, falls_until, saved_config
from hpctrain.train.config import Config, load_config, to_toml
from hpctrain.train.directory import RunDirectory, is_held
from hpctrain.train.figures import time_steps
from hpctrain.train.progress import Monitor
from hpctrain.train.trainer import Trainer
from hpctrain.world import AgreedExit, World, agree

__all__ = ["main", "make_trainer", "run_directory"]


def main(words: Sequence[str]) -> None:
    """Collective: train what a file says; the words must match."""
    parser = argparse.ArgumentParser(prog="hpctrain train")
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args(words)
    config = load_config(args.config, args.settings)
    train = config.train
    with init(
        seed=train.seed,
        device=train.device,
        allow_shared_device=train.allow_shared_device,
        num_threads=train.num_threads,
        bind=train.bind,
        config={"toml": to_toml(config)},
        timeout_s=config.engine.timeout_s,
    ) as world:
        directory = run_directory(config, args.config)
        try:
            _prepare(world, directory, resume=args.resume, fresh=args.fresh)
        except ConfigError as error:  # on all ranks
            _refuse(world, error)
        tee_output(directory.logs, world.rank, append=True)
        search_beside(args.config)
        try:
            trainer = make_trainer(world, config, args.config.resolve().parent, directory.path)
        except ConfigError as error:  # on all ranks
            _refuse(world, error)
        if world.rank == 0:
            log.notice(f"run directory {directory.path}")
            print(world.describe(), trainer.replica.describe(), sep="\n\n", flush=True)
        try:
            trainer.fit()
        except (CheckpointError, ConfigError) as error:
            if not trainer.is_refused:
                raise
            _refuse(world, error)


def _refuse(world: World, error: HpcTrainError) -> NoReturn:
    """Collective: leave with exit code 2, with one message and no traceback."""
    if world.rank == 0:
        text = f"hpctrain train: {error}"
        if isinstance(error, CheckpointError):
            text += (
                "\nor: --fresh moves the old run aside, another logging.directory leaves it where "
                "it is"
            )
        print(text, file=sys.stderr, flush=True)
    raise AgreedExit(2)


def run_directory(config: Config, file: Path) -> RunDirectory:
    """Where a run goes: what the configuration says, or runs/ and the name of its file."""
    named = config.logging.directory
    return RunDirectory(Path(named) if named is not None else Path("runs") / file.stem)


def _prepare(world: World, directory: RunDirectory, *, resume: bool, fresh: bool) -> None:
    """Collective: move an old run aside, or check that there is one to resume."""
    trouble, aside = None, None
    if world.rank == 0:
        try:
            if fresh and is_held(directory.path):
                trouble = f"--fresh: another job is running in {directory.path}; wait for it to end"
            elif resume and not directory.has_checkpoints:
                trouble = f"--resume: {directory.path} has no checkpoint to resume from"
            aside = directory.put_aside() if fresh and trouble is None else None
            directory.make()
        except (ConfigError, OSError) as error:
            trouble = str(error)
    agree(world.comm, trouble, error=ConfigError)
    if aside is not None:
        log.notice(f"the earlier run in {directory.path} was moved to {aside}")


def make_trainer(world: World, config: Config, folder: Path, directory: Path | None) -> Trainer:
    """Collective: build everything a configuration names; all arguments must match.

    Args:
        world: The ranks.
        config: What to train, and how.
        folder: What relative files are relative to.
        directory: The run directory; None keeps nothing.
    """
    timer = time_steps(world) if _times_steps(world, config) else None
    grid = _make_grid(world, config)
    replicas = _distribute(world, config, grid, _together(world, lambda: build_models(config)))
    data = _together(world, lambda: build_data(config, world, folder))
    draw = _together(world, lambda: build_draw(config, data, folder))
    loader = _loader(world, config, data, draw, grid)
    held_out = _together(world, lambda: build_data(config, world, folder, evaluation=True))
    train = config.train
    if directory is not None and _saves(world, config):
        checkpoints = RunDirectory(directory).checkpoints
        _together(world, lambda: _refuse_changes(world, config, loader, checkpoints))
    named = _together(world, lambda: find_functions(config))
    refuse_no_batch(count_batches(loader))  # the same on every rank
    num_steps = _count_steps(config, loader)
    schedules = _together(
        world,
        lambda: {
            name: schedule
            for name, replica in replicas.items()
            if (schedule := build_schedule(config, replica.optimizer, num_steps)) is not None
        },
    )
    by_epoch = config.schedule.when == "epoch"
    return Trainer(
        world,
        replicas,
        loader,
        **named,
        evaluation=None if held_out is None else _evaluation_loader(world, config, held_out, grid),
        epochs=train.num_epochs,
        steps=train.steps,
        schedules={} if by_epoch else schedules,
        epoch_schedules=schedules if by_epoch else {},
        schedule_metric=config.schedule.metric and config.schedule.metric.partition(":")[2],
        ema=_averages(config, replicas),
        evaluate_ema=config.ema.evaluate,
        evaluate_every_epochs=train.evaluate_every_epochs,
        evaluate_every_steps=train.evaluate_every_steps,
        monitor=Monitor(train.monitor, patience=train.patience, min_delta=train.min_delta),
        directory=directory,
        checkpoint=config.checkpoint if _saves(world, config) and directory else None,
        faults=config.faults,
        logging=config.logging,
        timer=timer,
        config=to_toml(config),
        grid=grid,
    )


def _refuse_changes(world: World, config: Config, loader: Loader, checkpoints: Path) -> None:
    """Rank 0's part: what the newest checkpoint would not let take effect is refused."""
    found = saved_config(checkpoints) if world.rank == 0 else None
    if found is None:
        return
    path, saved = found
    changes = describe_changes(
        saved,
        config,
        saved_end=falls_until(saved, _count_steps(saved, loader)),
        end=falls_until(config, _count_steps(config, loader)),
    )
    if changes:
        listed = "\n  ".join(changes)
        raise ConfigError(
            f"{path} was saved with another configuration, and when resuming from it these "
            f"changes cannot take effect:\n  {listed}\nrevert them, or start a new run: --fresh "
            "moves the "
            "old run aside, another logging.directory leaves it where it is"
        )


def _together(world: World, make: Any) -> Any:
    """Collective: what this rank makes; an error on one rank is raised on all."""
    made, trouble = None, None
    try:
        made = make()
    except HpcTrainError as error:
        trouble = str(error)
    agree(world.comm, trouble, error=ConfigError)
    return made


def _saves(world: World, config: Config) -> bool:
    """Whether checkpoints are kept; not by a launch of a sweep, which trains a few steps."""
    return config.checkpoint.enabled and not world.bench.is_active


def _times_steps(world: World, config: Config) -> bool:
    chosen = config.logging.timing
    return world.device.type == "cpu" if chosen is None else chosen


def _make_grid(world: World, config: Config) -> Grid | None:
    """Collective: the grid, where a configuration wants one."""
    chosen = config.grid
    if not chosen.is_used:
        return None
    return Grid(
        world,
        data=chosen.data,
        pipeline=chosen.pipeline,
        tensor=chosen.tensor,
        engine=config.engine.name,
        timeout_s=config.engine.timeout_s,
    )


def _divide(grid: Grid, config: Config, model: torch.nn.Module) -> torch.nn.Module:
    """Collective: a model, divided as a configuration says."""
    chosen = config.grid
    stages = (list(chosen.stages) or "auto") if chosen.pipeline > 1 else None
    return split(
        grid,
        model,
        shard=chosen.shard,
        units=list(chosen.units) or None,
        whole_gradients=chosen.whole_gradients,
        stages=stages,
        tensor=chosen.layers or None,
    )


def _distribute(
    world: World, config: Config, grid: Grid | None, models: dict[str, Any]
) -> dict[str, Replica]:
    """Collective: all models on all ranks, over one engine."""
    chosen = config.engine
    if grid is None:
        connection = connect(world, chosen.name, timeout_s=chosen.timeout_s)
        engine, reason = connection.engine, connection.reason
    else:
        engine, reason = grid.engine("data"), "of the grid"
        if len(models) > 1:
            raise ConfigError(
                f"model.build returned {len(models)} models, and [grid] divides one; leave it out"
            )
    precision = config.precision
    scaling = None
    if precision.kind == "fp16":
        scaling = LossScaling(
            init_scale=precision.init_scale,
            growth_interval=precision.growth_interval,
            max_skips=precision.max_skips,
        )
    # Outside a sweep never; inside one for the baseline of one process with all cores.
    prefers_fused = world.bench.value("fused", False)
    replicas: dict[str, Replica] = {}
    for name, model in models.items():
        model.to(world.device)
        if config.model.sync_batchnorm:
            sync_batchnorm(engine, model)
        if config.model.compile:
            compile_model(
                model, mode=config.model.compile_mode, backend=config.model.compile_backend
            )
        if grid is not None:
            model = _divide(grid, config, model)
        optimizer = _together(
            world,
            lambda model=model: build_optimizer(config, model, prefers_fused=prefers_fused),
        )
        replicas[name] = distribute(
            world,
            model,
            optimizer,
            engine=engine if grid is None else "auto",
            accumulate=config.train.accumulate,
            overlap=chosen.overlap,
            bucket_bytes=chosen.bucket_bytes,
            update=chosen.update,
            share_parameters=chosen.share_parameters,
            wire=chosen.wire,
            timeout_s=chosen.timeout_s,
            precision=precision.kind,
            scaling=scaling,
            clip_norm=config.optimizer.clip_norm,
            clip_value=config.optimizer.clip_value,
            averages_statistics=config.evaluates,  # before every evaluation
            grid=grid,
            micro_batches=config.grid.micro_batches,
            schedule=config.grid.schedule,
        )
        replicas[name].reason = reason
    return replicas


def _averages(config: Config, replicas: dict[str, Replica]) -> dict[str, EMA]:
    """Collective: an average of each replica's weights, held once a node where memory is shared."""
    chosen = config.ema
    if chosen.decay is None:
        return {}
    return {
        name: EMA.once_a_node(
            replica.engine, replica.model, decay=chosen.decay, warm_up=chosen.warm_up
        )
        for name, replica in replicas.items()
    }


def _loader(
    world: World, config: Config, data: Any, draw: dict[str, Any], grid: Grid | None
) -> Loader:
    chosen = config.data
    return Loader(
        world,
        data,
        global_batch=config.train.global_batch // config.train.accumulate,
        shuffle=chosen.shuffle,
        drop_last=chosen.drop_last,
        even_last=chosen.even_last,
        num_workers=chosen.num_workers or None,
        prefetch=chosen.prefetch,
        split=chosen.split,
        grid=grid,
        **draw,
    )


def _evaluation_loader(world: World, config: Config, data: Any, grid: Grid | None) -> Loader:
    batch = config.train.evaluation_batch or config.train.global_batch
    how = config.data.split if is_stream(data) else None
    return Loader(world, data, global_batch=batch, shuffle=False, split=how, grid=grid)


def _count_steps(config: Config, loader: Loader) -> int | None:
    """Steps of the whole training; None for epochs of a stream."""
    train = config.train
    if train.steps is not None:
        return train.steps
    batches = count_batches(loader)
    if batches is None:
        return None
    return -(-batches // train.accumulate) * (train.num_epochs or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
