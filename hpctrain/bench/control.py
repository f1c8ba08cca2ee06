"""Launches that stay alive together, of which one at a time is awake.

Each rank of a launch waits on a socket of its own for what to do, never in MPI, where waiting
spins. That is not enough for Horovod, whose background thread calls MPI every millisecond whether
there is work or not; so the ranks of a launch that is not measuring are stopped (SIGSTOP) and use
no CPU at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from hpctrain.bench.results import ROOT
from hpctrain.errors import LaunchError

__all__ = ["Message", "WorkerLaunch"]

Message = dict[str, Any]
_POLL_S = 0.2
_END_S = 20.0
_TAIL_CHARACTERS = 4000
_PR_SET_PDEATHSIG = 1


class WorkerLaunch:
    """One `hpctrain run` of a benchmark's worker side, and its ranks.

    Args:
        name: For messages.
        module: The benchmark; started with `--worker ADDRESS` and the variants.
        num_ranks: How many ranks.
        num_threads: Of each rank.
        bind: `numa` keeps each rank on cores of its own.
        variants: What this launch can measure.
        environ: Variables that this launch needs besides ours.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        num_ranks: int,
        variants: Sequence[str],
        environ: Mapping[str, str],
        num_threads: int = 1,
        bind: str = "none",
    ) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self._pids: list[int] = []
        self._lines: list[socket.socket] = []
        self._token = secrets.token_hex(8)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(_POLL_S)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 closed in close()
        address = f"127.0.0.1:{self._server.getsockname()[1]}:{self._token}:{bind}"
        run = [sys.executable, "-m", "hpctrain", "run", "-n", str(num_ranks), "-m", module]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [*run, "--worker", address, "--variants", ",".join(variants)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": path, **environ},
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )

    def wait_until_started(self, timeout_s: float) -> list[Message]:
        """Wait until every rank has connected; what each said of itself, by rank."""
        hellos: dict[int, tuple[Message, socket.socket]] = {}
        deadline = time.monotonic() + timeout_s
        while len(hellos) < self.num_ranks:
            self._check_alive(deadline, "did not start")
            try:
                line, _ = self._server.accept()
            except TimeoutError:
                continue
            hello = self._receive(line, deadline)
            if hello.get("token") == self._token:
                hellos[int(hello["rank"])] = (hello, line)
            else:
                line.close()
        ordered = [hellos[rank] for rank in range(self.num_ranks)]
        self._lines = [line for _, line in ordered]
        self._pids = [int(hello["pid"]) for hello, _ in ordered]
        self.pause()
        return [hello for hello, _ in ordered]

    def ask(self, message: Message, *, timeout_s: float) -> list[Message]:
        """Wake the ranks, let all of them do something, stop them; their answers by rank."""
        deadline = time.monotonic() + timeout_s
        self.resume()
        text = json.dumps(message).encode() + b"\n"
        for line in self._lines:
            line.sendall(text)
        answers = [self._receive(line, deadline) for line in self._lines]
        self.pause()
        return answers

    def pause(self) -> None:
        """Stop the ranks where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the ranks run."""
        self._signal(signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to this launch."""
        top = psutil.Process(self._process.pid)
        return [top, *top.children(recursive=True)]

    def disconnect(self) -> None:
        """Tell the ranks to leave, without waiting until they have."""
        self.resume()
        for line in self._lines:
            line.close()

    def close(self) -> None:
        """Let the ranks leave in order, and end what does not."""
        self.disconnect()
        self._server.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)  # `hpctrain run` ends its ranks at once
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_S)
            self._process.kill()
            self._process.wait(timeout=_END_S)
        self._said.close()

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _receive(self, line: socket.socket, deadline: float) -> Message:
        line.settimeout(_POLL_S)
        received = b""
        while not received.endswith(b"\n"):
            try:
                data = line.recv(65536)
            except (TimeoutError, ConnectionResetError):
                data = None
            if data == b"":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_END_S)
                raise LaunchError(f"launch {self.name}: a rank has exited\n{self._tail()}")
            received += data or b""
            self._check_alive(deadline, "did not answer")
        answer: Message = json.loads(received)
        return answer

    def _check_alive(self, deadline: float, trouble: str) -> None:
        if self._process.poll() is not None:
            code = self._process.returncode
            raise LaunchError(f"launch {self.name} ended with code {code}\n{self._tail()}")
        if time.monotonic() > deadline:
            raise LaunchError(f"launch {self.name} {trouble} in time\n{self._tail()}")

    def _tail(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-_TAIL_CHARACTERS:]


def _end_with_parent() -> None:
    """Have this child killed when we are killed: nothing else would wake its stopped ranks."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
