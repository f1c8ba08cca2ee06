"""Asking many ranks at once, with a bound on every wait."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from hpctrain.faults.channel import Message

__all__ = [
    "UNREACHED",
    "Peer",
    "ask_all",
    "choose_address",
    "describe_process",
    "describe_stop",
    "own_addresses",
    "own_birth",
]

UNREACHED = "cannot be reached"
"""How the words begin when nobody listens there."""

_AT_ONCE = 256
_PIECE = 65536
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """How to reach a rank, and which process it is."""

    address: str
    port: int
    token: str
    pid: int
    birth: str
    """When the process started, in the kernel's words: process ids are used again."""


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
        peers: Whom to ask, by rank.
        question: What to ask; each rank's token is added.
        timeout_s: How long each rank may take.

    Returns:
        By rank the answer, or in words why there is none.
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
                    result = f"no answer in {timeout_s:g} s"
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
        return f"cannot be asked ({error.strerror or error})"
    sock.setblocking(False)
    code = sock.connect_ex((peer.address, peer.port))
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        return _connection_trouble(code)
    line = json.dumps({**question, "token": peer.token}).encode() + b"\n"
    return _Talk(rank, sock, line, time.monotonic() + timeout_s)


def _advance(talk: _Talk, selector: selectors.BaseSelector) -> Message | str | None:
    """Go on with a conversation; None when it is not over yet."""
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
        return "closed the connection without an answer"
    return answer if isinstance(answer, dict) else "gave an answer that is none"


def _connection_trouble(code: int) -> str:
    return f"{UNREACHED} ({os.strerror(code)})"


def own_birth() -> str:
    """When this process started."""
    return _read_stat(os.getpid())[1]


def describe_process(peer: Peer, *, listens: bool) -> str:
    """What the kernel of this node says about another rank's process on it."""
    state, birth = _read_stat(peer.pid)
    if not state or birth != peer.birth:
        return "its process has ended"
    if state in "RS" and not listens:
        return "its process runs, but has stopped its watchdog and makes no more calls"
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
