"""The set-up itself, step by step; every step can be repeated, and the stamp comes last."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain import log
from hpctrain.errors import InstallError
from hpctrain.install.lock import held
from hpctrain.install.process import interruptible, kept_open
from hpctrain.install.setup import site_mpi, stamp, venv
from hpctrain.install.setup.steps import Steps

__all__ = ["inputs_of", "main", "parse"]

TORCH = "2.13.0"
_EXTRAS = ("demo", "test", "lint")
_HOROVOD_LIMIT_S = 2 * 3600.0
_EXITS = (
    "exit codes: 0 set up (also when Horovod was not built, unless --horovod yes); 1 failed; "
    "2 usage error"
)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m hpctrain.install.bootstrap",
        description="Set up a venv with torch, MPI, hpctrain and Horovod.",
        epilog=_EXITS,
    )
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="default: .venv")
    parser.add_argument(
        "--mpi",
        choices=("auto", "site", "mpich"),
        default="auto",
        help="the site's MPI, or the one from the package index; auto: as last time, else the "
        "first that works",
    )
    parser.add_argument(
        "--horovod",
        choices=("auto", "yes", "no"),
        default="auto",
        help="build Horovod: required or skipped; auto: as last time, else skip it if it fails",
    )
    parser.add_argument(
        "--torch",
        metavar="VERSION",
        default=TORCH,
        help=f"another version than {TORCH}, such as the oldest that is supported",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Set up, or find that nothing has to be done."""
    args = parse(arguments)
    checkout = Path(__file__).resolve().parents[3]
    folder = Path(os.path.abspath(args.venv))
    try:
        return _set_up(args, checkout, folder, os.environ)
    except (InstallError, OSError) as error:
        log.notice(str(error))
        return 1
    except KeyboardInterrupt:
        log.notice("interrupted; the next set-up resumes from here")
        return 130


def _set_up(
    args: argparse.Namespace, checkout: Path, folder: Path, environ: Mapping[str, str]
) -> int:
    if not (checkout / "setup.cfg").is_file():
        raise InstallError(
            f"the set-up belongs to a checkout of hpctrain, and {checkout} has no setup.cfg; in an "
            "installed hpctrain use `hpctrain horovod build`"
        )
    if not venv.may_clear(folder):
        raise InstallError(
            f"{folder} exists and is not a virtual environment; choose another place: make VENV=..."
        )
    started = time.monotonic()
    last = stamp.read(folder)
    args.mpi = stamp.as_before("mpi", args.mpi, last)
    args.horovod = stamp.as_before("horovod", args.horovod, last)
    digest = stamp.digest_of(inputs_of(args, checkout, folder, environ))
    if _is_done(args, folder, digest, environ):
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder / venv.LOCK_NAME, what=f"setting up {folder}", wait_s=3600), interruptible():
        if _is_done(args, folder, digest, environ):
            return 0
        stamp.remove(folder)
        (folder / venv.MARKER_NAME).touch()
        steps = Steps(folder / venv.LOG_NAME, environ)
        chosen = _install(args, checkout, folder, steps)
        outcome = _horovod(args.horovod, folder, environ)
        if outcome != "built" and site_mpi.installed(folder, "horovod"):
            # Of an earlier set-up, for another MPI perhaps: importing a misfit can crash.
            pip = [str(folder / "bin" / "python"), "-m", "pip"]
            steps.run("removing the earlier Horovod", [*pip, "uninstall", "-y", "horovod"])
        if outcome == "failed" and args.horovod == "yes":
            return 1
        made = stamp.Stamp(
            digest=digest,
            packages=stamp.tracked_packages(folder),
            mpi=chosen,
            horovod=outcome,
            tools=_tools(environ),
            asked={"mpi": args.mpi, "horovod": args.horovod},
        )
        stamp.write(folder, made)
    log.notice(f"set up {folder} in {time.monotonic() - started:.0f} s")
    return 0


def _is_done(
    args: argparse.Namespace, folder: Path, digest: str, environ: Mapping[str, str]
) -> bool:
    last = stamp.read(folder)
    current = stamp.is_current(
        last,
        digest=digest,
        packages=stamp.tracked_packages(folder),
        horovod=args.horovod,
        tools=_tools(environ),
    )
    if last is None or not current or not (folder / "bin" / "python").exists():
        return False
    log.notice(f"{folder} is up to date; MPI: {last.mpi}")
    if last.horovod == "failed":
        log.notice(
            "Horovod is not installed: its build failed earlier and nothing has changed since; "
            "`make setup HOROVOD=yes` tries again"
        )
    return True


def inputs_of(
    args: argparse.Namespace, checkout: Path, folder: Path, environ: Mapping[str, str]
) -> dict[str, object]:
    """Everything that the result depends on, read without starting anything."""
    site = site_mpi.find_site_mpi(environ.get("PATH", ""), folder)
    files = [site.mpicc, site.mpirun] if site and args.mpi != "mpich" else []
    base = getattr(sys, "_base_executable", "") or sys.executable
    return {
        "requirements": stamp.requirements_of((checkout / "setup.cfg").read_text(encoding="utf-8")),
        "torch": f"torch=={args.torch}",
        "extras": _EXTRAS,
        "checkout": str(checkout),
        "venv": str(folder),
        "python": [os.path.realpath(base), sys.version],
        "mpi": [args.mpi, *site_mpi.fingerprint(files)],
    }


def _tools(environ: Mapping[str, str]) -> str:
    """The compilers that a Horovod build would use, as they are now."""
    names = [environ.get("CXX", ""), "g++", "c++", "make", "nvcc"]
    found = [shutil.which(name, path=environ.get("PATH")) for name in names if name]
    return " ".join(site_mpi.fingerprint([Path(path) for path in found if path]))


def _install(args: argparse.Namespace, checkout: Path, folder: Path, steps: Steps) -> str:
    """Everything but Horovod; which MPI was chosen, and why."""
    venv.ensure_venv(folder, steps)
    dropped = venv.repair_packages(folder)
    if dropped:
        log.notice(
            f"an interrupted set-up left {', '.join(dropped)} half installed; doing it again"
        )
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install"]
    torch = f"torch=={args.torch}"
    steps.run(f"installing {torch}", [*pip, torch], limit_s=3600)
    extras = [*_EXTRAS, *([] if args.horovod == "no" else ["horovod-build"])]
    target = f"{checkout}[{','.join(extras)}]"
    steps.run(f"installing hpctrain with {', '.join(extras)}", [*pip, "-e", target])
    chosen = site_mpi.provide_mpi(folder, args.mpi, steps)
    log.notice(f"MPI: {chosen}")
    return chosen


def _horovod(option: str, folder: Path, environ: Mapping[str, str]) -> str:
    """Build and try Horovod by the verb that users have too: `built`, `failed` or `skipped`."""
    if option == "no":
        return "skipped"
    verb = [str(folder / "bin" / "hpctrain"), "horovod"]
    for action in ("build", "check"):
        if _run_verb([*verb, action], environ) != 0:
            if option == "auto":
                log.warn("continuing without Horovod; `make setup HOROVOD=yes` tries again")
            return "failed"
    return "built"


def _run_verb(command: list[str], environ: Mapping[str, str]) -> int:
    """Run a verb whose own words and progress go to the user as they are."""
    try:
        process = subprocess.Popen(command, env=dict(environ), pass_fds=kept_open())
    except OSError as error:
        log.notice(str(error))
        return 1
    try:
        return process.wait(_HOROVOD_LIMIT_S)
    except BaseException as error:
        # It ends its compilers itself on SIGTERM, and could not if it were killed.
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        if isinstance(error, subprocess.TimeoutExpired):
            log.notice(str(error))
            return 1
        raise
