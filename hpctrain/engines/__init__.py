"""Floor 2: engines, the collectives on torch tensors, four of them behind one interface."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from hpctrain import log
from hpctrain.engines.horovod_options import HorovodOptions
from hpctrain.engines.horovod_state import BUILD, HorovodState, probe_horovod
from hpctrain.engines.op import Op
from hpctrain.errors import ConfigError
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.engines.base import Engine
    from hpctrain.engines.meeting import Watchdog
    from hpctrain.world import World

__all__ = ["ENGINES", "Choice", "HorovodOptions", "HorovodState", "Op", "choose", "create"]

ENGINES = {
    "local": "hpctrain.engines.factories:make_local",
    "mpi": "hpctrain.engines.factories:make_mpi",
    "horovod": "hpctrain.engines.factories:make_horovod",
    "torch": "hpctrain.engines.factories:make_torch",
}
"""Where each engine is made: module and function, imported when it is needed."""

AUTO = "auto"
_UNKNOWN = HorovodState(built=False, why="nobody looked for Horovod")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An engine and why it was chosen."""

    name: str
    reason: str


def choose(
    name: str,
    *,
    device_kind: str,
    size: int,
    horovod: HorovodState = _UNKNOWN,
    shared_devices: bool = False,
) -> Choice:
    """Choose an engine. Pure.

    Args:
        name: An engine, or `auto`: one rank `local`; on CPUs `mpi`; on GPUs `horovod` if it was
            built with NCCL, else `torch`; where ranks share a GPU `mpi`, for NCCL refuses that.
        device_kind: What the ranks compute on, as torch names it.
        size: How many ranks there are.
        horovod: What is known of Horovod; needed for `horovod`, and for `auto` on GPUs.
        shared_devices: Whether several ranks compute on one GPU.

    Raises:
        ConfigError: the name is unknown, or that engine cannot work here; with the cure.
    """
    if name == AUTO:
        return _choose_freely(device_kind, size, horovod, shared_devices)
    if name not in ENGINES:
        valid = ", ".join((AUTO, *ENGINES))
        raise ConfigError(f"engine={name!r} is unknown; choose one of {valid}")
    on_gpu = device_kind != "cpu"
    if name == "local" and size > 1:
        raise ConfigError(
            f"engine='local' is for one rank, and there are {size}: each would train alone; "
            f"choose one of {', '.join(n for n in (AUTO, *ENGINES) if n != 'local')}"
        )
    if name == "horovod" and not horovod.built:
        raise ConfigError(f"engine='horovod': {horovod.why}; run `{BUILD}`, or use engine='auto'")
    if name == "horovod" and on_gpu and not horovod.nccl:
        raise ConfigError(
            f"engine='horovod': Horovod was built without NCCL, so it cannot serve {device_kind}; "
            f"run `{BUILD} --cuda`, or use engine='torch'"
        )
    if name in ("horovod", "torch") and on_gpu and shared_devices:
        raise ConfigError(
            f"engine={name!r}: ranks share a GPU, which NCCL refuses; give each rank its own, or "
            "use engine='mpi'"
        )
    return Choice(name=name, reason="asked for")


def _choose_freely(kind: str, size: int, horovod: HorovodState, shared_devices: bool) -> Choice:
    if size == 1:
        return Choice(name="local", reason="there is one rank")
    if kind == "cpu":
        return Choice(name="mpi", reason="the ranks compute on CPUs")
    if shared_devices:
        return Choice(name="mpi", reason="ranks share a GPU, which NCCL refuses")
    if kind == "cuda" and horovod.built and horovod.nccl:
        return Choice(name="horovod", reason="the ranks compute on GPUs, and it has NCCL")
    why = horovod.why or "Horovod was built without NCCL"
    return Choice(name="torch", reason=f"the ranks compute on GPUs, and {why}")


_START_S = 60.0
"""What starting an engine may take in any case: libraries connect all ranks in their own time."""


def create(
    world: World,
    name: str = AUTO,
    *,
    watch: Watchdog | None = None,
    options: HorovodOptions | None = None,
    timeout_s: float = 300.0,
) -> Engine:
    """Collective: make an engine over the ranks of a world; name and options must match.

    Args:
        world: From `hpctrain.init`.
        name: `auto` or one of `ENGINES`; see `choose`.
        watch: Who is told about every collective.
        options: How Horovod works inside; refused with another engine, unless `auto` chose it.
        timeout_s: How long to wait for ranks that do not come, and, on the `torch` engine, how
            long a collective may take.

    Raises:
        ConfigError: on all ranks, with the ranks that cannot have that engine.
    """
    choice, trouble = None, None
    if options is not None and name not in (AUTO, "horovod"):
        trouble = f"engine={name!r} takes no HorovodOptions; use engine='horovod', or give none"
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
    module, function = ENGINES[choice.name].split(":")
    make = getattr(import_module(module), function)
    with world.watching.announce(f"starting the engine {choice.name}", at_least_s=_START_S):
        made: Engine = make(world, watch=watch, options=options, timeout_s=timeout_s)
    made.reason = choice.reason
    return made


def _choose_here(world: World, name: str) -> Choice:
    """Choose by what this rank sees; Horovod is looked for only where it matters."""
    kind = world.device.type
    matters = name == "horovod" or (name == AUTO and kind == "cuda" and world.size > 1)
    users = [(info.host, info.device.uuid) for info in world.ranks if info.device.uuid]
    return choose(
        name,
        device_kind=kind,
        size=world.size,
        horovod=probe_horovod() if matters else _UNKNOWN,
        shared_devices=len(set(users)) < len(users),
    )
