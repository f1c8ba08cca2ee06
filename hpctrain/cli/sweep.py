"""`hpctrain sweep run|submit|table`: one command over many settings."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

from hpctrain import log
from hpctrain.batch_systems import Refused, ask_program
from hpctrain.cli.job.options import (
    add_job_options,
    add_snapshot,
    command_of,
    job_from,
    snapshot_for,
)
from hpctrain.errors import ConfigError
from hpctrain.submit import (
    Ledger,
    Point,
    forget_exit,
    grid_points,
    job_states,
    launch,
    list_points,
    note_exit,
    note_jobs,
    random_points,
    read_results,
    render,
    state_home,
    submit,
    sweep_commands,
    withdraw_sweep,
    write_sweep,
)

__all__ = ["add_arguments", "main"]

_EPILOG = """\
In the command, {key} is replaced by a value, {run_dir} by the point's directory and {index} by its
number. What it writes to {run_dir}/result.json, an object of numbers, is what `table` ranks by; of
`hpctrain train` with logging.directory={run_dir} it is the last evaluation, once it has finished.

exit codes: 0 success; 1 a point failed (run), or the batch system refused; 2 usage error

examples:
  hpctrain sweep run --grid lr=0.1,0.01 --grid batch=32,64 -- python train.py --lr {lr} \\
      --batch {batch} --out {run_dir}
  hpctrain sweep submit --random lr=loguniform(1e-5,1e-1) --num 20 --site slurm --time 1h -- \\
      hpctrain run train.py --lr {lr} --out {run_dir}
  hpctrain sweep run --grid optimizer.lr=0.1,0.01 -- hpctrain train digits.toml \\
      --set optimizer.lr={optimizer.lr} --set logging.directory={run_dir}
  hpctrain sweep table --metric loss
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the actions."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run = actions.add_parser("run", help="run the points one after the other on this machine")
    array = actions.add_parser("submit", help="as a job array")
    table = actions.add_parser("table", help="the results, best first")
    for child in (run, array, table):
        child.add_argument("--dir", type=Path, default=Path("sweep"), help="default: sweep")
    for child in (run, array):
        child.usage = f"hpctrain sweep {child.prog.split()[-1]} [options] -- COMMAND [ARGS ...]"
        kind = child.add_mutually_exclusive_group(required=True)
        kind.add_argument("--grid", action="append", metavar="K=A,B", help="all combinations")
        kind.add_argument("--random", action="append", metavar="K=D", help="draw from D")
        kind.add_argument("--list", type=Path, metavar="F", help="JSON list of objects")
        child.add_argument("--num", type=int, metavar="N", help="number of random points")
        child.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    add_job_options(array)
    add_snapshot(array)
    for child in (run, array):
        child.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    table.add_argument("--metric", default="loss", help="key of result.json (default: loss)")
    table.add_argument("--max", action="store_true", help="larger is better")
    table.add_argument("--json", action="store_true", help="print the rows as JSON")


def main(args: argparse.Namespace) -> int:
    """Run, submit or show."""
    if args.action == "table":
        return _table(args)
    template = command_of(args.command)
    if not template:
        raise ConfigError("no command was given; write it after --, as -- python train.py {lr}")
    directory = args.dir.absolute()
    points = _points(args)
    commands = sweep_commands(directory, points, template)
    if args.action == "run":
        _check_programs(commands)
        write_sweep(directory, points, commands)
        return _run(directory, commands)
    if args.array is not None:
        raise ConfigError("--array is the number of points here; leave it out")
    args.array = len(commands)
    request, site = job_from(args, commands)
    render(dataclasses.replace(request, script="to be named"), site)  # mistakes leave no folders
    is_new = write_sweep(directory, points, commands)
    ledger = Ledger(state_home(os.environ))
    jobs: list[str] = []
    try:
        with snapshot_for(request, args) as job:
            submit(
                job,
                site,
                directory=Path.cwd(),
                ledger=ledger,
                show=lambda text: None,
                tell=jobs.append,
            )
    except Refused:
        if is_new:  # else jobs that wait may need its folders
            withdraw_sweep(directory)
        raise
    finally:  # what was submitted before something failed is in the queue
        if jobs:
            print("\n".join(jobs))
    entries = [ledger.find(job) for job in jobs]
    note_jobs(directory, [entry for entry in entries if entry is not None])
    return 0


def _points(args: argparse.Namespace) -> list[Point]:
    if args.random:
        if args.num is None:
            raise ConfigError("--random needs --num, the number of points")
        return random_points(args.random, count=args.num, seed=args.seed)
    if args.num is not None:
        raise ConfigError("--num is for --random; leave it out")
    if args.grid:
        return grid_points(args.grid)
    try:
        return list_points(args.list.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{args.list} cannot be read: {error}") from error


def _check_programs(commands: tuple[tuple[str, ...], ...]) -> None:
    for program in {command[0]: None for command in commands}:
        if shutil.which(program) is None:
            raise ConfigError(
                f"{program} cannot be started: it does not exist, or is not executable"
            )


def _run(directory: Path, commands: tuple[tuple[str, ...], ...]) -> int:
    failed = 0
    for index, command in enumerate(commands):
        log.notice(f"point {index} of {len(commands)}: {' '.join(command)}")
        path = directory / f"{index:04d}" / "log.txt"
        forget_exit(directory, index)
        code, _ = launch(command, path)
        note_exit(directory, index, code)
        if code:
            failed += 1
            log.warn(f"point {index} ended with exit code {code}; see {path}")
    print(f"{len(commands) - failed} of {len(commands)} points succeeded", file=sys.stderr)
    return 1 if failed else 0


def _table(args: argparse.Namespace) -> int:
    jobs = job_states(args.dir, ask_program)
    rows = read_results(args.dir, args.metric, largest=args.max, jobs=jobs)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        shown = [["" if cell is None else cell for cell in row.values()] for row in rows]
        print(log.table(list(rows[0]), shown))
    return 0
