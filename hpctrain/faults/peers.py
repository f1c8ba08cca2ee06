"""The other ranks as processes: their addresses, and what the kernel of this node says of them."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence

import psutil

from hpctrain import log
from hpctrain.errors import LaunchError
from hpctrain.faults.channel import Peer, Responder, ask_all
from hpctrain.world import World, agree

__all__ = [
    "choose_address",
    "describe_process",
    "describe_stop",
    "exchange_addresses",
    "own_addresses",
    "own_birth",
]

_PROBE_S = 2.0


def exchange_addresses(
    world: World, responder: Responder | None, trouble: str | None
) -> dict[int, Peer]:
    """Collective: tell all ranks where this one listens, and learn where they do.

    Args:
        world: The ranks.
        responder: What listens here; None where it could not be started.
        trouble: Why not.

    Raises:
        LaunchError: on all ranks, when some rank has trouble.
    """
    agree(world.comm, trouble, error=LaunchError)
    remote = world.num_nodes > 1
    mine = own_addresses() if remote else ()
    port, token = (responder.port, responder.token) if responder is not None else (0, "")
    told: list[tuple[int, str, int, str, tuple[str, ...]]] = world.comm.allgather(
        (port, token, os.getpid(), own_birth(), mine)
    )
    places: dict[int, str] = {}
    for rank, info in enumerate(world.ranks):
        if info.node_rank == world.node_rank:
            places[info.node_rank] = "127.0.0.1"
        elif info.node_rank not in places:
            found = choose_address(_resolve(info.host), told[rank][4], mine)
            places[info.node_rank] = found or info.host
    peers = {
        rank: Peer(
            address=places[world.ranks[rank].node_rank],
            port=port,
            token=token,
            pid=pid,
            birth=birth,
        )
        for rank, (port, token, pid, birth, _) in enumerate(told)
    }
    if remote:
        _probe(world, peers)
    return peers


def _resolve(host: str) -> list[str]:
    """Addresses of a host, now: when something hangs, the name service may hang too."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def _probe(world: World, peers: dict[int, Peer]) -> None:
    """Collective: each rank connects to one on the next node; failures are reported once."""
    target = (world.rank + world.local_size) % world.size
    result = ask_all({target: peers[target]}, {"ask": "hello"}, timeout_s=_PROBE_S)[target]
    trouble = None
    if isinstance(result, str):
        peer = peers[target]
        there = f"{world.ranks[target].host} at {peer.address}:{peer.port}"
        trouble = f"{world.host} got from {there}: {result}"
    failed = [text for text in world.comm.allgather(trouble) if text is not None]
    if failed and world.rank == 0:
        log.warn(
            f"the watchdog's TCP connections fail between some nodes ({len(failed)} of "
            f"{world.size} tried; {failed[0]}); hung ranks there can be named, but not what they "
            "do. Open the unprivileged ports between the nodes"
        )


def own_birth() -> str:
    """When this process started."""
    return _read_stat(os.getpid())[1]


def describe_process(peer: Peer, *, listens: bool) -> str:
    """What the kernel of this node says about another rank's process on it."""
    state, birth = _read_stat(peer.pid)
    if not state or birth != peer.birth:
        return "its process has ended"
    if state in "RS" and not listens:
        return "its process runs, but stopped its watchdog and makes no more calls"
    words = {
        "T": f"its process is stopped (SIGSTOP; `kill -CONT {peer.pid}` resumes it)",
        "t": "its process is stopped by a debugger",
        "Z": "its process is dead",
        "X": "its process is dead",
        "D": "its process waits in the kernel, for a file system or a driver",
        "R": "its process runs native code that holds Python's lock (GIL), or gets no CPU time",
        "S": "its process sleeps in native code that holds Python's lock (GIL)",
    }
    return words.get(state, f"its process is in state {state}")


def describe_stop(peer: Peer) -> str | None:
    """How a process of this node is stopped, as `describe_process` says it; None: it is not."""
    state, birth = _read_stat(peer.pid)
    if birth != peer.birth or state not in ("T", "t"):
        return None
    return describe_process(peer, listens=True)


def _read_stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; empty where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def own_addresses() -> tuple[str, ...]:
    """This node's IPv4 networks that are not loopback, as `address/prefix`."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and address.netmask and name in up:
                interface = ipaddress.ip_interface(f"{address.address}/{address.netmask}")
                if not interface.is_loopback:
                    found.append(str(interface))
    return tuple(found)


def choose_address(resolved: Iterable[str], theirs: Sequence[str], mine: Sequence[str]) -> str:
    """Choose where to reach another node. Pure.

    What its name resolves to counts, unless that is loopback, as some hosts files say. Then an
    address on a network that both nodes have does, else any that is not also mine: bridges of
    container engines have the same address on every node.

    Returns:
        The address, or nothing where there is none.
    """
    for address in resolved:
        if not ipaddress.ip_address(address).is_loopback:
            return address
    own = {ipaddress.ip_interface(text).ip for text in mine}
    networks = {ipaddress.ip_interface(text).network for text in mine}
    others = [face for face in map(ipaddress.ip_interface, theirs) if face.ip not in own]
    shared = [face for face in others if face.network in networks]
    return next((str(face.ip) for face in [*shared, *others]), "")
