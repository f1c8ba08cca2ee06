"""`hpctrain bench measure DIR KEY`: one launch of a sweep, on every rank of a batch job."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from hpctrain.bench import (
    Folder,
    Measured,
    describe_machine,
    explain_mismatch,
    fill_arguments,
    request_of,
)
from hpctrain.errors import ConfigError

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("dir", type=Path, metavar="DIR", help="of the sweep")
    parser.add_argument("key", metavar="KEY", help="of the launch, as 003-0")


def main(args: argparse.Namespace) -> int:
    """Collective: run the script as the sweep requires; rank 0 writes the result."""
    from hpctrain.launch import Program, run_here
    from hpctrain.sweep_request import BENCH_VARIABLE
    from hpctrain.world import detect

    folder = Folder(args.dir)
    sweep = folder.open()
    point, repeat = folder.launch_of(sweep, args.key)
    # Before torch is imported: it reads its threads then.
    os.environ["OMP_NUM_THREADS"] = str(point.num_threads)
    os.environ[BENCH_VARIABLE] = request_of(folder, sweep, point, repeat).text()
    launch = detect(os.environ)
    if launch.row is None or not launch.row.starts_mpi:
        raise ConfigError("`bench measure` runs under mpirun or srun, in the jobs of a sweep")
    if launch.size != point.num_ranks:
        raise ConfigError(f"{launch.size} ranks were started for {point.name}; submit it again")
    arguments, _ = fill_arguments(sweep, point)
    program = Program(target=sweep.target, is_module=sweep.is_module, arguments=arguments)
    if launch.rank == 0:
        folder.report_path(args.key).unlink(missing_ok=True)
    started = time.monotonic()
    code = run_here(program, launch, os.environ, log_dir=None)
    if launch.rank == 0:
        report = folder.read_report(args.key)
        folder.write_machine(describe_machine(mpi=str((report or {}).get("mpi", "unknown"))))
        folder.write(
            args.key,
            Measured(
                point=point.name,
                repeat=repeat,
                wall_s=time.monotonic() - started,
                why=explain_mismatch(sweep, point, report),
                report=report,
            ),
        )
    return code
