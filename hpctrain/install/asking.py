"""Asks another program something, for at most so long; whatever it started ends with it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.install.process import end_group

__all__ = ["Answer", "ask"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a program said.

    Attributes:
        code: Its exit code; None when it did not start or did not end in time.
        out: Its standard output.
        err: Its standard error, or why it did not start.
        hung: Whether it was ended because its time was over.
    """

    code: int | None
    out: str = ""
    err: str = ""
    hung: bool = False

    @property
    def ok(self) -> bool:
        """Whether it ended well."""
        return self.code == 0

    @property
    def reason(self) -> str:
        """Why it failed, in one line: the last thing it said."""
        if self.hung:
            return self.err
        if self.code is not None and self.code < 0:
            return f"it died of signal {-self.code}"
        lines = [line.strip() for line in (self.out + "\n" + self.err).splitlines()]
        return next((line for line in reversed(lines) if line.strip("-= ")), "no output")

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects it printed, one a line; anything else on its output is passed over."""
        found = []
        for line in self.out.splitlines():
            try:
                value = json.loads(line[line.index("{") :])
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found


def ask(command: Sequence[str], *, environ: Mapping[str, str], limit_s: float) -> Answer:
    """Run a program to its end, or to the limit."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        return Answer(code=None, err=f"{command[0]} does not start: {error}")
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
