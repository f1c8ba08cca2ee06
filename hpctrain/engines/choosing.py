"""Which engine a job uses, and why; and how it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain import log
from hpctrain.engines.horovod_options import (
    BUILD,
    UNKNOWN_HOROVOD,
    HorovodOptions,
    HorovodState,
    probe_horovod,
)
from hpctrain.engines.registry import AUTO, capabilities_of, communicating_names, load_engine
from hpctrain.errors import ConfigError
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.engines.base import Engine, EngineWatchdog
    from hpctrain.world import World

__all__ = ["ChosenEngine", "choose", "create", "needs_horovod_state"]

_START_S = 60.0
"""Least time allowed for starting an engine: libraries take their time to connect all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenEngine:
    """An engine and why it was chosen."""

    name: str
    reason: str


def choose(
    name: str,
    *,
    device_kind: str,
    size: int,
    horovod: HorovodState = UNKNOWN_HOROVOD,
    shared_devices: bool = False,
) -> ChosenEngine:
    """Choose an engine. Pure.

    Args:
        name: An engine, or `auto`: one rank `local`; on CPUs `mpi`; on GPUs `horovod` if it was
            built with NCCL, else `torch`; where ranks share a GPU `mpi`, for NCCL refuses that.
        device_kind: What the ranks compute on, as torch names it.
        size: How many ranks there are.
        horovod: What is known of Horovod; needed where `needs_horovod_state` says so.
        shared_devices: Whether several ranks compute on one GPU.

    Raises:
        ConfigError: the name is unknown, or that engine cannot work here; with the cure.
    """
    if name == AUTO:
        return _choose_freely(device_kind, size, horovod, shared_devices)
    can = capabilities_of(name)
    if can.topology == "none" and size > 1:
        raise ConfigError(
            f"engine={name!r} is for one rank, and there are {size}: each would train alone; "
            f"choose one of {', '.join((AUTO, *communicating_names()))}"
        )
    if name == "horovod" and not horovod.built:
        raise ConfigError(f"engine='horovod': {horovod.why}; run `{BUILD}`, or use engine='auto'")
    on_gpu = device_kind != "cpu"
    if name == "horovod" and on_gpu and not horovod.nccl:
        raise ConfigError(
            f"engine='horovod': Horovod was built without NCCL, so it cannot serve {device_kind}; "
            f"run `{BUILD} --cuda`, or use engine='torch'"
        )
    if not can.serves(device_kind):
        raise ConfigError(
            f"engine={name!r} serves {', '.join(sorted(can.device_types))}, and the ranks compute "
            f"on {device_kind}; use engine='auto'"
        )
    if on_gpu and shared_devices and not can.shares_gpus:
        raise ConfigError(
            f"engine={name!r}: ranks share a GPU, which NCCL refuses; give each rank its own, or "
            "use engine='mpi'"
        )
    return ChosenEngine(name=name, reason="asked for")


def _choose_freely(
    kind: str, size: int, horovod: HorovodState, shared_devices: bool
) -> ChosenEngine:
    if size == 1:
        return ChosenEngine(name="local", reason="there is one rank")
    if kind == "cpu":
        return ChosenEngine(name="mpi", reason="the ranks compute on CPUs")
    if shared_devices:
        return ChosenEngine(name="mpi", reason="ranks share a GPU, which NCCL refuses")
    if kind == "cuda" and horovod.built and horovod.nccl:
        return ChosenEngine(name="horovod", reason="the ranks compute on GPUs, and it has NCCL")
    why = horovod.why or "Horovod was built without NCCL"
    return ChosenEngine(name="torch", reason=f"the ranks compute on GPUs, and {why}")


def needs_horovod_state(name: str, *, device_kind: str, size: int) -> bool:
    """Whether `choose` depends on the Horovod that is installed: looking for it imports it."""
    return name == "horovod" or (name == AUTO and device_kind == "cuda" and size > 1)


def create(
    world: World,
    name: str = AUTO,
    *,
    watch: EngineWatchdog | None = None,
    options: HorovodOptions | None = None,
    timeout_s: float = 300.0,
) -> Engine:
    """Collective: make an engine over the ranks of a world; name and options must match.

    Args:
        world: From `hpctrain.init`.
        name: `auto` or one of `engine_names()`; see `choose`.
        watch: Monitors every collective.
        options: How Horovod works inside; refused with another engine, unless `auto` chose it.
        timeout_s: How long to wait for missing ranks, and, on the `torch` engine, how
            long a collective may take.

    Raises:
        ConfigError: on all ranks, with the ranks that cannot have that engine.
    """
    choice, trouble = None, None
    if options is not None and name not in (AUTO, "horovod"):
        trouble = f"engine={name!r} takes no HorovodOptions; use engine='horovod', or omit them"
    else:
        try:
            choice = _choose_here(world, name)
        except ConfigError as error:
            trouble = str(error)
    agree(world.comm, trouble, error=ConfigError, timeout_s=timeout_s)
    wanted = world.comm.allgather((choice.name if choice else "", options))
    if choice is None or any(other != wanted[0] for other in wanted):
        odd = next(rank for rank, other in enumerate(wanted) if other != wanted[0])
        raise ConfigError(
            f"the ranks would use different engines: rank 0 {wanted[0]}, rank {odd} {wanted[odd]}; "
            "give all ranks the same name and options"
        )
    if name == AUTO and world.rank == 0:
        ignored = options is not None and choice.name != "horovod"
        rest = "; the Horovod options are not used" if ignored else ""
        log.notice(f"engine {choice.name}: {choice.reason}{rest}")
    kind = load_engine(choice.name)
    with world.watching.announce(f"starting the engine {choice.name}", at_least_s=_START_S):
        made = kind.make(world, watch=watch, options=options, timeout_s=timeout_s)
    made.reason = choice.reason
    return made


def _choose_here(world: World, name: str) -> ChosenEngine:
    """Choose by what this rank sees; Horovod is looked for only where it matters."""
    kind = world.device.type
    matters = needs_horovod_state(name, device_kind=kind, size=world.size)
    users = [(info.host, info.device.uuid) for info in world.ranks if info.device.uuid]
    return choose(
        name,
        device_kind=kind,
        size=world.size,
        horovod=probe_horovod() if matters else UNKNOWN_HOROVOD,
        shared_devices=len(set(users)) < len(users),
    )
