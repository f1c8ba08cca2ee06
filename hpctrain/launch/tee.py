"""A helper process of each rank that copies its output to a file, whole lines, and passes it on.

It has its own session and reads until the rank is gone, so a killed rank's last words are kept. Run
as a script with the bare interpreter: it must start in milliseconds.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys

__all__ = ["copy"]


def copy(path: str, out: int, err: int) -> None:
    """Copy what comes on two descriptors to our own output and error, and to one file."""
    pending = {out: b"", err: b""}
    target = {out: 1, err: 2}
    with selectors.DefaultSelector() as selector, open(path, "ab", buffering=0) as file:
        for descriptor in pending:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                    file.write(pending[key.fd])
                    continue
                _pass_on(target[key.fd], data)
                lines, newline, rest = (pending[key.fd] + data).rpartition(b"\n")
                file.write(lines + newline)
                pending[key.fd] = rest


def _pass_on(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError:
            return  # the pipe is closed; the file still gets it


if __name__ == "__main__":
    # Killing the rank by its group must not cut off its last output, and srun passes a warning
    # to every process of the job.
    for warning in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, warning), signal.SIG_IGN)
    copy(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
