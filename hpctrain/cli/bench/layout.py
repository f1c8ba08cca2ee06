"""`hpctrain bench layout`: the best ranks x threads of this node for a script."""

from __future__ import annotations

import argparse
import datetime
import os

from hpctrain import log
from hpctrain.bench import (
    BestLayout,
    Folder,
    LayoutBook,
    Sweep,
    best_layout,
    digest_script,
    layout_points,
    numbers,
    this_machine,
)
from hpctrain.cli.bench.options import (
    add_output,
    add_settings,
    conclude,
    settings_of,
)
from hpctrain.cli.bench.program import subject_of
from hpctrain.cli.bench.scale import run_here
from hpctrain.errors import ConfigError
from hpctrain.submit import state_home

__all__ = ["add_arguments", "main"]

_MORE = """\
The batch of all ranks together is the same everywhere; the script must read it. One process with
all cores is what a layout has to beat. The best one is remembered for this script on this kind of
machine, and `hpctrain run -n auto SCRIPT` uses it; with --repeats 1 none is.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; everything after the script belongs to the script."""
    parser.epilog = _MORE
    parser.usage = "hpctrain bench layout [options] SCRIPT|-m MODULE|CONFIG.toml [ARGS ...]"
    parser.add_argument(
        "--ranks", metavar="N,M", help="numbers of ranks (default: all that divide the cores)"
    )
    parser.add_argument(
        "--cores", type=int, metavar="C", help="cores to use (default: all that are allowed)"
    )
    add_settings(parser, folder="bench-layout")
    add_output(parser)


def main(args: argparse.Namespace) -> int:
    """Measure every layout, and remember the best."""
    subject = subject_of(args)
    program = subject.program
    num_cores = args.cores or len(os.sched_getaffinity(0))
    if num_cores < 1:
        raise ConfigError(f"--cores {num_cores} is not possible; give at least 1")
    points = layout_points(num_cores, values={})
    if args.ranks is not None:
        asked = numbers("--ranks", args.ranks)
        uneven = [n for n in asked if num_cores % n]
        if uneven:
            raise ConfigError(f"{uneven[0]} ranks do not divide {num_cores} cores")
        points = [p for p in points if p.num_ranks == 1 or p.num_ranks in asked]
    sweep = Sweep(
        target=program.target,
        is_module=program.is_module,
        arguments=program.arguments,
        label=subject.label,
        settings=settings_of(args, mode="strong", batch=subject.batch),
        points=tuple(points),
        kind="layout",
    )
    folder = Folder(args.dir)
    folder.begin(sweep)
    run_here(folder, sweep)
    code, result = conclude(args, folder, sweep)
    if result["scale"]["measured"] == "steps" and not _has_one_batch(result["scale"]["points"]):
        raise ConfigError(
            "the layouts did not train with the same global batch, so none is best; read it from "
            "world.bench.global_batch(default), or put {batch} into the arguments"
        )
    if sweep.settings.repeats < 2:
        log.warn(
            "every layout was measured once, so differences cannot be told from noise: none "
            "is chosen or remembered; measure with --repeats 3 or more"
        )
        return code
    best, why = best_layout(result["scale"]["points"])
    LayoutBook(state_home(os.environ)).add(
        BestLayout(
            target=subject.key,
            arguments=subject.given,
            machine=this_machine(),
            digest=digest_script(subject.key),
            num_ranks=best["num_ranks"],
            num_threads=best["num_threads"],
            why=why,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            num_rounds=len(result["blocks"]),
            num_disturbed=result["num_noisy"],
        )
    )
    log.notice(f"best: {best['num_ranks']} x {best['num_threads']}: {why}; for `run -n auto`")
    return code


def _has_one_batch(rows: list[dict[str, object]]) -> bool:
    return len({row.get("samples_per_step") for row in rows if row["state"] == "ok"}) == 1
