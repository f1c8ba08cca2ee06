"""Each rank holds a connection to the next one, which tells at once when that one dies.

Most launchers end all ranks when one of them is killed, but not all do, and few say which one it
was. The kernel closes a dead process's sockets: who sees the connection end without a goodbye knows
more than any timeout. Nothing is sent while all live.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable

from hpctrain.faults.channel import GOODBYE, WELCOME
from hpctrain.faults.stacks import THREAD_PREFIX
from hpctrain.faults.survey import Peer

__all__ = ["Neighbour"]

_CONNECT_S = 10.0
# A node that is gone says nothing: the kernel asks after five silent seconds, five times.
_KEEPALIVE = ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 5)


class Neighbour:
    """Watches over one process.

    Args:
        peer: Who.
        died: Called in the thread that watches when it is gone without a goodbye.

    Raises:
        OSError: it cannot be reached.
    """

    def __init__(self, peer: Peer, died: Callable[[], None]) -> None:
        self._died = died
        self._leaving = threading.Event()
        self._sock = socket.create_connection((peer.address, peer.port), timeout=_CONNECT_S)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    self._sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._sock.sendall(json.dumps({"ask": "stay", "token": peer.token}).encode() + b"\n")
            # Its answer is not waited for: it may be in an MPI call that holds Python's lock until
            # this rank comes, too.
            self._sock.settimeout(None)
        except OSError:
            self._sock.close()
            raise
        self._thread = threading.Thread(
            target=self._listen, name=f"{THREAD_PREFIX}-neighbour", daemon=True
        )
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop watching. May be called again."""
        self._leaving.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self._sock.close()

    def _listen(self) -> None:
        heard = b""
        while True:
            try:
                data = self._sock.recv(64)
            except OSError:
                data = b""
            heard += data
            if GOODBYE in heard or self._leaving.is_set():
                return
            if not data:
                if heard.startswith(WELCOME):  # else it turned us away, and is alive
                    self._died()
                return
