"""Runs another program with a time limit and reads its output; its children end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Answer", "ask", "end_group"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """How a program ended, and its output."""

    code: int | None
    """Its exit code; None when it did not start or did not end in time."""
    out: str = ""
    err: str = ""
    """Its standard error, or why it did not start."""
    hung: bool = False
    """Whether it was killed at the time limit."""
    missing: bool = False
    """Whether there is no such program."""

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.code == 0

    @property
    def reason(self) -> str:
        """Why it failed, in one line: the last line of its output."""
        if self.hung:
            return self.err
        if self.code is not None and self.code < 0:
            return f"it died of signal {-self.code}"
        lines = [line.strip() for line in (self.out + "\n" + self.err).splitlines()]
        return next((line for line in reversed(lines) if line.strip("-= ")), "no output")

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects it printed, one per line; other output is skipped."""
        found = []
        for line in self.out.splitlines():
            try:
                value = json.loads(line[line.index("{") :])
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found


def ask(
    command: Sequence[str],
    *,
    limit_s: float,
    environ: Mapping[str, str] | None = None,
    stdin: Path | None = None,
) -> Answer:
    """Run a program until it ends or reaches the time limit; never through a shell.

    Args:
        command: The program and its arguments.
        limit_s: Then it is killed, with all processes of its group.
        environ: Its environment; this process's own where none is given.
        stdin: The file that it reads; nothing where none is given.
    """
    try:
        with open(stdin or os.devnull, "rb") as given:
            process = subprocess.Popen(
                list(command),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return Answer(code=None, err=f"{command[0]} does not start: {error}", missing=missing)
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end_group(process.pid)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()  # not read to its end: a process that left the group may hold it
        return Answer(code=None, err=f"no answer within {limit_s:g} s", hung=True)
    except BaseException:
        end_group(process.pid)
        raise
    return Answer(code=process.returncode, out=out, err=err)


def end_group(pid: int) -> None:
    """Kill a process that leads its group, with all processes of the group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
