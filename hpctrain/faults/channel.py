"""Messages between ranks outside MPI, over TCP: MPI is what hangs.

One line of JSON goes each way, then the connection is closed (`Responder`, `ask_all`). A peer that
stays connected is notified when this rank exits; a connection that ends without that message is a
process that died (`PeerLink`). Every rank has its own token, which is sent by MPI at the start;
a connection that does not present it gets no reply.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain import log
from hpctrain.faults.calls import THREAD_PREFIX

__all__ = ["GOODBYE", "UNREACHED", "WELCOME", "Message", "Peer", "PeerLink", "Responder", "ask_all"]

Message = dict[str, Any]

WELCOME = b"hello\n"
"""The reply to a peer that wants to stay connected."""
GOODBYE = b"bye\n"
"""Sent to connected peers when this rank exits normally."""
UNREACHED = "cannot be reached"
"""How the reason begins when no process listens there."""

_LONGEST_QUESTION = 4096
_BACKLOG = 1024
_PIECE = 65536
_MOST_CLIENTS = 512
_AT_ONCE = 256
_MOST_BYTES = 16 << 20
_CONNECT_S = 10.0
# A lost node sends nothing: the kernel probes after five silent seconds, five times.
_KEEPALIVE = ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """How to reach a rank, and which process it is."""

    address: str
    port: int
    token: str
    pid: int
    birth: str
    """When the process started, from the kernel: process ids are reused."""


@dataclass(eq=False, slots=True)
class _Client:
    """A connection: what was received so far, then what is left to send."""

    sock: socket.socket
    heard: bytes = b""
    to_say: bytes = b""
    stays: bool = False
    """Whether it only waits for the exit message."""


class Responder:
    """Answers the other ranks' questions in a daemon thread.

    Args:
        answer: Called in that thread with each request that has the token.
        remote: Whether there are ranks on other nodes; if not, only this machine can connect.
    """

    def __init__(self, answer: Callable[[Message], Message], *, remote: bool) -> None:
        self.token = secrets.token_hex(16)
        self._answer = answer
        self._server = socket.create_server(("" if remote else "127.0.0.1", 0), backlog=_BACKLOG)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._clients: set[_Client] = set()
        self._thread = threading.Thread(
            target=self._serve, name=f"{THREAD_PREFIX}-channel", daemon=True
        )
        _responders.add(self)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop answering; the thread ends within `timeout_s`."""
        self.announce_exit()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(timeout_s)
        self._wake.close()

    def announce_exit(self) -> None:
        """Tell peers that stay connected that this rank leaves."""
        for client in list(self._clients):
            if client.stays:
                with contextlib.suppress(OSError):
                    client.sock.send(GOODBYE)

    def forget(self) -> None:
        """Give up the sockets in a forked child, so that the parent's death can be seen."""
        for sock in (self._server, self._wake, self._woken, *(c.sock for c in self._clients)):
            sock.close()

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._server:
                        self._welcome()
                    else:
                        self._serve_client(key.data)
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()

    def _welcome(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:
            return  # it has gone again
        if len(self._clients) >= _MOST_CLIENTS:
            sock.close()
            return
        sock.setblocking(False)
        client = _Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _serve_client(self, client: _Client) -> None:
        try:
            if self._converse(client):
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # it has gone
        self._selector.unregister(client.sock)
        self._clients.discard(client)
        client.sock.close()

    def _converse(self, client: _Client) -> bool:
        """Read or write what is possible now; False ends the connection."""
        if client.to_say:
            client.to_say = client.to_say[client.sock.send(client.to_say[:_PIECE]) :]
            if client.stays and not client.to_say:
                self._selector.modify(client.sock, selectors.EVENT_READ, client)
            return client.stays or bool(client.to_say)
        data = client.sock.recv(_LONGEST_QUESTION)
        if client.stays:
            return bool(data)
        client.heard += data
        if b"\n" not in client.heard:
            return bool(data) and len(client.heard) < _LONGEST_QUESTION
        question = self._read(client.heard.partition(b"\n")[0])
        client.stays = question is not None and question.get("ask") == "stay"
        client.to_say = WELCOME if client.stays else self._reply(question)
        self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        return bool(client.to_say)

    def _read(self, line: bytes) -> Message | None:
        """A question; None where the token is missing or wrong."""
        try:
            question = json.loads(line)
            token = str(question["token"]).encode()
        except (ValueError, KeyError, TypeError):
            return None
        known = secrets.compare_digest(token, self.token.encode())
        return question if known and isinstance(question, dict) else None

    def _reply(self, question: Message | None) -> bytes:
        """The reply to a question; nothing where the token was wrong."""
        if question is None:
            return b""
        try:
            reply = self._answer(question)
        except Exception as error:  # this thread must keep answering
            log.warn(f"the watchdog failed to reply to another rank: {error!r}")
            return b""
        return json.dumps(reply).encode() + b"\n"


_responders: weakref.WeakSet[Responder] = weakref.WeakSet()


def _forget_all() -> None:
    for responder in list(_responders):
        responder.forget()
    _responders.clear()


os.register_at_fork(after_in_child=_forget_all)


@dataclass(eq=False, slots=True)
class _Talk:
    """One conversation under way."""

    rank: int
    sock: socket.socket
    to_say: bytes
    deadline: float
    heard: bytes = b""


def ask_all(
    peers: Mapping[int, Peer], question: Message, *, timeout_s: float
) -> dict[int, Message | str]:
    """Put a question to ranks, many at a time.

    Args:
        peers: The peers to query, by rank.
        question: The request; each rank's token is added.
        timeout_s: How long each rank may take.

    Returns:
        By rank the reply, or why there is none.
    """
    answers: dict[int, Message | str] = {}
    queue = sorted(peers, reverse=True)
    talks: set[_Talk] = set()
    with selectors.DefaultSelector() as selector:
        while queue or talks:
            while queue and len(talks) < _AT_ONCE:
                rank = queue.pop()
                talk = _begin(rank, peers[rank], question, timeout_s)
                if isinstance(talk, str):
                    answers[rank] = talk
                else:
                    talks.add(talk)
                    selector.register(talk.sock, selectors.EVENT_WRITE, talk)
            if not talks:
                continue
            first = min(talk.deadline for talk in talks)
            events = selector.select(max(0.0, first - time.monotonic()))
            ready = {key.data for key, _ in events}
            now = time.monotonic()
            for talk in list(talks):
                result = _advance(talk, selector) if talk in ready else None
                if result is None and now >= talk.deadline:
                    result = f"no reply within {timeout_s:g} s"
                if result is not None:
                    answers[talk.rank] = result
                    talks.discard(talk)
                    selector.unregister(talk.sock)
                    talk.sock.close()
    return answers


def _begin(rank: int, peer: Peer, question: Message, timeout_s: float) -> _Talk | str:
    try:
        family = socket.AF_INET6 if ":" in peer.address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return f"cannot be queried ({error.strerror or error})"
    sock.setblocking(False)
    code = sock.connect_ex((peer.address, peer.port))
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        return _connection_trouble(code)
    line = json.dumps({**question, "token": peer.token}).encode() + b"\n"
    return _Talk(rank, sock, line, time.monotonic() + timeout_s)


def _advance(talk: _Talk, selector: selectors.BaseSelector) -> Message | str | None:
    """Read or write what is possible now; None while the reply is incomplete."""
    try:
        if talk.to_say:
            code = talk.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return _connection_trouble(code)
            talk.to_say = talk.to_say[talk.sock.send(talk.to_say) :]
            if not talk.to_say:
                selector.modify(talk.sock, selectors.EVENT_READ, talk)
            return None
        data = talk.sock.recv(_PIECE)
    except BlockingIOError:
        return None
    except OSError as error:
        return _connection_trouble(error.errno or 0)
    talk.heard += data
    if data and b"\n" not in data and len(talk.heard) < _MOST_BYTES:
        return None
    try:
        answer = json.loads(talk.heard)
    except ValueError:
        return "closed the connection without a reply"
    return answer if isinstance(answer, dict) else "sent a malformed reply"


def _connection_trouble(code: int) -> str:
    return f"{UNREACHED} ({os.strerror(code)})"


class PeerLink:
    """A connection to one peer that shows at once when its process dies.

    Most launchers end all ranks when one of them is killed, but not all do, and few say which one
    it was. The kernel closes a dead process's sockets: a connection that ends without an exit
    message shows more than any timeout. Nothing is sent while both live.

    Args:
        peer: The process to watch.
        died: Called in the thread that watches when it is gone without an exit message.

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
            # Its reply is not waited for: it may be in an MPI call that holds Python's lock until
            # this rank comes, too.
            self._sock.settimeout(None)
        except OSError:
            self._sock.close()
            raise
        self._thread = threading.Thread(
            target=self._listen, name=f"{THREAD_PREFIX}-link", daemon=True
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
