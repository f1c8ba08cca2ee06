"""`hpctrain horovod build|check`: Horovod for exactly the torch and MPI of this environment."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain import log
from hpctrain.errors import InstallError

__all__ = ["HELP", "add_arguments", "main"]

HELP = "build Horovod for this torch and MPI, or check the one that is installed"

_BUILD = (
    "Compile Horovod for exactly the torch, MPI and, where found, CUDA and NCCL of this Python; "
    "keep the wheel in a cache and install it."
)
_CHECK = (
    "Check whether the installed Horovod can be imported, what it was built with and linked to, "
    "whether that matches what is installed now, and whether two ranks can allreduce with it."
)
_BUILD_EXITS = "exit codes: 0 built and installed; 1 failed (the cause is printed); 2 usage error"
_CHECK_EXITS = "exit codes: 0 works; 1 broken; 2 usage error; 3 not installed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's two actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="build|check")
    build = actions.add_parser(
        "build", help="compile, cache and install it", description=_BUILD, epilog=_BUILD_EXITS
    )
    build.add_argument(
        "--sdist",
        type=Path,
        metavar="FILE",
        help="Horovod's source archive, if there is no network",
    )
    build.add_argument(
        "--cuda",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="require CUDA and NCCL, or build without NCCL (default: if they are usable)",
    )
    build.add_argument("--jobs", type=int, metavar="N", help="parallel compilers")
    build.add_argument("--force", action="store_true", help="compile even if the wheel is cached")
    build.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="folder of built wheels (default: hpctrain/horovod in XDG_CACHE_HOME or ~/.cache)",
    )
    build.add_argument("--no-install", action="store_true", help="only put the wheel in the cache")
    build.add_argument(
        "--time-limit", type=float, default=3600.0, metavar="S", help="seconds (default: 3600)"
    )
    build.add_argument(
        "--lock-wait",
        type=float,
        default=3600.0,
        metavar="S",
        help="seconds to wait for another build of the same wheel (default: 3600)",
    )
    check = actions.add_parser(
        "check",
        help="is it importable, does it match, does it work over two ranks",
        description=_CHECK,
        epilog=_CHECK_EXITS,
    )
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.add_argument("--no-run", action="store_true", help="leave out the two-rank allreduce")


def main(args: argparse.Namespace) -> int:
    """Run the requested action and return its exit code."""
    try:
        return _build(args) if args.action == "build" else _check(args)
    except InstallError as error:
        log.notice(str(error))
        return 1
    except KeyboardInterrupt:
        log.notice("interrupted; nothing was left half installed")
        return 130


def _build(args: argparse.Namespace) -> int:
    from hpctrain.install import BuildOptions, build_wheel, cache_home, collect, install_wheel

    options = BuildOptions(
        cache_dir=(args.cache_dir or cache_home(os.environ)).absolute(),
        sdist=args.sdist.absolute() if args.sdist else None,
        jobs=args.jobs,
        force=args.force,
        limit_s=args.time_limit,
        lock_wait_s=args.lock_wait,
    )
    facts = collect(Path(sys.executable), environ=os.environ, want_cuda=args.cuda)
    wheel = build_wheel(facts, options, os.environ)
    if args.no_install:
        print(wheel)
    else:
        install_wheel(wheel, facts, os.environ)
    return 0


def _check(args: argparse.Namespace) -> int:
    from hpctrain.install import check_horovod

    found = check_horovod(Path(sys.executable), environ=os.environ, run=not args.no_run)
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        built = ", ".join(name for name, yes in found.built.items() if yes) or "unknown"
        print(f"Horovod {found.version or 'not installed'}: {found.status}")
        if found.version:
            print(f"  built with: {built}; two-rank allreduce: {found.run}")
            print(f"  linked to: {_list(found.bound) or 'unknown: hpctrain did not build it'}")
            print(f"  installed now: {_list(found.here)}")
        for problem in found.problems:
            print(f"  {problem}")
        if found.cure:
            print(f"  fix: {found.cure}")
    return {"ok": 0, "missing": 3}.get(found.status, 1)


def _list(bindings: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in bindings.items() if value)
