"""`hpctrain bench submit`: a sweep over nodes as batch jobs."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

from hpctrain import log
from hpctrain.bench import Folder, Sweep, numbers, plan_points, submit_sweep
from hpctrain.cli.bench.options import add_settings, settings_of
from hpctrain.cli.bench.program import subject_of
from hpctrain.cli.bench.scale import add_scaling, engines_of
from hpctrain.cli.job.options import add_job_options, job_from
from hpctrain.errors import ConfigError
from hpctrain.submit import Ledger, Request, make_plan, state_home

__all__ = ["add_arguments", "main"]

_MORE = """\
One job array for each number of nodes, its tasks one at a time; the two baselines each have a node
to themselves. `hpctrain bench collect DIR` shows the results so far, and why a job has none.

example:
  hpctrain bench submit --node-counts 1,2,4 --ranks-per-node 4 --cpus-per-rank 16 --time 20m \\
      train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; everything after the script belongs to the script."""
    parser.epilog = _MORE
    parser.usage = "hpctrain bench submit --node-counts 1,2 --time T [options] SCRIPT [ARGS ...]"
    parser.add_argument("--node-counts", required=True, metavar="N,M", help="numbers of nodes")
    add_scaling(parser)
    add_job_options(parser)
    add_settings(parser, folder="bench-scale")


def main(args: argparse.Namespace) -> int:
    """Write the sweep, submit its jobs, and print their ids."""
    if args.array is not None or args.nodes != 1:
        raise ConfigError("the sweep sets --array and --nodes itself; give --node-counts")
    subject = subject_of(args)
    program = subject.program
    request, site = job_from(args, (("python", "-m", "hpctrain"),))
    plan = make_plan(request, site)
    per_node, threads = plan.ranks_per_node, plan.cpus_per_rank or 1
    nodes = numbers("--node-counts", args.node_counts)
    points = plan_points(
        mode=args.mode,
        ranks=[count * per_node for count in nodes],
        engines=engines_of(args),
        num_cores=per_node * threads,
        num_threads=threads,
        vary=args.vary,
        ranks_per_node=per_node,
    )
    sweep = Sweep(
        target=program.target,
        is_module=program.is_module,
        arguments=program.arguments,
        label=subject.label,
        settings=settings_of(args, mode=args.mode, batch=subject.batch),
        points=tuple(points),
    )
    folder = Folder(args.dir)
    folder.begin(sweep)
    jobs = submit_sweep(
        folder,
        sweep,
        replace(request, name=f"{request.name}-bench"),
        site,
        ledger=Ledger(state_home(os.environ)),
        num_cores=per_node * threads,
        python=_interpreter(request),
    )
    print("\n".join(jobs))
    log.notice(f"`hpctrain bench collect {args.dir}` shows the results so far")
    return 0


def _interpreter(request: Request) -> str:
    """This one, unless the job brings its own."""
    brought = (request.pack, request.image, request.venv, request.modules, request.source)
    return "python" if any(brought) else sys.executable
