"""`hpctrain doctor`: is this machine fit for training, and which node of a job is not?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from hpctrain.errors import ConfigError

__all__ = ["HELP", "add_arguments", "main"]

HELP = "check MPI, torch, Horovod and the machine, with fixes for what is broken"

_EPILOG = """\
Each line is ok, warning or broken, with the fix under it; docs/doctor.md explains every check.

exit codes: 0 nothing is broken (warnings are possible); 1 something is broken, or --all-nodes found
an outlier; 2 usage error

examples:
  hpctrain doctor
  hpctrain doctor --clean
  mpirun -n 8 hpctrain doctor --all-nodes
  srun hpctrain doctor --all-nodes --json > nodes.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's options."""
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    parser.add_argument(
        "--all-nodes",
        action="store_true",
        help="under a launcher: measure every node and every link, and name the outliers",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove shared memory that your killed jobs left on this node, and list it",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="S",
        help="seconds for each probe (default: 90), or for all of --all-nodes (default: 600)",
    )


def main(args: argparse.Namespace) -> int:
    """Examine this machine, or all nodes."""
    from hpctrain.world import detect

    if args.time_limit is not None and not args.time_limit > 0:
        raise ConfigError(f"--time-limit {args.time_limit:g} is not possible; give seconds above 0")
    if args.clean:
        if args.all_nodes:
            raise ConfigError("--clean cleans one node; give it without --all-nodes, on each node")
        return _clean(as_json=args.json)
    launch = detect(os.environ)
    is_rank = launch.row is not None and launch.row.starts_mpi
    if args.all_nodes:
        if not is_rank:
            raise ConfigError(
                "--all-nodes compares the nodes of a running job, and no launcher started this "
                "process; write `mpirun -n N hpctrain doctor --all-nodes` or `srun hpctrain doctor "
                "--all-nodes`, with at least one rank per node"
            )
        from hpctrain.doctor import visit_all_nodes

        return visit_all_nodes(as_json=args.json, limit_s=args.time_limit or 600.0)
    if is_rank and launch.size > 1:
        raise ConfigError(
            f"this is rank {launch.rank} of {launch.size}, and doctor examines one machine from "
            "one process; run it without the launcher, or add --all-nodes"
        )
    return _examine(as_json=args.json, limit_s=args.time_limit or 90.0)


def _clean(*, as_json: bool) -> int:
    from hpctrain.doctor import find_leftovers, remove_leftovers

    found = find_leftovers()
    trouble = remove_leftovers(found)
    if as_json:
        rows = [{"path": str(f.path), "owner": f.owner, "bytes": f.num_bytes} for f in found]
        print(json.dumps({"removed": rows, "trouble": trouble}, indent=2))
        return 1 if trouble else 0
    for one in found:
        print(f"removed {one.path} ({one.num_bytes:,} bytes, left by {one.owner})")
    for line in trouble:
        print(line)
    if not found:
        print("no leftovers of yours in shared memory")
    return 1 if trouble else 0


def _examine(*, as_json: bool, limit_s: float) -> int:
    from hpctrain.doctor import CHECKS, Facts, examine, exit_code, render, summarise
    from hpctrain.doctor import as_json as checks_as_json

    facts = Facts(os.environ, python=Path(sys.executable), prefix=Path(sys.prefix), limit_s=limit_s)
    name_width = max(len(name) for name, _ in CHECKS)
    checks = []
    for check in examine(facts):
        checks.append(check)
        if not as_json:  # as they come: all of them take a while
            print(render(check, name_width=name_width), flush=True)
    if as_json:
        print(json.dumps(checks_as_json(checks), indent=2))
    else:
        print(f"\n{summarise(checks)}")
    return exit_code(checks)
