"""The MPI implementations: how each names itself, whose launcher starts whose programs. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["MpiVersion", "identify"]

# Most specific first: Cray, Intel and MVAPICH all derive from MPICH and may mention it.
_FAMILIES = (
    ("openmpi", r"\(?Open MPI\)?[^\d\n]*(\d+(?:\.\d+)+)"),
    ("openmpi", r"(?:prterun|PRRTE)[^\d\n]*(\d+(?:\.\d+)+)"),
    ("cray", r"CRAY MPICH[^\d\n]*(\d+(?:\.\d+)+)"),
    ("intel", r"Intel\(R\) MPI Library.*?(?:Version )?(\d+(?:\.\d+)+)"),
    ("mvapich", r"MVAPICH2?[^\d\n]*Version[^\d\n]*(\d+(?:\.\d+)+)"),
    ("mpich", r"MPICH[^\d\n]*Version[^\d\n]*(\d+(?:\.\d+)+)"),
    ("mpich", r"HYDRA build details:\s+Version:\s*(\d+(?:\.\d+)+)"),
)
_TITLES = {
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intel": "Intel MPI",
    "mvapich": "MVAPICH",
    "cray": "Cray MPICH",
    "unknown": "an unknown MPI",
}
# Families whose launchers start each other's programs: all speak Hydra's PMI.
_PMI_FAMILIES = frozenset({"mpich", "intel", "mvapich"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiVersion:
    """An MPI implementation and its version, as read from its own words."""

    family: str
    version: str

    def __str__(self) -> str:
        return f"{_TITLES[self.family]} {self.version}".rstrip()

    def starts(self, loaded: MpiVersion) -> bool:
        """Whether a launcher of this version can start programs that load `loaded`."""
        if self.family in _PMI_FAMILIES and loaded.family in _PMI_FAMILIES:
            return True
        return self.family == loaded.family and _major(self.version) == _major(loaded.version)


def identify(version_text: str) -> MpiVersion:
    """Read family and version from a launcher's `--version` or MPI_Get_library_version."""
    for family, pattern in _FAMILIES:
        match = re.search(pattern, version_text, re.IGNORECASE)
        if match:
            return MpiVersion(family=family, version=match.group(1))
    return MpiVersion(family="unknown", version="")


def _major(version: str) -> str:
    return version.split(".", 1)[0]
