"""Floor 4: where engine, fusion and optimizer meet."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hpctrain import log
from hpctrain.connection import Connection, connect
from hpctrain.engines import Engine
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.optim import combine, members_of, spans_of
from hpctrain.precision import LossScaling, PrecisionName
from hpctrain.replica.arguments import (
    agree_on_arguments,
    check_world,
    describe_engine,
    describe_optimizer,
    find_trouble,
)
from hpctrain.replica.core import Replica, Step
from hpctrain.replica.hints import own_statistics
from hpctrain.replica.horovod_engine import choose_engine
from hpctrain.replica.horovod_settings import HorovodTraining
from hpctrain.replica.modes import AloneMode, ArenaMode, HorovodMode, Mode
from hpctrain.replica.naming import named_parameters
from hpctrain.replica.overlapping import bucket_size, can_hide
from hpctrain.replica.precision import check_trained, choose_precision
from hpctrain.replica.sharing_work import choose_update, make_node_mode, shares_memory
from hpctrain.replica.starting import make_equal, make_equal_state
from hpctrain.replica.sweep import SweepTimer
from hpctrain.sweep_request import sweep_of
from hpctrain.world import World, keep_freed_memory, takes_timeout

__all__ = ["HorovodTraining", "Replica", "Step", "distribute"]


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
    timeout_s: float = 600.0,
    horovod: HorovodTraining | None = None,
    precision: PrecisionName = "fp32",
    scaling: LossScaling | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    nonfinite: str = "stop",
    averages_statistics: bool = False,
) -> Replica:
    """Collective: train a model on all ranks as one; every rank passes the same arguments.

    Weights, buffers and optimizer state become rank 0's and are checked equal; from here on the
    global generators draw each rank's own random numbers (see `hpctrain.world.seeding`).

    Args:
        world: The ranks.
        model: Built alike on every rank, on `world.device`.
        optimizer: Over the parameters to train; it stays the user's own. A list where some
            parameters want another one (Muon for matrices, AdamW for the rest): all of them step
            together, and `replica.optimizer` stands for them.
        engine: `auto`, a name (`local`, `mpi`, `horovod`, `torch`), or an engine to share.
        accumulate: Backward calls that make one step.
        overlap: Whether buckets travel while backward still runs; None: where there is something to
            hide: see `hpctrain.replica.overlapping`.
        bucket_bytes: When to close a bucket; None: an eighth of the gradients, 4 to 25 MiB,
            with overlap, and everything at once without.
        update: `sharded`: each rank of a node updates its share of the weights, and a node holds
            the optimizer's state once; `replicated`: every rank updates everything; `auto`: sharded
            where it pays. See `hpctrain.replica.sharing_work`.
        share_parameters: Hold the weights once a node as well, with a sharded update: for models
            that need the memory. Code that writes to weights on every rank works as before.
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
            spreads it, with the rank and the step; `ignore`: go on as torch does. `fp16` has its
            own rule: such steps are skipped.
        averages_statistics: Whether the caller averages the running statistics of BatchNorm itself
            before they are used (`average_batchnorm`), and need not be told to.

    Raises:
        ConfigError: an argument is wrong, the optimizer cannot be distributed, or the model differs
            between ranks.
    """
    check_world(world)
    trained = combine(optimizer)
    sweep = sweep_of(world)
    asked = None if sweep is None else sweep.asked
    if asked is not None and asked.engine is not None and engine == "auto":
        engine = asked.engine
    must_match = {
        "accumulate": accumulate,
        "overlap": overlap,
        "bucket_bytes": bucket_bytes,
        "update": update,
        "share_parameters": share_parameters,
        "precision": precision,
        "scaling": scaling,
        "clip_norm": clip_norm,
        "clip_value": clip_value,
        "nonfinite": nonfinite,
        "timeout_s": timeout_s,
        "horovod": horovod,
        "engine": describe_engine(engine),
        "optimizer": describe_optimizer(trained),
    }
    trouble = find_trouble(
        model,
        trained,
        accumulate=accumulate,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        engine=engine,
        nonfinite=nonfinite,
    )
    if trouble is None:
        trouble = _belongs_already(trained)
    if trouble is None:
        try:
            engine = choose_engine(engine, horovod, bucket_bytes=bucket_bytes)
        except ConfigError as error:
            trouble = str(error)
    agree_on_arguments(world, trouble, must_match)
    options = horovod.options if horovod is not None else None
    connection = (
        connect(world, engine, timeout_s=timeout_s, options=options)
        if isinstance(engine, str)
        else Connection(engine=engine, reason="given")
    )
    given = not isinstance(engine, str)
    link = connection.engine
    by_horovod = horovod is not None and horovod.fusion == "horovod"

    def lay_out(broadcast: bool) -> Mode:
        check_trained(model, trained, precision=precision, clip_value=clip_value)
        with numerics.full():
            make_equal(world, link, model, trained, broadcast=broadcast)
        numerics.adopt()
        names, parameters = named_parameters(model, trained)
        total = sum(p.numel() * p.element_size() for p in parameters)
        hides = by_horovod and link.size > 1  # it sends while backward runs in any case
        overlapping = hides or can_hide(world, link, total) if overlap is None else overlap
        if horovod is not None and by_horovod:
            return HorovodMode(link, names, parameters, settings=horovod, overlap=overlapping)
        shared = shares_memory(world, link, overlap=overlap, bucket_bytes=bucket_bytes)
        chosen = [
            choose_update(
                member,
                names[span],
                parameters[span],
                update=update,
                shared=shared,
                masters=precision == "bf16-pure",
                alone=link.size == 1,
            )
            for member, span in spans_of(trained)
        ]
        whole = [one for one in chosen if one.by is None]
        if share_parameters and whole and link.size > 1:
            raise ConfigError(
                "share_parameters=True needs a sharded update, and it is replicated: "
                f"{whole[0].why}"
            )
        if shared:
            return make_node_mode(
                link, trained, names, parameters, chosen, share_parameters=share_parameters
            )
        if link.size == 1 and bucket_bytes is None and not overlap:
            return AloneMode(names, parameters)
        size = bucket_bytes
        if size is None and overlapping:
            size = bucket_size(total)
        return ArenaMode(link, names, parameters, bucket_bytes=size, overlap=overlapping)

    numerics = choose_precision(
        world,
        link,
        model,
        trained,
        precision=precision,
        scaling=scaling,
        clip_norm=clip_norm,
        clip_value=clip_value,
    )
    if world.device.type == "cpu":
        keep_freed_memory()
    mode = lay_out(True)
    make_equal_state(world, link, model, trained)
    world.streams.bind_own()
    if world.rank == 0 and not averages_statistics:
        for what, text in own_statistics(model, link.size):
            log.notice(f"{what}: {text}")
    replica = Replica(
        world,
        model,
        trained,
        link,
        mode,
        accumulate=accumulate,
        precision=numerics,
        reason=connection.reason,
        rebuild=lay_out,
        release=(lambda: None) if given else connection.close,
        stops_at_nonfinite=nonfinite == "stop",
    )
    replica.averages_statistics = averages_statistics
    _end_with(world, replica)
    if sweep is not None and sweep.take_replica():
        SweepTimer(replica, sweep)
    return replica


def _belongs_already(optimizer: torch.optim.Optimizer) -> str | None:
    """Whose an optimizer is: two replicas would both exchange, and both divide its update."""
    for member in members_of(optimizer):
        owners = (getattr(hook, "__self__", None) for hook in _step_hooks(member))
        if any(isinstance(owner, Replica) for owner in owners):
            return (
                f"distribute: this {type(member).__name__} belongs to a replica already, which an "
                "earlier distribute() made; go on with that replica, or call its close() before "
                "you distribute again. To train several models, give each an optimizer of its own"
            )
    return None


def _step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    hooks: Any = optimizer._optimizer_step_pre_hooks
    return list(hooks.values())


_replicas: weakref.WeakKeyDictionary[World, list[weakref.ref[Replica]]] = (
    weakref.WeakKeyDictionary()
)


def _end_with(world: World, replica: Replica) -> None:
    """At the world's end: training with a replica that is still there would train a part of it."""
    if world not in _replicas:
        _replicas[world] = []
        world.at_exit(lambda: _end_all(world))
    _replicas[world].append(weakref.ref(replica))


def _end_all(world: World) -> None:
    """Collective: see that all ranks have made the same steps, and let all models go.

    Raises:
        CollectiveError: on all ranks; after the last exchange nothing else would have told.
    """
    held = {n: r for n, one in enumerate(_replicas.pop(world, [])) if (r := one()) is not None}
    told = {number: replica.num_calls for number, replica in held.items() if replica.is_in_use}
    everyone: list[dict[int, tuple[int, int]]] = world.comm.allgather(told)
    for replica in held.values():
        replica.let_go()
    # A replica that is garbage may be gone on some ranks and not on others.
    for number in set.intersection(*(set(one) for one in everyone)):
        calls = [one[number] for one in everyone]
        apart = [rank for rank, mine in enumerate(calls) if mine != calls[0]]
        if apart:
            raise CollectiveError(
                f"rank {log.format_ranges(apart)} ends with {calls[apart[0]][0]} exchanges and "
                f"{calls[apart[0]][1]} updates of the weights, and rank 0 with {calls[0][0]} and "
                f"{calls[0][1]}: their weights differ; make every rank call backward and step "
                "equally often"
            )
