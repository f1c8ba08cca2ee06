"""`distribute`: check what was given, choose how the replica works, build it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from hpctrain import log
from hpctrain.connection import Connection, connect
from hpctrain.engines import AUTO, BetweenNodes, Engine
from hpctrain.errors import CollectiveError
from hpctrain.fusion import is_dense
from hpctrain.optim import combine, members_of, spans_of
from hpctrain.pipeline import StageModel
from hpctrain.precision import LossScaling, Precision, PrecisionName
from hpctrain.replica.arguments import (
    DistributeArguments,
    agree_on_arguments,
    check_trained,
    check_world,
    choose_precision,
)
from hpctrain.replica.checks import own_statistics
from hpctrain.replica.equal_ranks import Company, make_equal, make_equal_state
from hpctrain.replica.horovod_settings import HorovodTraining
from hpctrain.replica.modes import AloneMode, ArenaMode, HorovodMode, Mode, NodeMode
from hpctrain.replica.naming import named_parameters
from hpctrain.replica.on_grid import (
    DataCompany,
    build_partners,
    build_sharded,
    build_sliced,
    build_stage,
    build_stages,
    find_grid_mistake,
)
from hpctrain.replica.plain_loops import has_replica
from hpctrain.replica.policy import (
    Choice,
    OptimizerFacts,
    Options,
    ReplicaFacts,
    choose,
    may_share_memory,
)
from hpctrain.replica.replica import Replica
from hpctrain.replica.sweep import SweepTimer
from hpctrain.replica.wire_state import WireUse, describe_wire
from hpctrain.sharding import divides_state, sharding_of
from hpctrain.sweep_request import sweep_of
from hpctrain.tensor_parallel import division_of
from hpctrain.update import ShardedUpdate, shards_by
from hpctrain.wire import make_wire
from hpctrain.world import World, keep_freed_memory, takes_timeout

if TYPE_CHECKING:
    from hpctrain.grid import Grid
    from hpctrain.sharding import Sharding

__all__ = ["distribute", "gather_facts", "optimizer_facts"]


@takes_timeout
def distribute(
    world: World,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    engine: str | Engine = "auto",
    accumulate: int = 1,
    overlap: bool | None = None,
    bucket_bytes: int | None = None,
    update: str = "auto",
    share_parameters: bool = False,
    wire: str = "none",
    timeout_s: float = 600.0,
    horovod: HorovodTraining | None = None,
    precision: PrecisionName = "fp32",
    scaling: LossScaling | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    nonfinite: str = "stop",
    averages_statistics: bool = False,
    grid: Grid | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
) -> Replica:
    """Collective: train a model on all ranks as one; every rank passes the same arguments.

    Weights, buffers and optimizer state become rank 0's and are checked equal; from here on the
    global generators draw each rank's own random numbers (see `hpctrain.world.seeding`).

    Args:
        world: The ranks.
        model: Built the same on every rank, on `world.device`.
        optimizer: Over the parameters to train; it stays the user's own. A list where some
            parameters need another one (Muon for matrices, AdamW for the rest): all of them step
            together, and `replica.optimizer` stands for them.
        engine: `auto`, a name (`local`, `mpi`, `horovod`, `torch`), or an engine to share.
        accumulate: Backward calls that make one step.
        overlap: Whether buckets are sent while backward still runs; None: if there is something to
            hide: see `hpctrain.replica.policy`.
        bucket_bytes: When to close a bucket; None: an eighth of the gradients, 4 to 25 MiB,
            with overlap, and everything at once without.
        update: `sharded`: each rank of a node updates its share of the weights, and a node holds
            the optimizer's state once; `replicated`: every rank updates everything; `auto`: sharded
            where it pays. See `hpctrain.replica.policy`.
        share_parameters: Hold the weights once a node as well, with a sharded update: for models
            that need the memory. Code that writes to weights on every rank works as before.
        wire: How gradients are sent between nodes: `none` (as they are), `bf16` or `fp16`: half the
            bytes of float32, added up in float32. Inside a node they are always exact.
        timeout_s: How long a collective may wait for a rank before the job ends and names it.
        horovod: How to use Horovod, on its engine: who fuses gradients, groups, compression,
            Adasum, and its switches.
        precision: `fp32` (torch's own settings), `tf32`, `bf16` or `fp16` (autocast in `replica(x)`
            with float32 weights), or `bf16-pure` (weights too, with float32 masters).
        scaling: Options of the loss scale of `fp16`.
        clip_norm: Limit of the norm of all gradients together, over all ranks.
        clip_value: Limit of the size of each element of the gradients. A parameter group with
            `clip=False` is left out of both.
        nonfinite: `stop`: a loss that is inf or NaN ends the training on all ranks before the sum
            spreads it, with the rank and the step; `ignore`: continue as torch does. `fp16` has its
            own rule: such steps are skipped.
        averages_statistics: Whether the caller averages the running statistics of BatchNorm itself
            before they are used (`average_batchnorm`), and need not be told to.
        grid: The grid that the model was divided on by `split`; its engine is used.
        micro_batches: Into how many parts a batch is cut, where the model is in stages.
        schedule: In which order stages run them: `1f1b`, which holds the activations of at most as
            many micro-batches as there are stages, or `gpipe`, which holds all; None: `1f1b`.

    Raises:
        ConfigError: an argument is wrong, the optimizer cannot be distributed, or the model differs
            between ranks.
    """
    check_world(world)
    trained = combine(optimizer)
    given = DistributeArguments(
        accumulate=accumulate,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        update=update,
        share_parameters=share_parameters,
        wire=wire,
        timeout_s=timeout_s,
        horovod=horovod,
        precision=precision,
        scaling=scaling,
        clip_norm=clip_norm,
        clip_value=clip_value,
        nonfinite=nonfinite,
        averages_statistics=averages_statistics,
        grid=grid,
        micro_batches=micro_batches,
        schedule=schedule,
        shard_state=isinstance(model, torch.nn.Module) and divides_state(model),
    )
    sweep = sweep_of(world)
    if sweep is not None and sweep.asked.engine is not None and engine == AUTO and grid is None:
        engine = sweep.asked.engine

    def find_more(one: torch.optim.Optimizer) -> str | None:
        return _find_owner(one) or find_grid_mistake(model, one, engine, given)

    engine = agree_on_arguments(world, model, trained, engine, given, find_more=find_more)
    if grid is not None:
        connection = Connection(engine=grid.engine("data"), reason="of the grid")
        return _build(world, model, trained, connection, given, release=_keep)
    if isinstance(engine, str):
        options = horovod.options if horovod is not None else None
        connection = connect(world, engine, timeout_s=timeout_s, options=options)
        return _build(world, model, trained, connection, given, release=connection.close)
    connection = Connection(engine=engine, reason="given")
    return _build(world, model, trained, connection, given, release=_keep)


def _find_owner(optimizer: torch.optim.Optimizer) -> str | None:
    """Whose an optimizer is: two replicas would both exchange, and both divide its update."""
    for member in members_of(optimizer):
        if has_replica(member):
            return (
                f"distribute: this {type(member).__name__} belongs to a replica already, which an "
                "earlier distribute() made; keep using that replica, or call its close() before "
                "you distribute again. To train several models, give each an optimizer of its own"
            )
    return None


def _keep() -> None:
    """Leave an engine that the caller gave as it is."""


def _build(
    world: World,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    connection: Connection,
    given: DistributeArguments,
    *,
    release: Callable[[], None],
) -> Replica:
    """Collective: the replica, over an engine that is there."""
    engine = connection.engine
    numerics = choose_precision(
        world,
        engine,
        model,
        optimizer,
        precision=given.precision,
        scaling=given.scaling,
        clip_norm=given.clip_norm,
        clip_value=given.clip_value,
    )
    if world.device.type == "cpu":
        keep_freed_memory()
    lay_out = _Layout(world, engine, model, optimizer, given, numerics)
    mode = lay_out(True)
    make_equal_state(lay_out.company, engine, model, optimizer)
    world.streams.bind_own()
    if world.rank == 0:
        _tell(model, mode, engine.size, averages_statistics=given.averages_statistics)
    replica = Replica(
        world,
        model,
        optimizer,
        engine,
        mode,
        accumulate=given.accumulate,
        precision=numerics,
        reason=connection.reason,
        rebuild=lay_out,
        release=release,
        stops_at_nonfinite=given.nonfinite == "stop",
    )
    replica.averages_statistics = given.averages_statistics
    _end_with(world, replica)
    sweep = sweep_of(world)
    if sweep is not None and sweep.take_replica():
        SweepTimer(replica, sweep)
    return replica


def _tell(model: torch.nn.Module, mode: Mode, size: int, *, averages_statistics: bool) -> None:
    """Say what of a model may surprise."""
    if not averages_statistics:
        for what, text in own_statistics(model, size):
            log.notice(f"{what}: {text}")
    if not any(p.requires_grad for p in mode.parameters):
        log.notice(
            "every parameter of the optimizer is frozen (requires_grad=False), so nothing trains "
            "until some are unfrozen, on every rank alike"
        )


@dataclass(frozen=True)
class _Layout:
    """How a mode is made for a model as it is now, at the start and when its parameters change."""

    world: World
    engine: Engine
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    given: DistributeArguments
    numerics: Precision

    @property
    def company(self) -> Company:
        """The ranks that hold the same: all, or those along the data dimension."""
        grid = self.given.grid
        is_divided = isinstance(self.model, StageModel) or division_of(self.model) is not None
        if grid is not None and is_divided:
            return DataCompany(grid.comm("data"))
        return self.world

    def __call__(self, broadcast: bool) -> Mode:
        """Collective: make weights equal (or check that they are), choose a mode and build it."""
        given = self.given
        sharding = sharding_of(self.model)
        if sharding is not None:
            sharding.reshard()  # parameters have their names while they are shards
        check_trained(
            self.model, self.optimizer, precision=given.precision, clip_value=given.clip_value
        )
        if sharding is None:
            with self.numerics.full():
                make_equal(
                    self.company, self.engine, self.model, self.optimizer, broadcast=broadcast
                )
            self.numerics.adopt()
        names, parameters = named_parameters(self.model, self.optimizer)
        mode = self._choose(sharding, names, parameters)
        division = division_of(self.model)
        if given.grid is not None and division is not None:
            mode.share(build_partners(given.grid, self.model, division, self.optimizer, parameters))
        if given.grid is not None and isinstance(self.model, StageModel):
            stages = build_stages(
                given.grid, self.model, given, self.numerics, self.optimizer, parameters
            )
            mode.carry(stages)
        return mode

    def _choose(
        self,
        sharding: Sharding | None,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
    ) -> Mode:
        """Collective: how gradients are summed over the ranks that hold the same of the model."""
        given = self.given
        if sharding is not None and given.grid is not None:
            comm = given.grid.comm("data")
            return build_sharded(self.engine, sharding, self.optimizer, names, parameters, comm)
        if isinstance(self.model, StageModel):
            return build_stage(self.engine, self.model, names, parameters)
        if division_of(self.model) is not None:
            own = ArenaMode(self.engine, names, parameters, bucket_bytes=None, overlap=False)
            own.chosen = "arena: split() has divided layers, and each rank sums its parts"
            return own
        facts = gather_facts(
            self.world,
            self.engine,
            self.optimizer,
            names,
            parameters,
            options=given.options,
            has_masters=given.precision == "bf16-pure",
        )
        choice = choose(facts, given.options)
        mode = self._build(choice, names, parameters)
        mode.chosen = f"{choice.mode}: {choice.why}"
        mode.wire_chosen = describe_wire(choice.wire, given.wire, facts.num_nodes)
        return mode

    def _build(
        self, choice: Choice, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]
    ) -> Mode:
        horovod = self.given.horovod
        if choice.mode == "horovod" and horovod is not None:
            return HorovodMode(
                self.engine, names, parameters, settings=horovod, overlap=choice.overlap
            )
        if choice.mode == "node":
            return self._build_node(choice, names, parameters)
        if choice.mode == "alone":
            return AloneMode(names, parameters)
        if choice.mode == "slices":
            size = choice.bucket_bytes
            return build_sliced(self.engine, self.optimizer, names, parameters, bucket_bytes=size)
        wire, nodes = make_wire(choice.wire), self._nodes()
        mode = ArenaMode(
            self.engine,
            names,
            parameters,
            bucket_bytes=choice.bucket_bytes,
            overlap=choice.overlap,
            between=None if wire is None else BetweenNodes(self.engine, nodes, wire),
        )
        if wire is not None:
            size = choice.bucket_bytes
            mode.wire = WireUse(wire, nodes, f"{self.engine.name} with bucket_bytes={size}")
        return mode

    def _nodes(self) -> list[int]:
        """The node of each of the engine's ranks."""
        return [self.world.ranks[rank].node_rank for rank in self.engine.members]

    def _build_node(
        self, choice: Choice, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]
    ) -> NodeMode:
        """Collective: sums in shared memory, and the updates divided that are so chosen."""
        group = self.engine.node_group()
        wire = make_wire(choice.wire)
        mode = NodeMode(self.engine, group, names, parameters, wire=wire)
        if wire is not None:
            shared = f"memory shared by {group.local_sizes} ranks"
            mode.wire = WireUse(wire, self._nodes(), f"{self.engine.name} with {shared}")
        for (member, span), one in zip(spans_of(self.optimizer), choice.update, strict=True):
            if one.by is not None:
                mode.updates.append(
                    ShardedUpdate(
                        self.engine,
                        group,
                        member,
                        names[span],
                        parameters[span],
                        mode.views[span],
                        by=one.by,
                        share_weights=self.given.share_parameters,
                    )
                )
        mode.why_update = "; ".join(one.why for one in choice.update)
        return mode


_replicas: weakref.WeakKeyDictionary[World, list[weakref.ref[Replica]]] = (
    weakref.WeakKeyDictionary()
)


def _end_with(world: World, replica: Replica) -> None:
    """At the world's end: training with a replica that is still there would train a part of it."""
    _replicas.setdefault(world, []).append(weakref.ref(replica))
    world.at_exit(partial(_end_all, world))  # before the connection of any of them is closed


def _end_all(world: World) -> None:
    """Collective: see that all ranks have made the same steps, and let all models go.

    The first of a world's calls does so for all of its replicas.

    Raises:
        CollectiveError: on all ranks; after the last exchange nothing else would have told.
    """
    if world not in _replicas:
        return
    held = {n: r for n, one in enumerate(_replicas.pop(world)) if (r := one()) is not None}
    told = {number: replica.num_calls for number, replica in held.items() if replica.is_in_use}
    everyone: list[dict[int, tuple[int, int]]] = world.comm.allgather(told)
    for replica in held.values():
        if world.rank == 0 and replica.is_in_use and replica.num_calls == (0, 0):
            log.notice(
                f"no step was made with the replica of {type(replica.model).__name__}; if this "
                "script has trained, it used a model or an optimizer that was made after "
                "distribute()"
            )
        replica.let_go()
    # A replica that is garbage may be gone on some ranks and not on others.
    for number in set.intersection(*(set(one) for one in everyone)):
        calls = [one[number] for one in everyone]
        apart = [rank for rank, mine in enumerate(calls) if mine != calls[0]]
        if apart:
            raise CollectiveError(
                f"{log.name_ranks(apart)} ended with {calls[apart[0]][0]} exchanges and "
                f"{calls[apart[0]][1]} updates of the weights, and rank 0 with {calls[0][0]} and "
                f"{calls[0][1]}: their weights differ; make every rank call backward and step "
                "equally often"
            )


def gather_facts(
    world: World,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    *,
    options: Options,
    has_masters: bool,
) -> ReplicaFacts:
    """Collective at an engine's first call: the facts, the same on every rank.

    Which ranks share memory is looked up only where it matters: finding out makes communicators.

    Args:
        world: The ranks.
        engine: What connects them.
        optimizer: The user's, or several as one.
        names: Of its parameters.
        parameters: Themselves.
        options: What was asked for.
        has_masters: Whether weights have float32 masters.
    """
    matters = may_share_memory(engine.capabilities, engine.device.type, engine.size, options)
    return ReplicaFacts(
        num_ranks=engine.size,
        num_nodes=world.num_nodes,
        sharing_ranks=max(engine.node_group().local_sizes) if matters else 1,
        device_type=engine.device.type,
        engine=engine.capabilities,
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters),
        optimizers=tuple(
            optimizer_facts(member, names[span], parameters[span])
            for member, span in spans_of(optimizer)
        ),
        has_masters=has_masters,
        has_spare_cores=world.num_spare_cores > 0,
    )


def optimizer_facts(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
) -> OptimizerFacts:
    """What matters of an optimizer and its parameters. Pure.

    Raises:
        ConfigError: its class says what is unknown of how it may be divided.
    """
    by, why = shards_by(optimizer)
    scattered = (name for name, p in zip(names, parameters, strict=True) if not is_dense(p))
    return OptimizerFacts(
        shards_by=by,
        why=why,
        keeps_state=_keeps_state(optimizer),
        scattered=next(scattered, None),
    )


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is something to hold once a node; plain SGD has nothing."""
    plain = type(optimizer) is torch.optim.SGD
    return not plain or any(group.get("momentum", 0) for group in optimizer.param_groups)
