"""One archive of a virtual environment: ranks read one file, not a hundred thousand.

A parallel file system answers slowly when every rank imports torch from it. The archive goes to
each node's own disk and is unpacked there (`hpctrain job render --pack`).
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from hpctrain.atomic import replacing
from hpctrain.errors import ConfigError

__all__ = ["outside_paths", "pack_environment", "relocatable"]

_MODES = {".tar": "w", ".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz"}
_LONGEST_SCRIPT_BYTES = 1 << 20
_START = re.compile(rb"#!\s*(/[^\n ]*)/(python[\d.]*)[^\n]*\n")
# What pip writes where the path is long or has a blank in it.
_LONG_START = re.compile(
    rb"#!/bin/sh\n'''exec' \"?(/[^\n\"]*)/(python[\d.]*)\"? \"\$0\" \"\$@\"\n' '''\n"
)


def pack_environment(prefix: Path, archive: Path) -> int:
    """Write the archive and return the number of entries; it is complete or not there.

    Args:
        prefix: A virtual environment.
        archive: Where to; `.tar` unpacks fastest, `.tar.gz` is smaller.

    Raises:
        ConfigError: it is not a virtual environment, or the archive cannot be written.
    """
    if not (prefix / "pyvenv.cfg").is_file():
        hint = "; conda environments: conda-pack" if (prefix / "conda-meta").is_dir() else ""
        raise ConfigError(f"{prefix} is not a virtual environment (no pyvenv.cfg){hint}")
    if archive.suffix not in _MODES:
        raise ConfigError(f"{archive} must end in .tar, .tar.gz or .tar.xz")
    count = 0
    try:
        with (
            replacing(archive) as draft,
            tarfile.open(draft, _MODES[archive.suffix]) as out,  # type: ignore[call-overload]
        ):
            for path in _walk(prefix):
                if path.absolute() in (archive.absolute(), draft.absolute()):
                    continue
                _add(out, prefix, path)
                count += 1
    except OSError as error:
        raise ConfigError(f"{archive} cannot be written: {error}") from error
    return count


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def _add(out: tarfile.TarFile, prefix: Path, path: Path) -> None:
    info = out.gettarinfo(path, str(path.relative_to(prefix)))
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    if info.islnk():  # a second name of a file: the copy stands on its own
        info.type, info.size = tarfile.REGTYPE, path.stat().st_size
    if info.issym() and Path(info.linkname).is_absolute():
        target = Path(info.linkname)
        if target.is_relative_to(prefix):
            info.linkname = os.path.relpath(target, path.parent)
    if not info.isreg():
        out.addfile(info)
        return
    if path.parent == prefix / "bin" and info.size <= _LONGEST_SCRIPT_BYTES:
        data = relocatable(path.read_bytes(), prefix)
        info.size = len(data)
        out.addfile(info, io.BytesIO(data))
        return
    with path.open("rb") as file:
        out.addfile(info, file)


def relocatable(script: bytes, prefix: Path) -> bytes:
    """A script of the environment that finds its interpreter next to itself, in any location."""
    match = _LONG_START.match(script) or _START.match(script)
    # Home directories have several names: what counts is where they lead.
    if match is None or Path(os.fsdecode(match.group(1))).resolve() != (prefix / "bin").resolve():
        return script
    # To sh the second line runs the interpreter; to Python lines two and three are a string.
    begin = b"#!/bin/sh\n'''exec' \"$(dirname -- \"$0\")/%s\" \"$0\" \"$@\"\n' '''\n"
    return begin % match.group(2) + script[match.end() :]


def outside_paths(prefix: Path) -> list[str]:
    """What the environment imports from and the archive has not: editable installs."""
    found: list[str] = []
    for path in sorted(prefix.glob("lib/python*/site-packages/*.pth")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("/") and not Path(line).is_relative_to(prefix):
                found.append(line)
    for path in sorted(prefix.glob("lib/python*/site-packages/__editable___*_finder.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        found += re.findall(r"^MAPPING\b.*?= \{.*?'(/[^']*)'", text, re.MULTILINE) or [str(path)]
    return found
