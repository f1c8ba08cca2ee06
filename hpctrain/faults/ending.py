"""The end of a job whose collective does not end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from typing import NoReturn

from hpctrain.exit_codes import DIED, TIMED_OUT
from hpctrain.world import Launch, abort, report_exit, say_farewell

__all__ = ["DIED", "EXIT_CODE", "end_all_ranks"]

EXIT_CODE = TIMED_OUT

_ABORT_S = 5


def end_all_ranks(launch: Launch, text: str, cause: str, *, code: int = EXIT_CODE) -> NoReturn:
    """Print `text` and end every rank of the job, from a thread while others are inside MPI.

    `hpctrain run` is told first; where MPI cannot even abort, this process ends all the same.
    """
    with contextlib.suppress(OSError, ValueError):
        # A timer without Python: MPI_Abort may hang while it holds Python's lock.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(_ABORT_S, exit=True, file=nowhere)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
    report_exit(launch, code, cause)
    say_farewell()
    abort(code)
