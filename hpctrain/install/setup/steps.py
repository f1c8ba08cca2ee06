"""One line a step with its time; the details in a log file, shown only when a step fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.errors import InstallError
from hpctrain.install.process import TooLongError, run_logged

__all__ = ["Steps"]

_TAIL_LINES = 20


class Steps:
    """Runs the commands of a set-up and reports how each one ended."""

    def __init__(self, log_file: Path, environ: Mapping[str, str]) -> None:
        self.log_file = log_file
        self.environ = environ
        log_file.write_text("", encoding="utf-8")

    def attempt(
        self,
        title: str,
        command: Sequence[str],
        *,
        limit_s: float = 1800.0,
        env: Mapping[str, str] | None = None,
    ) -> bool:
        """Run a command that may fail; whether it succeeded."""
        started = time.monotonic()
        print(f"hpctrain: {title} ...", end="", file=sys.stderr, flush=True)
        outcome = "interrupted"
        try:
            code = run_logged(
                command, log_file=self.log_file, env=env or self.environ, limit_s=limit_s
            )
            outcome = "done" if code == 0 else "failed"
        except TooLongError:
            outcome = f"ended at its limit of {limit_s:.0f} s"
        except OSError as error:
            outcome = f"failed: {error}"
        finally:
            seconds = time.monotonic() - started
            print(f" {outcome}, {seconds:.1f} s", file=sys.stderr, flush=True)
        return outcome == "done"

    def run(self, title: str, command: Sequence[str], *, limit_s: float = 1800.0) -> None:
        """Run a command that must succeed.

        Raises:
            InstallError: it failed; the message ends with the last lines of its output.
        """
        if not self.attempt(title, command, limit_s=limit_s):
            raise InstallError(f"{title} failed. {self.tail()}")

    def tail(self) -> str:
        """The end of the log, and where the rest of it is."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
        return f"The whole log is {self.log_file}; it ends with:\n{end}"
