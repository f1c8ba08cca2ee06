"""How ranks meet without hanging: a roll call that names who is missing, and `agree`.

Whatever only one rank can know (a missing file, a NaN) goes through `agree`, so that all ranks
raise together and none is left waiting for one that has gone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpctrain.errors import CollectiveError, HpcTrainError
from hpctrain.log import format_ranges

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

__all__ = ["agree", "roll_call"]

_TAG = 7411
_ALL_HERE = b"\0"
_LONGEST_NAP_S = 0.005


def roll_call(comm: Comm, what: str, *, timeout_s: float) -> None:
    """Collective: wait until every rank is here; `what` must be the same everywhere.

    Every rank reports to rank 0, which answers all of them at once: go on, or who is missing. After
    it, a blocking collective cannot be waiting for a rank that never came.

    Raises:
        CollectiveError: on all ranks that did come, with the ranks that did not.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return
    missing = (
        _collect(comm, size, timeout_s) if rank == 0 else _report(comm, timeout_s=timeout_s + 5.0)
    )
    if missing:
        raise CollectiveError(
            f"{what}: waited {timeout_s:g} s for rank {format_ranges(missing, limit=16)} of "
            f"{size}, which did not come; see what those ranks do (an exception, another code "
            "path, a stopped node), or allow more time"
        )


def _collect(comm: Comm, size: int, timeout_s: float) -> list[int]:
    """Rank 0's side: hear from everyone until the deadline, then tell everyone who is missing."""
    waiting: dict[int, Request] = {
        source: comm.Irecv(bytearray(1), source=source, tag=_TAG) for source in range(1, size)
    }
    deadline = time.monotonic() + timeout_s
    nap = 0.0
    while waiting and time.monotonic() < deadline:
        arrived = [source for source, request in waiting.items() if request.Test()]
        for source in arrived:
            del waiting[source]
        nap = 0.0 if arrived else min(nap * 2 + 1e-5, _LONGEST_NAP_S)
        time.sleep(nap)
    missing = sorted(waiting)
    for request in waiting.values():
        request.Cancel()
        request.Free()
    verdict = ",".join(map(str, missing)).encode() or _ALL_HERE
    for target in range(1, size):
        if target not in waiting:
            comm.Send(verdict, dest=target, tag=_TAG)
    return missing


def _report(comm: Comm, *, timeout_s: float) -> list[int]:
    """Everyone else's side: report to rank 0 and hear its answer."""
    from mpi4py import MPI

    sent = comm.Isend(bytearray(1), dest=0, tag=_TAG)
    deadline = time.monotonic() + timeout_s
    nap = 0.0
    status = MPI.Status()
    while not comm.Iprobe(source=0, tag=_TAG, status=status):
        if time.monotonic() > deadline:
            sent.Free()
            return [0]
        nap = min(nap * 2 + 1e-5, _LONGEST_NAP_S)
        time.sleep(nap)
    verdict = bytearray(status.Get_count(MPI.BYTE))
    comm.Recv(verdict, source=0, tag=_TAG)
    sent.Wait()  # rank 0 has answered, so it has been received
    return [] if verdict == _ALL_HERE else [int(part) for part in verdict.decode().split(",")]


def agree(
    comm: Comm,
    trouble: str | None,
    *,
    error: type[HpcTrainError] = CollectiveError,
    timeout_s: float = 300.0,
) -> None:
    """Collective: raise on every rank when any rank has trouble; `error` must match.

    Args:
        comm: The ranks that must agree.
        trouble: What is wrong on this rank, or None.
        error: What to raise.
        timeout_s: How long to wait for ranks that do not come.

    Raises:
        HpcTrainError: of the class `error`, the same text on all ranks, with the ranks concerned.
    """
    roll_call(comm, "agree", timeout_s=timeout_s)
    told: list[str | None] = comm.allgather(trouble)
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if by_text:
        size = comm.Get_size()
        raise error(
            "; ".join(
                f"rank {format_ranges(ranks, limit=16)} of {size}: {t}"
                for t, ranks in by_text.items()
            )
        )
