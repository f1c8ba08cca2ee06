"""What a plan must know of the user's model, optimizer and data: built once, without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from hpctrain import log
from hpctrain.data import LoaderArguments, resolve_arguments
from hpctrain.engines import UNKNOWN_HOROVOD, needs_horovod_state, probe_horovod
from hpctrain.errors import ConfigError
from hpctrain.train.building import (
    build_data,
    build_models,
    build_optimizer,
    find_functions,
    wants_world,
)
from hpctrain.train.config import Config
from hpctrain.train.plan import Place, Plan, make_plan
from hpctrain.train.references import find_function

__all__ = ["count_samples", "plan_ahead", "state_bytes_of"]

_SAMPLE = 64


def plan_ahead(config: Config, folder: Path, *, num_ranks: int, ranks_per_node: int) -> Plan:
    """Resolve a configuration for a stated number of ranks, from one process.

    Models are made without memory where their functions allow it. Data functions are called, since
    nobody else knows how many samples there are; one that wants a world gets a world of one rank.

    Args:
        config: What was asked for.
        folder: What relative files are relative to.
        num_ranks: How many ranks it would be.
        ranks_per_node: How many of them on each node.
    """
    find_functions(config)
    models = _models_without_memory(config)
    parts = {name: (model, build_optimizer(config, model)) for name, model in models.items()}
    kind = "cuda" if config.train.device != "cpu" and torch.cuda.is_available() else "cpu"
    name = config.engine.name
    asks_horovod = needs_horovod_state(name, device_kind=kind, size=num_ranks)
    place = Place(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        device_kind=kind,
        horovod=probe_horovod() if asks_horovod else UNKNOWN_HOROVOD,
    )
    return make_plan(
        config,
        parts,
        num_samples=_count_alone(config, folder),
        state_bytes=state_bytes_of(config, parts),
        place=place,
    )


def _models_without_memory(config: Config) -> dict[str, torch.nn.Module]:
    try:
        with torch.device("meta"):
            return build_models(config)
    except ConfigError:
        raise
    except Exception as error:
        log.notice(
            f"{config.model.build} cannot be built without memory ({type(error).__name__}); "
            "building it"
        )
        return build_models(config)


def state_bytes_of(
    config: Config, parts: Mapping[str, tuple[torch.nn.Module, torch.optim.Optimizer]]
) -> int:
    """What the optimizers will hold: measured on one small matrix, and carried over by elements."""
    trained = sum(
        p.numel() for model, _ in parts.values() for p in model.parameters() if p.requires_grad
    )
    probe = torch.nn.Linear(_SAMPLE, _SAMPLE, bias=False)
    optimizer = build_optimizer(config, probe)
    probe(torch.ones(1, _SAMPLE)).sum().backward()
    optimizer.step()
    held = [
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    ]
    return round(sum(held) / _SAMPLE**2 * trained)


def count_samples(data: object) -> int | None:
    """How many samples data have, whatever they are; None for a stream.

    Raises:
        ConfigError: they are no data.
    """
    given = LoaderArguments(
        global_batch=1,
        shuffle=None,
        drop_last=None,
        even_last=True,
        weights=None,
        prefetch=None,
        num_workers=None,
        start_method=None,
        collate=None,
    )
    setup = resolve_arguments(data, given, rank=0, num_ranks=1, has_spare=False)
    setup.feed.close()
    return setup.feed.num_samples


def _count_alone(config: Config, folder: Path) -> int | None:
    """Samples in an epoch."""
    if config.data.num_draws is not None:
        return config.data.num_draws
    needs_world = config.data.build is not None and wants_world(
        find_function(config.data.build, "data.build")
    )
    if not needs_world:
        return count_samples(build_data(config, None, folder))
    from hpctrain.connection import init

    with init(seed=config.train.seed, device="cpu", preflight="off") as alone:
        return count_samples(build_data(config, alone, folder))
