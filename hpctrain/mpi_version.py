"""The MPI implementations: how each names itself, and what starts its programs. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["MpiVersion", "choose_plugin", "identify"]

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
# What srun's --mpi may be for each, best first; a name also stands for its versions (pmix_v4).
_PLUGINS = {
    "openmpi": ("pmix",),
    # Slurm's plugin pmi2 serves PMI-1 as well, which is what MPICH speaks unless told otherwise:
    # from MPICH 5 on PMI-2 itself is deprecated.
    "mpich": ("pmi2",),
    "mvapich": ("pmi2",),
    "intel": ("pmi2",),
    "cray": ("cray_shasta", "cray", "pmi2"),
}
# Families whose launchers start each other's programs: all speak Hydra's PMI.
_PMI_FAMILIES = frozenset({"mpich", "intel", "mvapich"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiVersion:
    """An MPI implementation and its version, as read from its own words."""

    family: str
    version: str
    configure: str = field(default="", compare=False, repr=False)
    """The options that an MPICH says it was built with."""

    @property
    def srun_plugins(self) -> tuple[str, ...]:
        """What srun's `--mpi` may be for it, best first; none where that is not known.

        An MPICH that was built with PMIx needs PMIx: its own PMI is then left out, unless that was
        asked for as well.
        """
        usual = _PLUGINS.get(self.family, ())
        if self.family not in ("mpich", "mvapich"):
            return usual
        options = self.configure.replace("'", " ").replace('"', " ").split()
        has_pmix = any(re.fullmatch(r"--with-pmix(=(?!no$).*)?", word) for word in options)
        keeps_own = any(re.fullmatch(r"--with-pmilib=(mpich|install)", word) for word in options)
        return ("pmix", *(usual if keeps_own else ())) if has_pmix else usual

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
            built = re.search(r"^MPICH configure:[ \t]*(.*)$", version_text, re.MULTILINE)
            options = built.group(1) if built else ""
            return MpiVersion(family=family, version=match.group(1), configure=options)
    return MpiVersion(family="unknown", version="")


def _major(version: str) -> str:
    return version.split(".", 1)[0]


def choose_plugin(mpi: MpiVersion, offered: Collection[str]) -> str | None:
    """Choose srun's `--mpi` for an MPI from what srun offers; None when nothing fits."""
    for wanted in mpi.srun_plugins:
        if wanted in offered:
            return wanted
        versions = sorted(name for name in offered if name.startswith(f"{wanted}_"))
        if versions:
            return versions[-1]
    return None
