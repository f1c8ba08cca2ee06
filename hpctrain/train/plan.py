"""A configuration resolved for a number of ranks: batches, steps, memory, engine; no training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain import log
from hpctrain.data import Batching, LoaderArguments, part_of, resolve_arguments
from hpctrain.engines import (
    UNKNOWN_HOROVOD,
    ChosenEngine,
    HorovodState,
    capabilities_of,
    needs_horovod_state,
    probe_horovod,
)
from hpctrain.engines import choose as choose_engine
from hpctrain.errors import ConfigError
from hpctrain.replica import Choice, Options, ReplicaFacts, choose, optimizer_facts
from hpctrain.train.building import (
    build_data,
    build_models,
    build_optimizer,
    find_function,
    find_functions,
    wants_world,
)
from hpctrain.train.config import Config
from hpctrain.train.memory import Memory

__all__ = ["Place", "Plan", "count_samples", "make_plan", "plan_ahead", "state_bytes_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where it would run."""

    num_ranks: int
    ranks_per_node: int
    """On the fullest node."""
    device_kind: str = "cpu"
    horovod: HorovodState = UNKNOWN_HOROVOD

    def __post_init__(self) -> None:
        """Refuse an impossible layout."""
        if not 1 <= self.ranks_per_node <= self.num_ranks:
            raise ConfigError(
                f"ranks_per_node={self.ranks_per_node} of num_ranks={self.num_ranks}; it must be "
                "at least 1 and no more than the ranks"
            )

    @property
    def num_nodes(self) -> int:
        """How many nodes that is at least."""
        return -(-self.num_ranks // self.ranks_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A configuration resolved for a place."""

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    num_samples: int | None
    """Of the training data; None for a stream of unknown length."""
    global_batch: int
    accumulate: int
    rank_batch: tuple[int, int]
    """The fewest and the most samples a rank computes at a time."""
    steps_per_epoch: int | None
    num_steps: int | None
    num_parameters: int
    num_trained: int
    memory: Memory
    engine: str
    engine_reason: str
    update: str
    update_reason: str
    precision: str

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def _more_than_there_is(self) -> str:
        """A remark on a batch that no epoch can fill, or nothing."""
        if self.num_samples is None or self.global_batch <= self.num_samples:
            return ""
        if self.steps_per_epoch == 0:
            return ", more than there are samples: data.drop_last leaves no step, lower it"
        return f", more than there are samples: each step has {self.num_samples:,}"

    def describe(self) -> str:
        """A table for people."""
        fewest, most = self.rank_batch
        parts = f" in {self.accumulate} parts" if self.accumulate > 1 else ""
        nodes = "one node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        rows = [
            ("ranks", f"{self.num_ranks} on {nodes}"),
            ("samples", _known(self.num_samples)),
            ("global batch", f"{self.global_batch:,}{parts}{self._more_than_there_is()}"),
            ("a rank's batch", f"{fewest}" if fewest == most else f"{fewest} to {most}"),
            ("steps an epoch", _known(self.steps_per_epoch)),
            ("steps in all", _known(self.num_steps)),
            ("parameters", f"{self.num_parameters:,}, {self.num_trained:,} of them trained"),
            ("weights", log.format_bytes(self.memory.weights)),
            ("gradients", log.format_bytes(self.memory.gradients)),
            ("optimizer state", log.format_bytes(self.memory.optimizer_state)),
            *(
                [("averages", log.format_bytes(self.memory.averages))]
                if self.memory.averages
                else []
            ),
            ("memory a rank", f"{log.format_bytes(self.memory.per_rank)} and activations"),
            ("memory a node", f"{log.format_bytes(self.memory.per_node)} and activations"),
            ("engine", f"{self.engine}: {self.engine_reason}"),
            ("update", f"{self.update}: {self.update_reason}"),
            ("precision", self.precision),
        ]
        return log.table(("plan", ""), rows)


def make_plan(
    config: Config,
    parts: Mapping[str, tuple[torch.nn.Module, torch.optim.Optimizer]],
    *,
    num_samples: int | None,
    state_bytes: int,
    place: Place,
) -> Plan:
    """Resolve a configuration for a place.

    Args:
        config: The configuration.
        parts: The models with their optimizers, by name; on any device, `meta` too.
        num_samples: Of the training data; None where it is unknown.
        state_bytes: What the optimizers hold for all weights (`hpctrain.train.plan`).
        place: Ranks, nodes and devices.

    Raises:
        ConfigError: the engine or the update is not possible as requested.
    """
    if config.grid.is_used:
        raise ConfigError(
            "a dry run does not plan [grid]; `hpctrain plan --memory` predicts memory and times of "
            "every grid"
        )
    engine = choose_engine(
        config.engine.name,
        device_kind=place.device_kind,
        size=place.num_ranks,
        horovod=place.horovod,
    )
    choice = _choose(config, parts, engine, place)
    update = choice.update[0]
    parameters = [p for model, _ in parts.values() for p in model.parameters()]
    trained = [p for p in parameters if p.requires_grad]
    train = config.train
    micro = train.global_batch // train.accumulate
    batching = Batching(
        global_batch=micro, drop_last=config.data.drop_last, even_last=config.data.even_last
    )
    per_epoch = None
    if num_samples is not None:
        per_epoch = -(-batching.count(num_samples) // train.accumulate)
    total = train.steps
    if train.num_epochs is not None:
        total = None if per_epoch is None else per_epoch * train.num_epochs
    sizes = [len(part_of(range(micro), place.num_ranks, r)) for r in (0, place.num_ranks - 1)]
    return Plan(
        num_ranks=place.num_ranks,
        num_nodes=place.num_nodes,
        ranks_per_node=place.ranks_per_node,
        num_samples=num_samples,
        global_batch=train.global_batch,
        accumulate=train.accumulate,
        rank_batch=(min(sizes), max(sizes)),
        steps_per_epoch=per_epoch,
        num_steps=total,
        num_parameters=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in trained),
        memory=_memory(config, parameters, trained, state_bytes, choice, place),
        engine=engine.name,
        engine_reason=engine.reason,
        update=str(update),
        update_reason=update.why,
        precision=config.precision.kind,
    )


def _choose(
    config: Config,
    parts: Mapping[str, tuple[torch.nn.Module, torch.optim.Optimizer]],
    engine: ChosenEngine,
    place: Place,
) -> Choice:
    """How the first part would be trained; the others have the same optimizer."""
    model, optimizer = next(iter(parts.values()))
    names, parameters = zip(*model.named_parameters(), strict=True)
    facts = ReplicaFacts(
        num_ranks=place.num_ranks,
        num_nodes=place.num_nodes,
        sharing_ranks=place.ranks_per_node,
        device_type=place.device_kind,
        engine=capabilities_of(engine.name),
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        optimizers=(optimizer_facts(optimizer, names, parameters),),
        has_masters=config.precision.kind == "bf16-pure",
    )
    asked = config.engine
    options = Options(
        overlap=asked.overlap,
        bucket_bytes=asked.bucket_bytes,
        update=asked.update,
        share_parameters=asked.share_parameters,
        wire=asked.wire,
    )
    return choose(facts, options)


def _memory(
    config: Config,
    parameters: list[torch.nn.Parameter],
    trained: list[torch.nn.Parameter],
    state_bytes: int,
    choice: Choice,
    place: Place,
) -> Memory:
    pure = config.precision.kind == "bf16-pure"
    width = [(p, 2 if pure and p.is_floating_point() else p.element_size()) for p in parameters]
    weights = sum(p.numel() * size for p, size in width)
    mine = {id(p) for p in trained}
    gradients = sum(p.numel() * size for p, size in width if id(p) in mine)
    masters = sum(p.numel() * 4 for p in trained) if pure else 0
    averages = 0
    if config.ema.decay is not None:
        averages = sum(p.numel() * max(4, size) for p, size in width)
    return Memory.estimate(
        weights=weights,
        gradients=gradients,
        optimizer_state=state_bytes + masters,
        averages=averages,
        ranks_per_node=place.ranks_per_node,
        shares_memory=choice.mode == "node",
        shards_update=choice.divides_update,
        share_parameters=config.engine.share_parameters,
    )


def _known(number: int | None) -> str:
    return "unknown: a stream" if number is None else f"{number:,}"


_SAMPLE = 64


def plan_ahead(config: Config, folder: Path, *, num_ranks: int, ranks_per_node: int) -> Plan:
    """Resolve a configuration for a stated number of ranks, from one process.

    Models are made without memory where their functions allow it. Data functions are called, since
    only they know how many samples there are; one that takes a world gets a world of one rank.

    Args:
        config: The configuration.
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
        ConfigError: this cannot be trained on.
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
