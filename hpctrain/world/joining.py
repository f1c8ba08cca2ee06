"""How a rank joins the job: MPI, launcher check, cores, device, handshake, random streams."""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import ExitStack
from numbers import Integral
from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError, HpcTrainError, LaunchError
from hpctrain.log import format_ranges
from hpctrain.mpi_version import identify
from hpctrain.world import cores, devices, guard, launcher
from hpctrain.world.agreement import agree, roll_call
from hpctrain.world.launcher import Launch
from hpctrain.world.library import load_mpi
from hpctrain.world.output import write_whole_lines
from hpctrain.world.preflight import MODES, digest_config, script_path
from hpctrain.world.preflight import preflight as compare_ranks
from hpctrain.world.seeding import Streams
from hpctrain.world.topology import Communicators, Place, split_communicators
from hpctrain.world.watching import DEFAULT_S
from hpctrain.world.world import RankInfo, World

if TYPE_CHECKING:
    import torch
    from mpi4py.MPI import Comm

__all__ = ["init"]

BINDINGS = ("none", "numa")


def init(
    *,
    seed: int | None = None,
    device: str = "auto",
    num_threads: int | None = None,
    bind: str = "none",
    allow_shared_device: bool = False,
    preflight: str = "default",
    config: object = None,
    timeout_s: float = DEFAULT_S,
    comm: Comm | None = None,
) -> World:
    """Collective: join the job; every rank calls it once, with the same arguments.

    Ranks come from MPI, are checked against the launcher, and get a device, cores, threads and
    random streams.

    Args:
        seed: Seed of the run; None draws one on rank 0 and hands it to all.
        device: `auto`, `cuda` (ROCm included) or `cpu`.
        num_threads: Threads of torch on this rank; None takes OMP_NUM_THREADS, or else this rank's
            share of the cores that its affinity mask allows.
        bind: `numa` binds ranks to cores, domain by domain, where the launcher did not bind them;
            `none` leaves them.
        allow_shared_device: Let several ranks compute on one GPU.
        preflight: `default` refuses what would corrupt the run and warns of the rest, `strict`
            refuses both, `off` looks at nothing.
        config: The run's configuration (plain data); ranks with different ones are refused.
        timeout_s: How long to wait for a rank that does not come: here, and in every collective of
            the world that is given no time of its own.
        comm: The ranks that form the world; None takes all.

    Returns:
        The world, to be used as a context manager.

    Raises:
        LaunchError: the job was started wrongly, or the ranks are about to run different things.
        TimedOutError: some ranks did not arrive in time; they are named.
        ConfigError: an argument is wrong on some rank.
    """
    # A name is what a worker has already while it reads the script; its parent it learns later.
    if multiprocessing.current_process().name != "MainProcess":
        raise LaunchError(
            "hpctrain.init was called in a worker process, which is not a rank: worker processes "
            "read "
            "the script again; put what starts the training under if __name__ == '__main__':"
        )
    launch = launcher.current_launch()
    if launch.size != 1:
        write_whole_lines()
    script = script_path()
    unhook = guard.install_hook(launch)  # stays when this raises: no rank may be left waiting
    MPI = load_mpi(launch, script=script.name if script else "SCRIPT", timeout_s=timeout_s)
    parent = MPI.COMM_WORLD if comm is None else comm
    with ExitStack() as undo:  # a world that is refused leaves nothing behind
        roll_call(parent, "hpctrain.init", timeout_s=timeout_s)
        comms, place = split_communicators(parent, timeout_s=timeout_s)
        undo.callback(comms.free)

        digest, trouble = _check_arguments(seed, num_threads, bind, preflight, config)
        agree(comms.comm, trouble, error=ConfigError, timeout_s=timeout_s)
        cpus, threads = _assign_cores(comms.node, place, launch, num_threads, bind)
        torch_device, device_info = _assign_device(
            comms, place, device, allow_shared_device, timeout_s=timeout_s
        )
        info = RankInfo(
            host=socket.gethostname(),
            node_rank=place.node_rank,
            local_rank=place.local_rank,
            cpus=format_ranges(cpus),
            num_threads=threads,
            device=device_info,
        )
        mpi = str(identify(MPI.Get_library_version()))
        compare_ranks(
            comms.comm,
            host=info.host,
            local_size=place.local_size,
            config=digest,
            mpi=mpi,
            mode=preflight,
        )
        ranks = tuple(comms.comm.allgather(info))
        _refuse_shared_devices(ranks, allow_shared_device)
        streams = Streams(_common_seed(comms.comm, seed), place.rank)
        streams.bind_equal()
        undo.callback(unhook)
        return World(
            place=place,
            comms=comms,
            launch=launch,
            mpi=mpi,
            device=torch_device,
            ranks=ranks,
            streams=streams,
            _undo=undo.pop_all(),
        )


def _check_arguments(
    seed: int | None, num_threads: int | None, bind: str, preflight: str, config: object
) -> tuple[str, str | None]:
    """Digest the configuration and find what is wrong with the arguments on this rank. Pure."""
    if num_threads is not None and (not _is_whole(num_threads) or num_threads < 1):
        return "", f"num_threads={num_threads!r} must be a whole number, at least 1, or None"
    if bind not in BINDINGS:
        return "", f"bind={bind!r} is unknown; choose one of {', '.join(BINDINGS)}"
    if preflight not in MODES:
        return "", f"preflight={preflight!r} is unknown; choose one of {', '.join(MODES)}"
    if seed is not None and (not _is_whole(seed) or not 0 <= seed < 2**63):
        return "", f"seed={seed!r} must be a whole number; choose 0 <= seed < 2**63, or None"
    try:
        return digest_config(config), None
    except ConfigError as error:
        return "", str(error)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral)  # numpy's integers, too


def _assign_cores(
    node: Comm, place: Place, launch: Launch, num_threads: int | None, bind: str
) -> tuple[frozenset[int], int]:
    """Collective over the node: bind to cores if requested, and give torch its threads."""
    import torch

    mask = cores.read_affinity()
    core_map = cores.read_core_map()
    masks = node.allgather(mask)
    if bind == "numa" and len(set(masks)) == 1 and place.local_size > 1:
        chosen = cores.choose_cores(mask, place.local_size, core_map)
        mask = chosen[place.local_rank]
        cores.bind_process(mask)
        masks = chosen
    share = cores.share_of_cores(masks, place.local_rank, core_map.core_of)
    threads = num_threads or launch.num_threads or share
    torch.set_num_threads(threads)
    return mask, threads


def _assign_device(
    comms: Communicators, place: Place, kind: str, allow_shared: bool, *, timeout_s: float
) -> tuple[torch.device, devices.DeviceInfo]:
    """Collective: choose this rank's device; a rank that cannot have one stops all of them."""
    trouble, found, index = None, "cpu", None
    try:
        found, num_visible = devices.visible_devices(kind)
        if found != "cpu":
            index = devices.choose_index(
                num_visible=num_visible,
                local_rank=place.local_rank,
                local_size=place.local_size,
                allow_shared=allow_shared,
            )
    except HpcTrainError as error:
        trouble = str(error)
    agree(comms.comm, trouble, error=ConfigError, timeout_s=timeout_s)
    return devices.bind_device(found, index)


def _refuse_shared_devices(ranks: tuple[RankInfo, ...], allow_shared: bool) -> None:
    shared = devices.find_shared([(info.host, info.device) for info in ranks])
    if shared and not allow_shared:
        first = ranks[shared[0][0]]
        raise ConfigError(
            f"ranks {format_ranges(shared[0])} on {first.host} share one GPU ({first.device}, "
            f"{first.device.uuid}); give each rank its own (--gpus-per-node equal to the ranks per "
            "node), or pass allow_shared_device=True to init (NCCL refuses shared GPUs)"
        )


def _common_seed(comm: Comm, seed: int | None) -> int:
    """Collective: rank 0's seed, drawn if there is none."""
    drawn = int.from_bytes(os.urandom(4), "little")
    common: int = comm.bcast(drawn if seed is None else int(seed), root=0)
    return common
