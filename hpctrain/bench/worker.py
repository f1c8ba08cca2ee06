"""A rank's side of a benchmark: waits on a socket, and measures on request."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import hpctrain as hpc
from hpctrain.world import World, keep_freed_memory

__all__ = ["Measurable", "serve"]

_CONNECT_S = 60.0


class Measurable(Protocol):
    """Something to measure, on one rank."""

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: get ready for a case, warm up, and tell what is known of it beforehand."""

    def run(self, repeats: int) -> None:
        """Collective: do it this many times."""

    def counts(self) -> dict[str, int]:
        """What has been counted so far, such as messages."""

    def finish(self) -> dict[str, object]:
        """Collective: check the outcome, tell it, and let the case's memory go."""


def serve(
    address: str,
    variants: Sequence[str],
    make: Callable[[World, str], Measurable],
    *,
    device: str = "cpu",
) -> None:
    """Collective: be a worker until the orchestrator disconnects.

    Args:
        address: HOST:PORT:TOKEN of the orchestrator, and :BIND as `hpctrain.init` takes it.
        variants: The variants of this launch.
        make: Makes the subject of a variant.
        device: Where to measure, as `hpctrain.init` takes it.
    """
    host, port, token, bind = address.split(":")
    keep_freed_memory()  # as training with hpctrain does
    with hpc.init(seed=7, device=device, bind=bind) as world:
        subjects = {variant: make(world, variant) for variant in variants}
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as line:
            line.settimeout(None)
            _send(
                line,
                {"token": token, "rank": world.rank, "pid": os.getpid(), "mpi": world.mpi},
            )
            with line.makefile("r") as asked:
                for text in asked:  # sleeps in the kernel, not in MPI
                    message = json.loads(text)
                    _send(line, _execute(world, subjects[message["variant"]], message))


def _execute(world: World, subject: Measurable, message: dict[str, Any]) -> dict[str, object]:
    if message["do"] == "prepare":
        return {"facts": subject.prepare(message["case"])}
    if message["do"] == "finish":
        return {"outcome": subject.finish()}
    return _measure(world, subject, message["warmup"], message["repeats"])


def _measure(world: World, subject: Measurable, warmup: int, repeats: int) -> dict[str, object]:
    subject.run(warmup)  # caches are cold after a stop
    before = subject.counts()
    world.comm.Barrier()
    started = time.perf_counter()
    subject.run(repeats)
    seconds = time.perf_counter() - started
    after = subject.counts()
    return {"seconds": seconds, "counts": {name: after[name] - before[name] for name in after}}


def _send(line: socket.socket, message: dict[str, object]) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")
