"""How the ranks of a node wait for each other without taking the cores from those that compute.

While the node has a core for every computing thread, a rank that waits looks again and again, which
is quickest. With more threads than cores it would take the time slice of the very rank it waits
for: it sleeps in the kernel instead, until a byte arrives on a socket.
`python -m benchmarks.barrier` measures both ways.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hpctrain.errors import CollectiveError, TimedOutError
from hpctrain.world.agreement import agree
from hpctrain.world.polling import poll

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["Barrier", "SleepingBarrier", "SpinningBarrier", "make_barrier", "must_sleep"]

_SPIN_S = 2e-3
_NAP_S = 50e-6
_GIVE_UP_S = 86400.0
"""The watchdog, if there is one, reports long before."""
_CONNECT_S = 60.0
_GONE = "a rank of this node has ended while others waited for it"
_NAMING_S = 5.0
"""How long the launcher or a peer has to end the job and name the dead rank."""


class Barrier(Protocol):
    """Lets all ranks of a node arrive before any continues; earlier writes are visible then."""

    how: str
    """In words."""

    def wait(self) -> None:
        """Collective: wait for all ranks of the node."""

    def close(self) -> None:
        """Free its resources."""


def must_sleep(num_threads: Sequence[int], num_cores: int) -> bool:
    """Whether waiting ranks must give up their core. Pure.

    Args:
        num_threads: What each rank of the node computes with.
        num_cores: What they all may run on.
    """
    return sum(num_threads) > num_cores


def make_barrier(comm: Comm, node: Comm, *, sleep: bool) -> Barrier:
    """Collective over all ranks: a barrier for each node; `sleep` must match on a node.

    Raises:
        CollectiveError: on all ranks of all nodes: one node's ranks cannot connect.
    """
    made: Barrier
    if not sleep:
        made, trouble = SpinningBarrier(node), None
    else:
        made = sleeping = SleepingBarrier(node)
        trouble = sleeping.trouble
    try:
        agree(comm, trouble)
    except CollectiveError:
        made.close()
        raise
    return made


class SpinningBarrier:
    """MPI's own, looked at again and again; after a while with short naps."""

    how = "spinning: there is a core for every thread"

    def __init__(self, node: Comm) -> None:
        self._node: Comm = node.Dup()

    def wait(self) -> None:
        """Collective: wait for all ranks of the node."""
        request = self._node.Ibarrier()
        for _ in range(200):
            if request.Test():
                return
        if not poll(request.Test, timeout_s=_GIVE_UP_S, spin_s=_SPIN_S, longest_nap_s=_NAP_S):
            raise TimedOutError(
                f"timed out after {_GIVE_UP_S:g} s waiting for the other ranks of this node; "
                "check them (an exception, another code path)"
            )

    def close(self) -> None:
        """Collective: give the communicator back."""
        self._node.Free()


class SleepingBarrier:
    """Every rank reports to the node's first one by a local socket and sleeps until it answers.

    Collective over the ranks of a node to create; the caller checks `trouble` on all ranks.
    """

    how = "sleeping: there are more threads than cores"

    def __init__(self, node: Comm) -> None:
        self._rank, self._size = node.Get_rank(), node.Get_size()
        self._links: list[socket.socket] = []
        self.trouble: str | None = None
        """Why this rank is not connected, in words."""
        try:
            self._connect(node)
        except OSError as error:
            self.trouble = f"local sockets do not work here ({error}); ranks of a node need one"

    def _connect(self, node: Comm) -> None:
        server = None
        name = f"\0hpctrain-{os.getpid()}-{secrets.token_hex(8)}"
        if self._rank == 0:
            # A leading zero: a name that is no file, so nothing is left behind.
            try:
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                server.bind(name)
                server.listen(self._size)
                server.settimeout(_CONNECT_S)
            except OSError:
                node.bcast("", root=0)  # the others must not wait for a name
                raise
        name = node.bcast(name, root=0)
        if not name:
            return
        if server is None:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._links.append(link)
            link.settimeout(_CONNECT_S)
            link.connect(name)
            link.settimeout(None)
            return
        with server:
            for _ in range(self._size - 1):
                link, _ = server.accept()
                link.settimeout(None)
                self._links.append(link)

    def wait(self) -> None:
        """Collective: wait for all ranks of the node."""
        if self._size > 1 and not self._links:
            raise CollectiveError(
                "the ranks of this node have disconnected; train inside the world's block"
            )
        try:
            if self._rank == 0:
                for link in self._links:
                    self._receive(link)
                for link in self._links:
                    link.send(b"\0")
            else:
                self._links[0].send(b"\0")
                self._receive(self._links[0])
        except OSError as error:
            time.sleep(_NAMING_S)
            raise CollectiveError(_GONE) from error

    def _receive(self, link: socket.socket) -> None:
        if not link.recv(1):
            raise ConnectionError

    def close(self) -> None:
        """Close the sockets."""
        for link in self._links:
            link.close()
        self._links.clear()
