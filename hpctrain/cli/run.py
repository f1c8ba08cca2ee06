"""`hpctrain run`: a script on all ranks, under the launcher that is there or the right mpirun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain import log
from hpctrain.cli.starting import (
    AUTO,
    add_variables,
    choose_layout,
    ranks_or_auto,
    set_variables,
    warn_of_shared_gpus,
)
from hpctrain.errors import ConfigError

__all__ = ["add_arguments", "hint_at_order", "main"]

_MORE = """\
Outside a launcher, the mpirun that belongs to mpi4py's MPI is started; under mpirun, mpiexec or
srun the script is only run. When one rank fails, all ranks end, with that rank's traceback.
`python train.py` is the script train.py; any other command runs as it is, once per rank.

The script sees RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
MASTER_PORT: scripts written for torch.distributed's env:// or for horovod.torch run unchanged.

examples:
  hpctrain run -n 4 train.py --epochs 3
  hpctrain run --hosts node1:4,node2:4 -m package.train
  hpctrain run -n 2 python train.py
  hpctrain run -n 2 -- nvidia-smi -L
  srun hpctrain run train.py
"""


_PLACING = ("-n", "-np", "--ranks", "--hosts", "--hostfile")
"""Options that say how many ranks there are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options; everything after the script belongs to the script."""
    parser.epilog = _MORE
    parser.usage = "hpctrain run [options] SCRIPT|-m MODULE|COMMAND [ARGS ...]"
    parser.add_argument(
        "-n",
        "-np",
        "--ranks",
        type=ranks_or_auto,
        metavar="N",
        help="ranks to start (default: those of the hosts, or 1); auto: what `bench layout` found",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A:4,B:4", help="hosts and their ranks")
    where.add_argument("--hostfile", type=Path, metavar="F", help="a file of hosts, one per line")
    add_variables(parser)
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
        help="record a timeline of all ranks in D/trace.json.gz, for ui.perfetto.dev",
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
    from hpctrain.launch import (
        Hosts,
        is_another_python,
        parse_hosts,
        read_program,
        run_here,
        start,
    )
    from hpctrain.world import detect

    program = read_program(args.program, is_module=args.is_module)
    if args.trace is not None:  # the ranks read it from their environment, however they start
        os.environ["HPCTRAIN_TRACE"] = str(args.trace.resolve())
    variables = set_variables(args.env)
    environ = dict(os.environ)
    launch = detect(environ)
    if launch.row is not None and launch.row.starts_mpi:
        if args.ranks not in (None, launch.size) or args.hosts or args.hostfile:
            raise ConfigError(
                f"this is already rank {launch.rank} of {launch.size}, started by {launch.title}; "
                "leave -n, --hosts and --hostfile to the launcher"
            )
        return run_here(program, launch, environ, log_dir=args.log_dir)
    if program.is_command and is_another_python(program.target):
        log.notice(
            f"{program.target} is not the Python of this hpctrain ({sys.executable}); it runs "
            "with its own packages"
        )
    if args.ranks == AUTO:
        if args.hosts or args.hostfile:
            raise ConfigError("-n auto is for this machine only; with hosts, give numbers")
        program.check()
        if program.is_command:
            raise ConfigError(
                f"-n auto is for scripts and modules that `hpctrain bench layout` has measured, "
                f"not for the command {program.target!r}; give -n a number"
            )
        key = program.target if program.is_module else str(Path(program.target).resolve())
        args.ranks, environ = choose_layout(key, program.arguments, environ)
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
    if args.ranks is None and hosts is None and not program.is_command:
        hint = hint_at_order(program.target, program.arguments)
        if hint is not None:
            log.notice(hint)
    if hosts is None:
        warn_of_shared_gpus(num_ranks, environ, ["hpctrain", "run"], program.words())
    return start(
        program,
        environ,
        num_ranks=num_ranks,
        hosts=hosts,
        log_dir=args.log_dir,
        quiet=args.quiet,
        variables=tuple(variables),
    )


def hint_at_order(target: str, arguments: Sequence[str]) -> str | None:
    """What to say of options of ours that stand after the script: they may be its own. Pure."""
    for word in arguments:
        name = word.partition("=")[0]
        if name in _PLACING:
            return (
                f"{name} comes after {target} and is passed to it; the script runs on 1 rank. If "
                f"it is meant for hpctrain, put it first: hpctrain run {name} ... {target}"
            )
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"hostfile {path} cannot be read ({error}); give a readable file"
        ) from error
