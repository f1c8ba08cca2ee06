"""The options that describe a job, shared by all verbs that make one."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain import log
from hpctrain.batch_systems import (
    ask_program,
    find_system,
    find_template,
    parse_duration,
    parse_memory,
    templates,
)
from hpctrain.errors import ConfigError
from hpctrain.exit_codes import RESTART
from hpctrain.submit import (
    AFTER_KINDS,
    JOBS,
    SIGNALS,
    Request,
    Site,
    choose_srun_mpi,
    load_site,
    new_folder,
    run_snapshot,
    take_snapshot,
    user_sites,
)

__all__ = [
    "add_job_options",
    "add_snapshot",
    "command_of",
    "job_from",
    "request_from",
    "site_folders",
    "site_from",
    "snapshot_for",
]


def site_folders() -> list[Path]:
    """Where profiles are looked for, the user's own first."""
    return [user_sites(os.environ), JOBS / "sites"]


def site_from(args: argparse.Namespace) -> Site:
    """The requested site."""
    return load_site(args.site, site_folders())


def job_from(
    args: argparse.Namespace, commands: tuple[tuple[str, ...], ...], *, script: str | None = None
) -> tuple[Request, Site]:
    """The requested job and site; defaults are chosen, and reported.

    Raises:
        ConfigError: one of the options is wrong.
    """
    request, site = request_from(args, commands, script=script), site_from(args)
    system = find_system(find_template(request.template or site.template).batch)
    if request.expedite and (why_not := system.why_no_expedite(ask_program)):
        log.notice(f"restarts are not expedited: {why_not}")
        request = replace(request, expedite=False)
    return choose_srun_mpi(request, site, say=log.notice), site


def add_snapshot(parser: argparse.ArgumentParser) -> None:
    """Declare --snapshot, for verbs that submit."""
    parser.add_argument(
        "--snapshot", action="store_true", help="run a copy of the code as it is now"
    )


@contextlib.contextmanager
def snapshot_for(request: Request, args: argparse.Namespace) -> Iterator[Request]:
    """The request, with a copy of the code if requested; no copy is left if it fails."""
    if not args.snapshot:
        yield request
        return
    here = Path.cwd()
    with new_folder(here / request.log_dir, request.name, ".code") as folder:
        snapshot = take_snapshot(here, folder)
        log.notice(f"the job runs a copy of the code: {snapshot.title}")
        yield run_snapshot(request, snapshot, os.environ)


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """What comes after `--`."""
    return tuple(words[1:] if words[:1] == ["--"] else words)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Declare everything but the command."""
    _add_size(parser.add_argument_group("size"))
    _add_queue(parser.add_argument_group("queue"))
    _add_ends(parser.add_argument_group("ends"))
    _add_surroundings(parser.add_argument_group("surroundings"))


def _add_size(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--site", default="slurm", metavar="S", help="profile, or path of one")
    scripts = [name for name, each in templates().items() if each.suffix == ".sh"]
    group.add_argument("--template", choices=scripts, metavar="T", help="not the site's usual")
    group.add_argument("--time", required=True, metavar="T", help="walltime: 2h30m, 02:30:00")
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes (default: 1)")
    group.add_argument("--ranks-per-node", type=int, metavar="N", help="default: the site's")
    group.add_argument("--cpus-per-rank", type=int, metavar="N", help="default: the site's")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="default: the site's")
    group.add_argument("--memory", metavar="M", help="per node: 64G, 512 MiB")
    group.add_argument(
        "--mpi",
        metavar="M",
        help="how the launcher starts MPI: pmix, pmi2, mpich (`hpctrain doctor` shows yours)",
    )


def _add_queue(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--name", default="hpctrain", help="name of the job (default: hpctrain)")
    group.add_argument("--partition", "--queue", metavar="P", help="partition or queue")
    group.add_argument("--account", metavar="A", help="project, account or bank that pays")
    group.add_argument("--qos", metavar="Q", help="quality of service")
    group.add_argument("--constraint", metavar="C", help="features that nodes must have")
    group.add_argument("--reservation", metavar="R", help="reservation")
    group.add_argument("--array", type=int, metavar="N", help="N tasks, numbered by an index")
    group.add_argument("--array-limit", type=int, metavar="N", help="tasks at a time")
    group.add_argument("--after", action="append", default=[], metavar="ID", help="wait for a job")
    group.add_argument(
        "--after-kind", choices=AFTER_KINDS, default="ok", help="it must succeed, or only end"
    )
    group.add_argument(
        "--directive", action="append", default=[], metavar="D", help="one more, as --exclusive"
    )


def _add_ends(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--requeue",
        type=int,
        default=0,
        metavar="N",
        help="at most N restarts while it makes progress",
    )
    group.add_argument(
        "--requeue-on",
        default=",".join(map(str, RESTART)),
        metavar="C",
        help="exit codes to restart after besides 75 (default: %(default)s); none: 75 alone",
    )
    group.add_argument(
        "--expedite", action="store_true", help="restart lost nodes' jobs first (Slurm 25.11)"
    )
    group.add_argument("--signal", choices=SIGNALS, default="USR2", help="the warning's signal")
    group.add_argument("--signal-lead", metavar="T", help="warn the ranks this long before the end")
    group.add_argument("--log-dir", default="logs", metavar="D", help="default: logs")


def _add_surroundings(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--module", action="append", default=[], metavar="M", help="module to load")
    group.add_argument("--source", action="append", default=[], metavar="F", help="file to source")
    group.add_argument("--venv", metavar="D", help="virtual environment, first on PATH")
    group.add_argument("--env", action="append", default=[], metavar="K=V", help="variable to set")
    group.add_argument("--image", metavar="F", help="container image, or an EDF")
    group.add_argument("--pack", metavar="F", help="archive of `hpctrain pack`, to every node")
    group.add_argument(
        "--stage", action="append", default=[], metavar="P", help="copy to every node's local disk"
    )
    group.add_argument("--prologue", default="", metavar="C", help="command for every node first")


def request_from(
    args: argparse.Namespace, commands: tuple[tuple[str, ...], ...], *, script: str | None = None
) -> Request:
    """Read the options.

    Raises:
        ConfigError: one of them is wrong.
    """
    lead = args.signal_lead
    return Request(
        commands=commands,
        walltime_s=parse_duration(args.time),
        name=args.name,
        num_nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        cpus_per_rank=args.cpus_per_rank,
        gpus_per_node=args.gpus_per_node,
        memory_mib=parse_memory(args.memory) if args.memory is not None else None,
        template=args.template,
        mpi=args.mpi,
        partition=args.partition,
        account=args.account,
        qos=args.qos,
        constraint=args.constraint,
        reservation=args.reservation,
        log_dir=args.log_dir,
        array_size=args.array,
        array_limit=args.array_limit,
        after=tuple(args.after),
        after_kind=args.after_kind,
        max_requeues=args.requeue,
        restart_on=_codes(args.requeue_on),
        expedite=args.expedite,
        signal=args.signal,
        signal_lead_s=parse_duration(lead, what="signal lead") if lead is not None else None,
        stage=tuple(args.stage),
        pack=args.pack,
        prologue=_split(args.prologue),
        modules=tuple(args.module),
        source=tuple(args.source),
        venv=args.venv,
        environment=_variables(args.env),
        image=args.image,
        directives=tuple(args.directive),
        script=script,
    )


def _codes(text: str) -> tuple[int, ...]:
    words = [] if text == "none" else text.split(",")
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise ConfigError(f"--requeue-on {text!r} is not valid; write 124,137 or none")
    return tuple(map(int, words))


def _split(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"--prologue {command!r} is not understood: {error}") from error


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--env {pair!r} has no value; write it as NAME=value")
        if name in found:
            raise ConfigError(f"--env sets {name} twice; set it once")
        found[name] = value
    return found
