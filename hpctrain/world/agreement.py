"""How ranks meet without hanging: a roll call that names who is missing, and `agree`.

Whatever only one rank can know (a missing file, a NaN) goes through `agree`, so that all ranks
raise together and none is left waiting for one that has gone. On a world's communicators the
watchdog finds missing ranks; without a watchdog, a roll call does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hpctrain.errors import CollectiveError, HpcTrainError, TimedOutError
from hpctrain.log import name_ranks
from hpctrain.world.polling import poll
from hpctrain.world.watching import DEFAULT_S

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

    from hpctrain.world.watched import WatchedComm

__all__ = ["agree", "announced", "roll_call"]

_TAG = 7411
_ALL_HERE = b"\0"
_LONGEST_NAP_S = 0.005


def roll_call(comm: Comm, what: str, *, timeout_s: float | None = None) -> None:
    """Collective: wait until every rank is here; `what` must be the same everywhere.

    Without a watchdog, every rank reports to rank 0, which answers all of them at once: continue,
    or who is missing. After it, a blocking collective cannot be waiting for a rank that was never
    reached.

    Args:
        comm: The ranks.
        what: What they meet for, in words.
        timeout_s: How long to wait; None: as long as the world waits for any rank, 600 s where
            there is no world.

    Raises:
        TimedOutError: on all ranks that did come, with the ranks that did not. Where the watchdog
            watches, it names them and ends the job instead.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return
    watched = _watched(comm)
    if watched is not None:
        with watched.watching.announce(what, timeout_s=timeout_s, label=watched.label):
            watched.plain.Barrier()
        return
    timeout_s = DEFAULT_S if timeout_s is None else timeout_s
    missing = (
        _collect(comm, size, timeout_s) if rank == 0 else _report(comm, timeout_s=timeout_s + 5.0)
    )
    if missing:
        raise TimedOutError(
            f"{what}: timed out after {timeout_s:g} s waiting for "
            f"{name_ranks(missing)} of {size}; check those ranks (an exception, "
            "another code path, a stopped node), or allow more time"
        )


def _collect(comm: Comm, size: int, timeout_s: float) -> list[int]:
    """Rank 0's side: wait for all until the deadline, then tell all who is missing."""
    waiting: dict[int, Request] = {
        source: comm.Irecv(bytearray(1), source=source, tag=_TAG) for source in range(1, size)
    }

    def have_reported() -> bool:
        for source in [source for source, request in waiting.items() if request.Test()]:
            del waiting[source]
        return not waiting

    poll(have_reported, timeout_s=timeout_s, spin_s=0.0, longest_nap_s=_LONGEST_NAP_S)
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
    """The other ranks' side: report to rank 0 and receive its answer."""
    from mpi4py import MPI

    sent = comm.Isend(bytearray(1), dest=0, tag=_TAG)
    status = MPI.Status()

    def has_answered() -> bool:
        return comm.Iprobe(source=0, tag=_TAG, status=status)

    if not poll(has_answered, timeout_s=timeout_s, spin_s=0.0, longest_nap_s=_LONGEST_NAP_S):
        sent.Free()
        return [0]
    verdict = bytearray(status.Get_count(MPI.BYTE))
    comm.Recv(verdict, source=0, tag=_TAG)
    sent.Wait()  # rank 0 has answered, so it has been received
    return [] if verdict == _ALL_HERE else [int(part) for part in verdict.decode().split(",")]


def agree(
    comm: Comm,
    trouble: str | None,
    *,
    error: type[HpcTrainError] = CollectiveError,
    timeout_s: float | None = None,
) -> None:
    """Collective: raise on every rank when any rank has trouble; `error` must match.

    Args:
        comm: The ranks that must agree.
        trouble: What is wrong on this rank, or None.
        error: What to raise.
        timeout_s: How long to wait for ranks that do not come; None: as long as the world waits
            for any rank.

    Raises:
        HpcTrainError: of the class `error`, the same text on all ranks, with the ranks concerned.
        TimedOutError: some ranks did not arrive, and no watchdog monitors the communicator.
    """
    watched = _watched(comm)
    told: list[str | None]
    if watched is None:
        roll_call(comm, "agree", timeout_s=timeout_s)
        told = comm.allgather(trouble)
    else:
        with watched.watching.announce("agree", timeout_s=timeout_s, label=watched.label):
            told = watched.plain.allgather(trouble)
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if by_text:
        size = comm.Get_size()
        raise error(
            "; ".join(f"{name_ranks(ranks)} of {size}: {t}" for t, ranks in by_text.items())
        )


@contextmanager
def announced(comm: Comm, what: str) -> Iterator[float]:
    """A block that polls until all ranks of `comm` have come; gives the seconds it may last.

    Where the watchdog watches, it names the ranks that do not come and ends the job: the block
    itself then has no limit. Elsewhere it has the default one.

    Args:
        comm: The ranks.
        what: What they meet for, in words.
    """
    watched = _watched(comm)
    if watched is None:
        yield DEFAULT_S
        return
    with watched.watching.announce(what, label=watched.label):
        yield math.inf


def _watched(comm: Comm) -> WatchedComm | None:
    """The communicator, if a watchdog monitors it."""
    from hpctrain.world.watched import WatchedComm

    return comm if isinstance(comm, WatchedComm) and comm.is_watched else None
