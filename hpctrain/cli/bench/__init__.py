"""`hpctrain bench WHAT`: measuring, one kind per file."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from types import ModuleType

from hpctrain import log
from hpctrain.bench import ROOT
from hpctrain.errors import ConfigError

__all__ = ["KINDS", "add_arguments", "main"]

KINDS = {
    # kind: its line in the overview; the module hpctrain.cli.bench.KIND has the rest
    "scale": "a script at several numbers of ranks, engines and settings, on this machine",
    "submit": "the same as batch jobs, one array for each number of nodes",
    "collect": "what a sweep has measured so far, including jobs that still run",
    "layout": "every ranks x threads of this node at one batch; `run -n auto` uses the best",
    "compare": "two results: exit code 1 if points are slower beyond noise, or counts grew",
    "overhead": "what exchanging gradients adds to a training step",
    "collectives": "allreduce from 1 KiB to 256 MiB on each engine",
    "data": "batches of arrays, and whether a step waits for them",
    "checkpoint": "what saving costs a training, and the disk",
    "fit": "measure a machine file for `hpctrain plan` here",
    "measure": "one launch of a sweep, as its batch jobs run it",
}

_PROGRAMS = {
    # kinds that are whole programs, with `add_arguments` and `main` of their own
    "collectives": "hpctrain.bench.collectives",
    "overhead": "benchmarks.step_overhead",
    "data": "benchmarks.data",
    "checkpoint": "benchmarks.checkpoint",
}

_EPILOG = """\
A script takes part in a sweep by reading its batch and settings from `world.bench`; docs/scaling.md
shows how. Other scripts are measured as they are.

exit codes: 0 success; 1 a point failed or is slower; 2 usage error; 3 not saved, the machine was
busy; 130 interrupted

examples:
  hpctrain bench scale --ranks 1,2,4 --mode weak train.py
  hpctrain bench layout --batch 256 train.py && hpctrain run -n auto train.py
  hpctrain bench compare old.json new.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the kinds."""
    parser.epilog = _EPILOG
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for kind, line in KINDS.items():
        child = kinds.add_parser(
            kind,
            help=line,
            description=line,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module = _module_of(kind)
        if module is not None:
            module.add_arguments(child)


def main(args: argparse.Namespace) -> int:
    """Measure."""
    module = _module_of(args.kind)
    if module is None:
        raise ConfigError(
            f"`hpctrain bench {args.kind}` measures hpctrain itself and needs its repository; "
            f"clone it and run `python -m {_PROGRAMS[args.kind]}` there"
        )
    try:
        code: int = module.main(args)
    except KeyboardInterrupt:
        tail = ""
        if args.kind in ("scale", "layout"):
            tail = f"; results so far are kept in {args.dir}; the same command resumes there"
        log.warn(f"interrupted; the running launch was stopped{tail}")
        return 130
    return code


def _module_of(kind: str) -> ModuleType | None:
    """The module of a kind; None: a benchmark of hpctrain itself, and this is not a checkout."""
    name = _PROGRAMS.get(kind, f"hpctrain.cli.bench.{kind}")
    if name.startswith("benchmarks."):
        if not (ROOT / "benchmarks" / "results").is_dir():
            return None
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
    return import_module(name)
