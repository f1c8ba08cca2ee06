"""What a built Horovod is bound to, and the cache of wheels by that.

A cached wheel is there with a record of its bindings, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpctrain.install.horovod import HOROVOD_VERSION
from hpctrain.install.horovod.facts import BuildFacts, MpiFacts, PythonFacts

__all__ = [
    "RECORD_NAME",
    "bindings",
    "cache_home",
    "cache_key",
    "cached_wheel",
    "clean_leftovers",
    "differences",
    "library_place",
    "mpi_is_inside",
    "staging_folder",
    "store",
]

RECORD_NAME = "hpctrain-build.json"
_STAGING = "staging-"


def cached_wheel(home: Path) -> Path | None:
    """The finished wheel in `home`, if there is one."""
    wheels = sorted(home.glob("horovod-*.whl"))
    return wheels[0] if wheels and (home / RECORD_NAME).is_file() else None


def staging_folder(home: Path) -> Path:
    """Make an empty folder next to the final place, so that moving a wheel there is atomic."""
    folder = home / f"{_STAGING}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def store(wheel: Path, home: Path, bound: Mapping[str, str | None]) -> Path:
    """Move a finished wheel into the cache: the record first, the wheel last and at once."""
    record = wheel.parent / RECORD_NAME
    record.write_text(json.dumps(bound, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(record, home / RECORD_NAME)
    final = home / wheel.name
    os.replace(wheel, final)
    return final


def clean_leftovers(home: Path, work_root: Path, work_prefix: str) -> None:
    """Remove what killed builds of this key left behind; the caller holds the key's lock."""
    leftovers = [*home.glob(f"{_STAGING}*"), *work_root.glob(f"{work_prefix}*")]
    for folder in leftovers:
        # Only our own: in a shared /tmp another user's folder of the same name is theirs.
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


# A change in any of these breaks an installed Horovod, with a cure that is always a new build.
_BREAKING = ("torch", "torch_build", "torch_cxx11_abi", "python_abi", "mpi_family", "machine")

Bindings = Mapping[str, str | None]


def mpi_is_inside(python: PythonFacts, mpi: MpiFacts) -> bool:
    """Whether the MPI library lives in the environment itself, as the mpich wheel's does."""
    return python.private and mpi.library.is_relative_to(python.prefix)


def library_place(python: PythonFacts, mpi: MpiFacts) -> str:
    """Where the MPI library is; relative to the environment where it moves along with it."""
    if mpi_is_inside(python, mpi):
        return f"<environment>/{mpi.library.relative_to(python.prefix)}"
    return str(mpi.library)


def bindings(facts: BuildFacts) -> dict[str, str | None]:
    """Everything that the compiled extension is bound to, as plain text values."""
    return {
        "horovod": HOROVOD_VERSION,
        "torch": facts.torch.version,
        "torch_build": facts.torch.build,
        "torch_cxx11_abi": str(facts.torch.cxx11_abi),
        "python_abi": facts.python.soabi,
        "mpi_family": facts.mpi.version.family,
        "mpi_version": facts.mpi.version.version,
        "mpi_library": library_place(facts.python, facts.mpi),
        "cuda": facts.cuda.version if facts.cuda else None,
        "nccl": facts.cuda.nccl.version if facts.cuda else None,
        "machine": facts.python.machine,
        "libc": facts.python.libc,
    }


def cache_key(facts: BuildFacts) -> str:
    """A readable folder name that differs whenever one of the bindings does."""
    bound = bindings(facts)
    digest = hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()[:12]
    gpu = f"cuda{bound['cuda']}-nccl{bound['nccl']}" if facts.cuda else "cpu"
    words = [
        f"horovod{HOROVOD_VERSION}",
        f"torch{facts.torch.version}",
        facts.python.tag,
        f"{bound['mpi_family']}{bound['mpi_version']}",
        gpu,
        facts.python.machine,
        digest,
    ]
    return "_".join(re.sub(r"[^A-Za-z0-9.+-]", "-", word) for word in words)


def cache_home(environ: Mapping[str, str]) -> Path:
    """The folder of all cached Horovod wheels: under XDG_CACHE_HOME, else ~/.cache."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG rules require absolute paths; relative ones are to be ignored.
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME", "~")).expanduser()
    return (root if base.startswith("/") else root / ".cache") / "hpctrain" / "horovod"


def differences(built: Bindings, now: Bindings) -> list[str]:
    """What has changed since an installed Horovod was built; empty if it matches."""
    return [
        f"{name.replace('_', ' ')} was {built[name]} when it was built and is {now[name]} now"
        for name in _BREAKING
        if name in built and name in now and built[name] != now[name]
    ]
