"""The default process group of torch.distributed, from a world's communicator.

torch makes further groups (`new_group`, DeviceMesh) by name from a function that knows nothing of
MPI, so what they are made of is kept here, once for a process, as torch keeps its default group.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch.distributed import distributed_c10d

from hpctrain import faults
from hpctrain.engines import open_store
from hpctrain.errors import ConfigError
from hpctrain.torch_backend.process_group import MpiProcessGroup
from hpctrain.world import World, agree

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from hpctrain.faults import Watchdog

__all__ = ["BACKEND", "DefaultGroup", "choose_backend", "open_default_group"]

BACKEND = "hpctrain"
"""What torch calls process groups over MPI."""

_c10d: Any = distributed_c10d
_GROUP_TAGS = 2**14


def choose_backend(devices: Sequence[tuple[str, str, str]]) -> tuple[str, str]:
    """Which backend carries the process groups of a job, and why. Pure.

    Args:
        devices: Of every rank: its host, the kind of its device as torch names it, and the
            device's id ("" where it has none).

    Raises:
        ConfigError: no backend serves these devices.
    """
    kinds = {kind for _, kind, _ in devices}
    if not kinds <= {"cpu", "cuda"}:
        names = ", ".join(sorted(kinds - {"cpu", "cuda"}))
        raise ConfigError(f"process groups serve cpu and cuda, and ranks compute on {names}")
    if kinds != {"cuda"}:
        return BACKEND, "the ranks compute on CPUs"
    own = {(host, uuid) for host, _, uuid in devices}
    if len(own) < len(devices) or any(not uuid for _, _, uuid in devices):
        return BACKEND, "ranks share a GPU, which NCCL refuses"
    return "nccl", "every rank has a GPU of its own"


@dataclass(kw_only=True, eq=False)
class _Home:
    """What the process groups of this process are made of."""

    world: World
    comm: Intracomm
    watchdog: Watchdog
    store: Any
    backend: str
    reason: str
    timeout_s: float
    default: Any = None
    groups: list[MpiProcessGroup] = field(default_factory=list)
    num_users: int = 0
    ended: bool = False


_home: _Home | None = None


class DefaultGroup:
    """Torch's default process group, while somebody needs it. Made by `open_default_group`."""

    def __init__(self, home: _Home) -> None:
        self._home: _Home | None = home
        self.backend = home.backend
        """`hpctrain` or `nccl`."""
        self.reason = home.reason
        """Why this backend."""

    def close(self) -> None:
        """Collective: the last of those who opened the group ends it; may be called again."""
        home, self._home = self._home, None
        if home is None:
            return
        home.num_users -= 1
        if home.num_users == 0:
            _end(home)


def open_default_group(world: World, *, timeout_s: float = 600.0) -> DefaultGroup:
    """Collective: make torch's default process group of a world's ranks, or share the one open.

    No environment variable is read: under mpirun, srun and `hpctrain run` alike. The group lives
    until it is closed, or as long as the world.

    Args:
        world: The ranks.
        timeout_s: How long a collective may wait for a rank before the job ends and names it.

    Raises:
        ConfigError: on all ranks; the script has a default process group already, or no backend
            serves the ranks' devices.
    """
    global _home
    if _home is not None and not _is_ours(_home):  # torch has forgotten it: destroy_process_group
        _end(_home)
    trouble, backend, why = None, BACKEND, ""
    try:
        backend, why = _choose_here(world)
    except ConfigError as error:
        trouble = str(error)
    agree(world.comm, trouble or _why_not(world), error=ConfigError, timeout_s=timeout_s)
    if _home is None:
        _home = _open(world, backend, why, timeout_s)
    _home.num_users += 1
    made = DefaultGroup(_home)
    world.at_exit(made.close)
    return made


def _choose_here(world: World) -> tuple[str, str]:
    return choose_backend(
        [(info.host, info.device.kind, info.device.uuid or "") for info in world.ranks]
    )


def _is_ours(home: _Home) -> bool:
    return _c10d.is_initialized() and _c10d._get_default_group() is home.default


def _why_not(world: World) -> str | None:
    if _home is not None:
        if _home.world is world:
            return None
        return "another world of this process has the default process group; close its grids first"
    if _c10d.is_initialized():
        return (
            f"the script has made a default process group itself ({_c10d.get_backend()}); leave "
            "that to hpctrain, or call torch.distributed.destroy_process_group() first"
        )
    return None


def _open(world: World, backend: str, why: str, timeout_s: float) -> _Home:
    """Collective."""
    global _home
    # A library's own limit must not come first: it knows nobody's name.
    patience_s = 2 * timeout_s + 60.0
    comm = MPI.Intracomm(world.comm.Dup())
    watchdog = faults.start(world, timeout_s=timeout_s)
    point = open_store(world.comm, timeout_s=patience_s)
    home = _Home(
        world=world,
        comm=comm,
        watchdog=watchdog,
        store=point.store,
        backend=backend,
        reason=why,
        timeout_s=timeout_s,
    )
    _register()
    if world.device.type == "cuda":
        # Or a DeviceMesh would choose a device by itself.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    _home = home  # the function below looks for it
    try:
        _c10d.init_process_group(
            backend,
            store=point.store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=patience_s),
        )
    except BaseException:
        _home = None
        raise
    home.default = _c10d._get_default_group()
    return home


def _end(home: _Home) -> None:
    """Collective: forget the groups and give their communicators back, in the order of making."""
    global _home
    if home.ended:  # the script destroyed the group, and another was opened since
        return
    home.ended = True
    if _is_ours(home):
        _c10d.destroy_process_group()
    _home = None
    for group in home.groups:
        group.close()
    home.comm.Barrier()  # rank 0 has the store, so it leaves last
    home.store = None
    home.watchdog.stop()
    home.comm.Free()


def _register() -> None:
    if BACKEND.upper() not in _c10d.Backend._plugins:
        _c10d.Backend.register_backend(
            BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"]
        )


def _make_group(options: Any, _: Any = None) -> MpiProcessGroup:
    """Collective over the ranks of the group: what torch calls to make one."""
    if _home is None:
        raise ConfigError(
            f"the backend {BACKEND!r} needs a world: use hpctrain.Grid(world), or "
            "hpctrain.torch_backend.open_default_group(world), not init_process_group"
        )
    home, name = _home, str(options.group_id)
    members = list(options.global_ranks_in_group) or list(range(home.world.size))
    calls = home.watchdog.among(members)
    calls.enter("making a process group of these ranks")
    try:
        comm = _communicator(home.comm, members, name)
        made = MpiProcessGroup(
            comm,
            name=name,
            members=members,
            device=home.world.device,
            watchdog=home.watchdog,
            timeout_s=home.timeout_s,
        )
    finally:
        calls.leave()
    home.groups.append(made)
    return made


def _communicator(comm: Intracomm, members: Sequence[int], name: str) -> Intracomm:
    """Collective over the members alone: their communicator, in their order."""
    everyone = comm.Get_group()
    group = everyone.Incl(members)
    try:
        return comm.Create_group(group, zlib.crc32(name.encode()) % _GROUP_TAGS)
    finally:
        group.Free()
        everyone.Free()
