"""A rehearsal on virtual ranks, printed."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

from hpctrain import log
from hpctrain.batch_systems import parse_duration
from hpctrain.checkpoint import Item
from hpctrain.cli.job.options import site_folders
from hpctrain.cli.plan.predicting import machine_from, parse_ranks, predict_from, profile_from
from hpctrain.errors import ConfigError
from hpctrain.log import format_bytes, format_hours
from hpctrain.predict import (
    JobLimits,
    Machine,
    Problem,
    Profile,
    RankLayout,
    Rehearsed,
    State,
    TrainingRun,
    rehearse,
)
from hpctrain.submit import Request, load_site, render

__all__ = ["print_rehearsal"]

_ELEMENT_BYTES = 4
_ACCOUNT = "ACCOUNT"
_COMMAND = ("python", "train.py")
"""Placeholders in a job script for what a rehearsal is not given."""


def print_rehearsal(args: argparse.Namespace) -> int:
    """Rehearse and print; 1 if something would break."""
    if not args.global_batch:
        raise ConfigError("a rehearsal needs --global-batch, or a configuration that has it")
    profile, machine = profile_from(args), machine_from(args)
    if args.state_copies is None:
        args.state_copies = 2.0
        if args.config:
            from hpctrain.predict import state_copies_of

            args.state_copies = state_copies_of(args.config)
    found = [_rehearse(args, profile, machine, count) for count in parse_ranks(args.ranks)]
    scripts = ["" for _ in found]
    if args.site:
        both = [_scripted(args, each, machine) for each in found]
        found, scripts = [each for each, _ in both], [script for _, script in both]
    if args.json:
        rehearsals = [
            each.as_json() | {"script": script, "placeholders": _placeholders(args, script)}
            for each, script in zip(found, scripts, strict=True)
        ]
        data = {"schema": "hpctrain.rehearsal/1", "rehearsals": rehearsals}
        print(json.dumps(data, indent=1))
    else:
        for each, script in zip(found, scripts, strict=True):
            print(_describe(each))
            if unknown := _placeholders(args, script):
                print(f"- placeholders in the job script, to be replaced: {', '.join(unknown)}")
            print(script, end="")
    return 0 if all(each.is_sound for each in found) else 1


def _rehearse(
    args: argparse.Namespace, profile: Profile, machine: Machine, num_ranks: int
) -> Rehearsed:
    training = TrainingRun(
        num_samples=args.samples or profile.samples or _no_samples(),
        global_batch=args.global_batch,
        accumulate=args.accumulate,
        epochs=args.epochs or 1,
        steps=args.steps,
        drop_last=args.drop_last,
        even_last=args.even_last,
        warmup_steps=args.warmup_steps or 0,
    )
    weights = tuple(
        Item(
            name=f"{number}.{layer.name}",
            num_elements=layer.gradient_bytes // _ELEMENT_BYTES,
            element_bytes=_ELEMENT_BYTES,
        )
        for number, layer in enumerate(profile.layers)
    )
    state = State(
        weights=weights,
        state_copies=args.state_copies,
        activation_bytes_per_sample=round(args.activation_mib * 2**20),
    )
    limits = JobLimits(
        walltime_s=parse_duration(args.time) if args.time else None,
        max_requeues=args.requeue,
        checkpoint_free_bytes=_free(args.save_dir) if args.save_dir else None,
        keep=args.keep,
    )
    layout = RankLayout(num_ranks=num_ranks, ranks_per_node=machine.ranks_per_node)
    # The rank that has most is the one that the others wait for.
    most = -(-training.batching.global_batch // num_ranks)
    weak = argparse.Namespace(**{**vars(args), "global_batch": None})
    step = predict_from(weak, profile.at_batch(most), machine, num_ranks).step_s
    return rehearse(training, state, layout, machine, step_s=step, limits=limits)


def _no_samples() -> int:
    raise ConfigError("a rehearsal needs --samples: the profile does not say how many there are")


def _free(directory: Path) -> int:
    """Of the file system that the directory is, or will be, on."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _scripted(args: argparse.Namespace, each: Rehearsed, machine: Machine) -> tuple[Rehearsed, str]:
    """The job script, or what the site has against it."""
    if not args.time:
        raise ConfigError("--site needs --time, the walltime of the job")
    site = load_site(args.site, site_folders())
    request = Request(
        commands=(("hpctrain", "train", str(args.config)) if args.config else _COMMAND,),
        walltime_s=parse_duration(args.time),
        num_nodes=each.num_nodes,
        ranks_per_node=min(each.num_ranks, machine.ranks_per_node),
        max_requeues=args.requeue,
        account=_ACCOUNT,
    )
    try:
        return each, render(request, site)
    except ConfigError as error:
        trouble = Problem(level="error", part="job script", text=str(error))
        return replace(each, findings=(*each.findings, trouble)), ""


def _placeholders(args: argparse.Namespace, script: str) -> list[str]:
    """What of a job script was not rehearsed, because it was not given."""
    account = [f"account {_ACCOUNT}"] if _ACCOUNT in script else []
    command = [f"command {' '.join(_COMMAND)}"] if script and not args.config else []
    return account + command


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _describe(each: Rehearsed) -> str:
    full, last, parts = each.loading.full, each.loading.last, len(each.files.writers)
    rows = [
        ("steps", f"{each.num_steps:,}, {each.steps_per_epoch:,} an epoch"),
        (
            "a rank's batch",
            f"{full.fewest} to {full.most}, in the last {last.fewest} to {last.most}",
        ),
        ("scattered share", "{} to {} samples".format(*each.loading.scattered)),
        ("memory a rank", format_bytes(each.holding.per_rank)),
        ("memory a node", format_bytes(each.holding.per_node)),
        ("checkpoint", f"{format_bytes(each.files.num_bytes)} in {_count(parts, 'part')}"),
    ]
    if each.simulated_s is not None:
        ends = (each.simulated_s.low, each.simulated_s.high)
        low, high = (format_hours(seconds / 3600) for seconds in ends)
        rows.append(("steps take", f"{low} to {high} (SIMULATED)"))
    title = f"rehearsed: {_count(each.num_ranks, 'rank')} on {_count(each.num_nodes, 'node')}"
    lines = [log.table(["what", ""], rows, title=title)]
    lines += [f"- {item.level}: {item.part}: {item.text}" for item in each.findings]
    return "\n".join([*lines, *([] if each.findings else ["- nothing of this would break"])])
