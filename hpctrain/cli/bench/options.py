"""Options that sweeps share, and what is done with a sweep's result."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from hpctrain import log
from hpctrain.bench import (
    Folder,
    Sweep,
    SweepSettings,
    describe_laws,
    describe_machine,
    make_result,
    point_rows,
    repeat_command,
    split_rows,
    validate,
)
from hpctrain.errors import ConfigError

__all__ = ["add_output", "add_settings", "conclude", "settings_of"]


def add_settings(parser: argparse.ArgumentParser, *, folder: str) -> None:
    """Declare how points are measured."""
    parser.add_argument(
        "--batch", type=int, metavar="B", help="samples of one share (default: the script's own)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="K", help="launches of each point (default: 3)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        metavar="S",
        help="timed steps of a launch, which then ends; 0: run to the end (default: 20)",
    )
    parser.add_argument(
        "--warmup", type=int, default=3, metavar="W", help="warm-up steps before them (default: 3)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="T", help="seconds a launch (default: 600)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the shuffled order (default: 0)"
    )
    parser.add_argument(
        "--load-limit",
        type=float,
        default=0.05,
        metavar="X",
        help="share of all cores that other processes may use during a launch (default: 0.05)",
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=1,
        metavar="R",
        help="how often a launch under background load is repeated (default: 1)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(folder),
        metavar="D",
        help=f"folder of the sweep; an interrupted sweep resumes there (default: {folder})",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="a module, not a file")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declare what is done with the result."""
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result to a file")
    parser.add_argument(
        "--compare", type=Path, metavar="OLD", help="compare with an earlier result; 1 if slower"
    )


def settings_of(args: argparse.Namespace, *, mode: str, batch: int | None) -> SweepSettings:
    """How points are measured.

    Raises:
        ConfigError: an option is wrong.
    """
    return SweepSettings(
        mode=mode,
        batch=batch,
        steps=args.steps,
        warmup=args.warmup,
        repeats=args.repeats,
        load_limit=args.load_limit,
        retries=args.retries,
        seed=args.seed,
        timeout_s=args.timeout,
    )


def conclude(args: argparse.Namespace, folder: Folder, sweep: Sweep) -> tuple[int, dict[str, Any]]:
    """Make the result, show it, write it; 1 where a point failed or is slower than before."""
    measured = folder.measured(sweep)
    machine = folder.machine()
    if machine is None:
        machine = describe_machine(mpi=_mpi())
    result = make_result(
        sweep,
        measured,
        machine=machine,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=repeat_command(sweep, directory=folder.path, output=args.json),
    )
    wrong = validate(result)
    if wrong:
        raise ConfigError("the result does not match the schema: " + "; ".join(wrong))
    for table in (point_rows(result), split_rows(result)):
        if table[1]:
            print(log.table(*table), end="\n\n")
    for line in [*describe_laws(result), *result["scale"]["notes"]]:
        print(line)
    if result["num_noisy"]:
        log.warn(
            f"{result['num_noisy']} of {len(result['blocks'])} rounds were disturbed by other "
            "processes; do not quote this"
        )
    text = json.dumps(result, indent=1) + "\n"
    (folder.path / "result.json").write_text(text, encoding="utf-8")
    if args.json is not None:
        args.json.write_text(text, encoding="utf-8")
    log.notice(f"the result is {args.json or folder.path / 'result.json'}")
    failed = [row for row in result["scale"]["points"] if row["state"] != "ok"]
    for row in failed:
        log.warn(f"{row['name']} failed: {row['why']}")
    code = 1 if failed else 0
    if args.compare is not None:
        from hpctrain.cli.bench.compare import compare_files

        code = max(code, compare_files(args.compare, folder.path / "result.json"))
    return code, result


def _mpi() -> str:
    from hpctrain.install import loaded_mpi

    return str(loaded_mpi().mpi)
