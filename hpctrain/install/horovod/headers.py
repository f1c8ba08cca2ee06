"""Python's C headers, which Debian and Ubuntu ship in a package of their own.

Without root the package can still be downloaded and unpacked into the build's private folder.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpctrain.install.horovod.facts import PythonFacts

__all__ = ["fetch_headers", "header_folders"]


def header_folders(python: PythonFacts, unpacked: Path) -> list[Path]:
    """Pure: where the headers are, the interpreter's own folder first, then an unpacked package.

    Debian's pyconfig.h includes another by a path that starts at usr/include.
    """
    inside = unpacked / "usr" / "include"
    return [python.include, inside / python.include.name, inside]


def fetch_headers(python: PythonFacts, folder: Path, environ: Mapping[str, str]) -> bool:
    """Make sure that Python.h is to be had, unpacking the distribution's package if need be.

    Returns:
        Whether the headers are there now. Never raises: the build's own error is clearer.
    """
    if (python.include / "Python.h").is_file():
        return True
    tools = [shutil.which(name, path=environ.get("PATH")) for name in ("apt-get", "dpkg-deb")]
    # Only the distribution's own interpreter fits the distribution's headers.
    if None in tools or not str(python.include).startswith("/usr/include/"):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    package = f"lib{python.include.name}-dev"
    commands = [
        (["apt-get", "-q", "download", package], 120),
        (["sh", "-c", f'for file in {package}_*.deb; do dpkg-deb -x "$file" .; done'], 60),
    ]
    for command, limit_s in commands:
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, timeout=limit_s, env=dict(environ)
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        if done.returncode != 0:
            return False
    return (folder / "usr" / "include" / python.include.name / "Python.h").is_file()
