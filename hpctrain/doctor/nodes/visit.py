"""The collective behind `hpctrain doctor --all-nodes`: measure, gather, compare, say."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from hpctrain import log
from hpctrain.doctor.nodes import display
from hpctrain.doctor.nodes.links import choose_rounds, measure_clocks, measure_link
from hpctrain.doctor.nodes.outliers import find_outliers
from hpctrain.doctor.nodes.report import NodeLink, RankReport, put_together
from hpctrain.errors import CollectiveError
from hpctrain.world import abort

if TYPE_CHECKING:
    import torch

    from hpctrain.world import World

__all__ = ["measure_compute", "measure_memory", "visit_all_nodes"]

MOST_ROUNDS = 32
_LINK_LIMIT_S = 10.0
_CLOCK_LIMIT_S = 30.0
_INIT_LIMIT_S = 120.0
_MEET_LIMIT_S = 60.0
_MOST_HOSTS = 64


def visit_all_nodes(*, as_json: bool, limit_s: float) -> int:
    """Collective: compare all nodes of the job; every rank calls it with the same arguments.

    Returns:
        On every rank 1 if an outlier was found or a link was silent, else 0.
    """
    from hpctrain.world import init

    _arm_watchdog(limit_s)
    try:
        world = init(preflight="default", allow_shared_device=True, timeout_s=_INIT_LIMIT_S)
    except CollectiveError as error:
        _leave(str(error))
    with world:
        try:
            return _visit(world, as_json=as_json)
        except CollectiveError as error:
            _leave(f"{error}\n{_places_of(world)}")


def _visit(world: World, *, as_json: bool) -> int:
    roll = _Roll(world)
    roll.call("doctor: matrix product")
    gflops = measure_compute(world.device)
    roll.call("doctor: memory")
    memory = measure_memory(world.device)
    own = RankReport(
        node=world.node_rank,
        host=world.host,
        device=str(world.ranks[world.rank].device),
        num_threads=world.num_threads,
        gflops=gflops,
        memory=memory,
    )
    roll.call("doctor: links")
    links, clocks = _measure_links(world) if world.local_rank == 0 else ([], [])
    rounds = len(choose_rounds(world.num_nodes, most=MOST_ROUNDS))
    roll.call("doctor: results", more_s=rounds * _LINK_LIMIT_S + _CLOCK_LIMIT_S)
    gathered = world.comm.gather((own, links), root=0)
    code = 0
    if gathered:
        all_links = [link for _, some in gathered for link in some]
        nodes = put_together([rank for rank, _ in gathered], all_links, clocks)
        outliers = find_outliers(nodes, all_links)
        code = 1 if outliers else 0
        show = display.as_json if as_json else display.as_text
        job = display.ExaminedJob(num_ranks=world.size, mpi=world.mpi)
        print(show(job, nodes, all_links, outliers), flush=True)
    roll.call("doctor: end")
    agreed: int = world.comm.bcast(code, root=0)
    if any(link.bandwidth is None for link in links):
        # A message that never arrived would hold MPI_Finalize for ever.
        _leave("")
    return agreed


class _Roll:
    """Roll calls before every collective, so that a missing rank is named and not waited for."""

    def __init__(self, world: World) -> None:
        self._world = world

    def call(self, what: str, *, more_s: float = 0.0) -> None:
        """Collective: wait until all ranks are here."""
        from hpctrain.world import roll_call

        roll_call(self._world.comm, what, timeout_s=_MEET_LIMIT_S + more_s)


def _measure_links(world: World) -> tuple[list[NodeLink], list[tuple[float, float] | None]]:
    """Collective over the node leaders: clocks first, then the tournament.

    Each link is returned by the lower of its two nodes.
    """
    node = world.cross.Get_rank()
    clocks = measure_clocks(world.cross, limit_s=_CLOCK_LIMIT_S)
    links = []
    for turn, pairs in enumerate(choose_rounds(world.num_nodes, most=MOST_ROUNDS)):
        for a, b in pairs:
            if node in (a, b):
                other = b if node == a else a
                link = measure_link(world.cross, other, turn=turn, limit_s=_LINK_LIMIT_S)
                links += [link] if node == a else []
    return links, clocks


def _places_of(world: World) -> str:
    hosts = ", ".join(f"{rank}: {info.host}" for rank, info in enumerate(world.ranks[:_MOST_HOSTS]))
    return f"ranks and their hosts: {hosts}"


def _leave(text: str) -> NoReturn:
    """End all ranks at once, where a clean end would wait for a node that does not answer."""
    if text:
        log.notice(text)
    sys.stdout.flush()
    abort(1)


def _arm_watchdog(limit_s: float) -> None:
    """End this process when everything takes too long, from MPI's start to its end at exit."""

    def bark() -> None:
        log.notice(
            f"doctor --all-nodes timed out on {socket.gethostname()} after {limit_s:g} s; a node "
            "or "
            "a link hangs: try fewer nodes, or allow more with --time-limit"
        )
        os._exit(1)

    timer = threading.Timer(limit_s, bark)
    timer.daemon = True
    timer.start()


# Per kind of device: rows of the matrices, bytes of the copied block.
_SIZES = {"cpu": (1024, 64 << 20), "cuda": (4096, 256 << 20)}
_SPAN_S = 0.4
_FEWEST = 3


def measure_compute(device: torch.device, *, span_s: float = _SPAN_S) -> float:
    """Measure GFLOP/s of a single-precision matrix product: the best of several."""
    import torch

    rows = _SIZES.get(device.type, _SIZES["cpu"])[0]
    a = torch.ones(rows, rows, device=device)
    b = torch.ones(rows, rows, device=device)
    out = torch.empty(rows, rows, device=device)
    best_s = _best_time(lambda: torch.mm(a, b, out=out), device, span_s)
    return 2 * rows**3 / best_s / 1e9


def measure_memory(device: torch.device, *, span_s: float = _SPAN_S) -> float:
    """Measure GB/s of copying a block that no cache holds, read and write counted."""
    import torch

    num_bytes = _SIZES.get(device.type, _SIZES["cpu"])[1]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best_s = _best_time(lambda: target.copy_(source), device, span_s)
    return 2 * num_bytes / best_s / 1e9


def _best_time(work: Callable[[], object], device: torch.device, span_s: float) -> float:
    import torch

    def once() -> float:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    once()  # warms caches, clocks and threads
    times: list[float] = []
    end = time.perf_counter() + span_s
    while len(times) < _FEWEST or time.perf_counter() < end:
        times.append(once())
    return min(times)
