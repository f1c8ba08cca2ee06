"""Every rank's output and last word, brought to `hpctrain run` over sockets.

mpirun merges the output of all ranks into one pipe, each MPI in its own way. Here a rank connects
back to the process that started it and puts sockets in the place of its standard output and error:
lines stay whole and labelled by rank, whatever kills it, and a third socket reports how it ended.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain import log
from hpctrain.launch.screen import Screen
from hpctrain.world import Launch

__all__ = ["Listener", "Outcome", "attach"]

# One variable, HOST:PORT:TOKEN: Hydra forwards no variable whose name begins with another's.
VARIABLE = "HPCTRAIN_RELAY"
CONTROL_VARIABLE = "HPCTRAIN_CONTROL_FD"
_WELCOME = b"welcome\n"
_CONNECT_S = 10.0
_TOP_FD = 1023
"""The highest that `select` can wait for."""
_STREAMS = ("out", "err", "control")


def attach(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """Connect this rank's output to the process that started it, if one is listening.

    Returns:
        `launch` with its `control_fd`. Where the connection fails, output goes the launcher's way,
        with a message.
    """
    address, _, token = environ.get(VARIABLE, "").rpartition(":")
    if not address:
        return launch
    host, _, port = address.rpartition(":")
    opened: list[socket.socket] = []
    try:
        for stream in _STREAMS:
            opened.append(socket.create_connection((host, int(port)), timeout=_CONNECT_S))
            hello = {
                "token": token,
                "rank": launch.rank,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "stream": stream,
            }
            opened[-1].sendall(json.dumps(hello).encode() + b"\n")
            _await_welcome(opened[-1])
            opened[-1].settimeout(None)
    except OSError as error:
        for connection in opened:
            connection.close()
        log.warn(f"rank {launch.rank} cannot reach {address} ({error}); its output is not labelled")
        return launch
    out, err, control = opened
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    fd = _raise_descriptor(control)
    os.environ[CONTROL_VARIABLE] = str(fd)
    return dataclasses.replace(launch, control_fd=fd)


def _raise_descriptor(control: socket.socket) -> int:
    """Move a socket above every other descriptor, or leave it where the limit is too low.

    A killed process's descriptors close from the lowest (older kernels) or from the highest. With
    its output at 1 and 2 and this one on top, the starter learns of it before the MPI launcher,
    which then kills the others; else several are gone and it is unclear which one was first.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    top = _TOP_FD if limit == resource.RLIM_INFINITY else min(limit - 1, _TOP_FD)
    try:
        fd = fcntl.fcntl(control.fileno(), fcntl.F_DUPFD_CLOEXEC, top)
    except OSError:
        return control.detach()
    control.close()
    return fd


def _await_welcome(connection: socket.socket) -> None:
    answer = b""
    while len(answer) < len(_WELCOME):
        data = connection.recv(len(_WELCOME) - len(answer))
        if not data:
            raise ConnectionRefusedError("the connection was refused")
        answer += data


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a rank ended."""

    rank: int
    host: str
    code: int
    cause: str


@dataclass(eq=False, slots=True)
class _Connection:
    """One socket of one rank; `stream` is empty until it has introduced itself."""

    sock: socket.socket
    pending: bytes = b""
    stream: str = ""
    rank: int = -1
    host: str = ""
    pid: int = 0


@dataclass(eq=False)
class Listener:
    """The starter's side: accepts the ranks' sockets and hands their lines to a screen."""

    screen: Screen
    remote: bool
    """Whether ranks run on other hosts; if not, only this machine can connect."""
    num_ranks: int
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    outcomes: list[Outcome] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    """Ranks in the order in which they exited. A dying process closes our socket before it leaves
    MPI: the first one here exited before MPI could kill the others."""
    _ended: set[int] = field(default_factory=set)
    _present: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._server = socket.create_server(("" if self.remote else "127.0.0.1", 0), backlog=1024)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self.num_open = 0

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks need to find us."""
        host = socket.gethostname() if self.remote else "127.0.0.1"
        return {VARIABLE: f"{host}:{self._server.getsockname()[1]}:{self.token}"}

    @property
    def num_present(self) -> int:
        """How many ranks have come so far."""
        return len(self._present)

    def local_pids(self) -> list[int]:
        """The processes of the ranks that run on this host, in rank order."""
        return list(self.local_ranks().values())

    def local_ranks(self) -> dict[int, int]:
        """The ranks that run on this host, and their processes."""
        here = socket.gethostname()
        return {
            connection.rank: connection.pid
            for connection in sorted(self._controls(), key=lambda one: one.rank)
            if connection.host == here
        }

    def _controls(self) -> list[_Connection]:
        """The ranks' control sockets that are still open."""
        found = [key.data for key in self._selector.get_map().values()]
        return [one for one in found if isinstance(one, _Connection) and one.stream == "control"]

    def watch(self, descriptor: int, stream: str) -> None:
        """Also show what mpirun itself says, on a pipe of its own."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, stream)

    def pump(self, timeout_s: float) -> None:
        """Handle what has arrived, waiting at most `timeout_s` for something to arrive."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                self._accept()
            elif isinstance(key.data, _Connection):
                self._read(key.data)
            else:
                self._read_launcher(key.fd, key.data)
        self.screen.show_partial_lines()

    def drain(self, timeout_s: float) -> None:
        """Read what is still on its way after mpirun has ended."""
        deadline = time.monotonic() + timeout_s
        while self.num_open and time.monotonic() < deadline:
            self.pump(0.05)
        self.pump(0.0)
        self.screen.finish()

    def close(self) -> None:
        """Close every socket."""
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        sock, _ = self._server.accept()
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))
        self.num_open += 1

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self.num_open -= 1
        if connection.rank >= 0 and connection.rank not in self.gone:
            self.gone.append(connection.rank)
        if connection.stream == "control" and connection.rank not in self._ended:
            self._ended.add(connection.rank)
            self.outcomes.append(
                Outcome(
                    rank=connection.rank,
                    host=connection.host,
                    code=-1,
                    cause=f"process {connection.pid} died unexpectedly (killed, or crashed)",
                )
            )

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        if connection.stream in ("out", "err"):
            self.screen.feed(connection.rank, connection.stream, data)
            return
        connection.pending += data
        while b"\n" in connection.pending:
            line, _, connection.pending = connection.pending.partition(b"\n")
            if not self._understand(connection, line):
                self._drop(connection)
                return
            if connection.stream in ("out", "err"):
                self.screen.feed(connection.rank, connection.stream, connection.pending)
                connection.pending = b""

    def _understand(self, connection: _Connection, line: bytes) -> bool:
        """Read an introduction or a last word; False sends a stranger away."""
        try:
            message = json.loads(line)
            if not connection.stream:
                if not secrets.compare_digest(message["token"], self.token):
                    return False
                connection.sock.send(_WELCOME)  # a fresh socket has room for a word
                connection.stream, connection.rank = message["stream"], int(message["rank"])
                connection.host, connection.pid = message["host"], int(message["pid"])
                self._present.add(connection.rank)
                self.screen.hold_launcher = len(self._present) == self.num_ranks
            else:
                self._ended.add(connection.rank)
                self.gone.append(connection.rank)
                self.outcomes.append(
                    Outcome(
                        rank=connection.rank,
                        host=connection.host,
                        code=int(message["exit"]),
                        cause=message["cause"],
                    )
                )
        except (ValueError, KeyError, TypeError, OSError):
            return False
        return True

    def _read_launcher(self, descriptor: int, stream: str) -> None:
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        if data:
            self.screen.feed(None, stream, data)
        else:
            self._selector.unregister(descriptor)
