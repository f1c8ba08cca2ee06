"""Questions and answers between ranks beside MPI, over TCP: MPI is what hangs.

One line of JSON goes each way, then the connection is closed; who asks to stay is told when this
rank leaves. Every rank has a token of its own that travels by MPI at the start; whoever does not
know it gets no answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpctrain import log
from hpctrain.faults.stacks import THREAD_PREFIX

__all__ = ["GOODBYE", "WELCOME", "Message", "Responder"]

Message = dict[str, Any]

WELCOME = b"hello\n"
"""What those hear who ask to stay."""
GOODBYE = b"bye\n"
"""What those who stay hear when this rank leaves in order."""

_LONGEST_QUESTION = 4096
_BACKLOG = 1024
_PIECE = 65536
_MOST_GUESTS = 512


@dataclass(eq=False, slots=True)
class _Guest:
    """Someone who has connected: what is heard so far, then what is left to say."""

    sock: socket.socket
    heard: bytes = b""
    to_say: bytes = b""
    stays: bool = False
    """Whether it only waits for the goodbye."""


class Responder:
    """Answers the other ranks' questions in a daemon thread.

    Args:
        answer: Called in that thread with each question of someone who knows the token.
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
        self._guests: set[_Guest] = set()
        self._thread = threading.Thread(
            target=self._serve, name=f"{THREAD_PREFIX}-channel", daemon=True
        )
        _responders.add(self)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop answering; the thread ends within `timeout_s`."""
        self.say_goodbye()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(timeout_s)
        self._wake.close()

    def say_goodbye(self) -> None:
        """Tell those who stay that this rank leaves."""
        for guest in list(self._guests):
            if guest.stays:
                with contextlib.suppress(OSError):
                    guest.sock.send(GOODBYE)

    def forget(self) -> None:
        """Give up the sockets in a forked child, so that the parent's death can be seen."""
        for sock in (self._server, self._wake, self._woken, *(g.sock for g in self._guests)):
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
                        self._attend(key.data)
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
        if len(self._guests) >= _MOST_GUESTS:
            sock.close()
            return
        sock.setblocking(False)
        guest = _Guest(sock)
        self._guests.add(guest)
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _attend(self, guest: _Guest) -> None:
        try:
            if self._converse(guest):
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # it has gone
        self._selector.unregister(guest.sock)
        self._guests.discard(guest)
        guest.sock.close()

    def _converse(self, guest: _Guest) -> bool:
        """Go on with a conversation; False ends it."""
        if guest.to_say:
            guest.to_say = guest.to_say[guest.sock.send(guest.to_say[:_PIECE]) :]
            if guest.stays and not guest.to_say:
                self._selector.modify(guest.sock, selectors.EVENT_READ, guest)
            return guest.stays or bool(guest.to_say)
        data = guest.sock.recv(_LONGEST_QUESTION)
        if guest.stays:
            return bool(data)
        guest.heard += data
        if b"\n" not in guest.heard:
            return bool(data) and len(guest.heard) < _LONGEST_QUESTION
        question = self._read(guest.heard.partition(b"\n")[0])
        guest.stays = question is not None and question.get("ask") == "stay"
        guest.to_say = WELCOME if guest.stays else self._reply(question)
        self._selector.modify(guest.sock, selectors.EVENT_WRITE, guest)
        return bool(guest.to_say)

    def _read(self, line: bytes) -> Message | None:
        """A question; None from a stranger."""
        try:
            question = json.loads(line)
            token = str(question["token"]).encode()
        except (ValueError, KeyError, TypeError):
            return None
        known = secrets.compare_digest(token, self.token.encode())
        return question if known and isinstance(question, dict) else None

    def _reply(self, question: Message | None) -> bytes:
        """The answer to a question, or nothing for a stranger."""
        if question is None:
            return b""
        try:
            reply = self._answer(question)
        except Exception as error:  # this thread must go on answering
            log.warn(f"the watchdog cannot answer another rank: {error!r}")
            return b""
        return json.dumps(reply).encode() + b"\n"


_responders: weakref.WeakSet[Responder] = weakref.WeakSet()


def _forget_all() -> None:
    for responder in list(_responders):
        responder.forget()
    _responders.clear()


os.register_at_fork(after_in_child=_forget_all)
