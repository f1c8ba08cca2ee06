"""How ranks learn each other's addresses, once, by MPI."""

from __future__ import annotations

import os
import socket

from hpctrain import log
from hpctrain.errors import LaunchError
from hpctrain.faults.channel import Responder
from hpctrain.faults.survey import Peer, ask_all, choose_address, own_addresses, own_birth
from hpctrain.world import World, agree

__all__ = ["exchange"]

_PROBE_S = 2.0


def exchange(world: World, responder: Responder | None, trouble: str | None) -> dict[int, Peer]:
    """Collective: tell all ranks where this one answers, and learn where they do.

    Args:
        world: The ranks.
        responder: Who answers here; None where it could not be started.
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
    """Collective: each rank reaches for one on the next node; what fails is said once."""
    target = (world.rank + world.local_size) % world.size
    result = ask_all({target: peers[target]}, {"ask": "hello"}, timeout_s=_PROBE_S)[target]
    trouble = None
    if isinstance(result, str):
        peer = peers[target]
        there = f"{world.ranks[target].host} at {peer.address}:{peer.port}"
        trouble = f"{world.host} gets from {there}: {result}"
    failed = [text for text in world.comm.allgather(trouble) if text is not None]
    if failed and world.rank == 0:
        log.warn(
            f"the watchdog's TCP connections fail between some nodes ({len(failed)} of "
            f"{world.size} tried; {failed[0]}); ranks that hang there can be named, but not what "
            "they do. Open the nodes' unprivileged ports to each other"
        )
