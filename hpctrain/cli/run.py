"""`hpctrain run`: a script on all ranks, under the launcher that is there or the right mpirun."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain import log
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.launch import Program

__all__ = ["add_arguments", "main"]

_AUTO = "auto"

_MORE = """\
Outside a launcher, the mpirun that belongs to mpi4py's MPI is started; under mpirun, mpiexec or
srun the script is only run. Whatever ends one rank ends all of them, with that rank's traceback.

The script sees RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
MASTER_PORT: scripts written for torch.distributed's env:// or for horovod.torch run unchanged.

examples:
  hpctrain run -n 4 train.py --epochs 3
  hpctrain run --hosts node1:4,node2:4 -m package.train
  srun hpctrain run train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options; everything after the script belongs to the script."""
    parser.epilog = _MORE
    parser.usage = "hpctrain run [options] SCRIPT|-m MODULE [ARGS ...]"
    parser.add_argument(
        "-n",
        "-np",
        "--ranks",
        type=_ranks,
        metavar="N",
        help="ranks to start (default: those of the hosts, or 1); auto: what `bench layout` found",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A:4,B:4", help="hosts and their ranks")
    where.add_argument("--hostfile", type=Path, metavar="F", help="a file of hosts, one per line")
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="D",
        help="also keep each rank's output, in D/rank-00000.log",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="D",
        help="record what every rank does when, in D/trace.json.gz for ui.perfetto.dev",
    )
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="show the output of rank 0 alone"
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, not a file"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Start the ranks, or be one."""
    from hpctrain.launch import Hosts, Program, parse_hosts, run_here, start
    from hpctrain.world import detect

    words = args.program[1:] if args.program[:1] == ["--"] else args.program
    is_module = args.is_module
    if not is_module and words[:1] == ["-m"]:
        is_module, words = True, words[1:]
    if not words:
        raise ConfigError("no script was given; write `hpctrain run [-n N] SCRIPT [ARGS ...]`")
    program = Program(target=words[0], is_module=is_module, arguments=tuple(words[1:]))
    if args.trace is not None:  # the ranks read it from their environment, however they start
        os.environ["HPCTRAIN_TRACE"] = str(args.trace.resolve())
    environ = dict(os.environ)
    launch = detect(environ)
    if launch.row is not None and launch.row.starts_mpi:
        if args.ranks not in (None, launch.size) or args.hosts or args.hostfile:
            raise ConfigError(
                f"this is already rank {launch.rank} of {launch.size}, started by {launch.title}; "
                "leave -n, --hosts and --hostfile to the launcher"
            )
        return run_here(program, launch, environ, log_dir=args.log_dir)
    if args.ranks == _AUTO:
        return _start_best(args, program, environ)
    hosts: Hosts | None = None
    if args.hosts:
        hosts = parse_hosts(args.hosts)
    elif args.hostfile:
        hosts = parse_hosts(_read(args.hostfile))
    num_ranks = args.ranks or (hosts.num_ranks if hosts else 1)
    if num_ranks < 1 or (args.ranks is not None and args.ranks < 1):
        raise ConfigError(f"-n {args.ranks} is not possible; start at least 1 rank")
    if hosts and num_ranks > hosts.num_ranks:
        raise ConfigError(
            f"-n {num_ranks} is more than the {hosts.num_ranks} ranks of {hosts}; give the hosts "
            "more, as in host:4, or lower -n"
        )
    return start(
        program,
        environ,
        num_ranks=num_ranks,
        hosts=hosts,
        log_dir=args.log_dir,
        quiet=args.quiet,
    )


def _ranks(word: str) -> int | str:
    return _AUTO if word == _AUTO else int(word)


def _start_best(args: argparse.Namespace, program: Program, environ: dict[str, str]) -> int:
    """Start the layout that `hpctrain bench layout` has found best for this program here."""
    from hpctrain.launch import start
    from hpctrain.scaling.sweeps.layouts import (
        LayoutBook,
        digest_script,
        find_layout,
        this_machine,
    )
    from hpctrain.submit.places import state_home

    if args.hosts or args.hostfile:
        raise ConfigError("-n auto is the best layout of this machine; with hosts, give numbers")
    if environ.get("OMP_NUM_THREADS"):
        raise ConfigError(
            f"-n auto chooses threads as well as ranks, and OMP_NUM_THREADS is set to "
            f"{environ['OMP_NUM_THREADS']}; unset it, or give -n a number"
        )
    program.check()
    target = program.target if program.is_module else str(Path(program.target).resolve())
    layout, differences = find_layout(
        LayoutBook(state_home(environ)).read(),
        target=target,
        arguments=program.arguments,
        machine=this_machine(),
        digest=digest_script(program.target, is_module=program.is_module),
    )
    log.notice(
        f"-n auto: {layout.num_ranks} x {layout.num_threads} (ranks x threads), {layout.why}; "
        f"measured on {layout.date}"
    )
    for difference in differences:
        log.warn(f"-n auto: {difference}; `hpctrain bench layout` measures it anew")
    environ["OMP_NUM_THREADS"] = str(layout.num_threads)
    return start(
        program, environ, num_ranks=layout.num_ranks, log_dir=args.log_dir, quiet=args.quiet
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"hostfile {path} cannot be read ({error}); give a readable file"
        ) from error
