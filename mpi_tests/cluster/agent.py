"""A stand-in for ssh that enters a test node, for launchers that reach nodes with rsh or ssh."""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["write_agent"]

# As ssh does: options, host, then words that are joined for a shell, which starts in the home
# directory without the caller's environment.
AGENT = """#!/bin/sh
while :; do
    case "$1" in
        -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=${1#*@}
shift
pid=$(cat DIRECTORY/"$host" 2>/dev/null) || { echo "no node $host" >&2; exit 255; }
exec nsenter -t "$pid" -n -u -m -i -- env -i -C "$HOME" HOME="$HOME" USER="${USER:-root}" \\
    SHELL=/bin/sh PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -c "$*"
"""


def write_agent(path: Path, process_ids: Path) -> None:
    """Writes the program.

    Args:
        path: Where to.
        process_ids: A directory with one file for each host, which holds the id of a process
            that lives there.
    """
    path.write_text(AGENT.replace("DIRECTORY", shlex.quote(str(process_ids))), encoding="utf-8")
    path.chmod(0o755)
