"""Memory of a rank and the step time of every grid, printed: `hpctrain plan --memory`."""

from __future__ import annotations

import argparse
import json

from hpctrain import log
from hpctrain.cli.plan.predicting import check_network, machine_from, parse_ranks
from hpctrain.errors import ConfigError
from hpctrain.predict import (
    FORMATS,
    HEADROOM,
    SCHEDULES,
    Compute,
    Footprint,
    GridChoice,
    GridPlan,
    Machine,
    plan_grids,
    read_profile,
)
from hpctrain.tables import bytes_in

__all__ = ["add_sizing", "check_sizing", "print_grids"]

_SHOWN = 12
"""Grids in the table; --json has all of them."""


def add_sizing(group: argparse._ArgumentGroup) -> None:
    """Describe the options."""
    group.add_argument(
        "--memory", action="store_true", help="print what every grid needs, and exit"
    )
    group.add_argument("--memory-per-rank", metavar="M", help="such as 80GB; default: machine's")
    group.add_argument("--precision", choices=tuple(FORMATS), help="default: CONFIG's, or fp32")
    group.add_argument(
        "--tensor",
        action="append",
        metavar="PATTERN=HOW",
        help="modules that tensor parallelism divides: '*.up=column', '*.down=row'",
    )
    group.add_argument("--micro-batch", type=int, metavar="B", help="samples; default: the best")
    group.add_argument("--schedule", choices=SCHEDULES, help="of pipelines (default: 1f1b)")
    group.add_argument(
        "--tflops", type=float, metavar="T", help="of a rank in training, instead of --profile"
    )


_OWN = ("memory_per_rank", "precision", "tensor", "micro_batch", "schedule", "tflops")


def check_sizing(args: argparse.Namespace) -> None:
    """Whether options go together.

    Raises:
        ConfigError: they do not.
    """
    given = [name for name in _OWN if getattr(args, name) is not None]
    if given and not args.memory:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{options} is for --memory; add it, or leave this out")
    if not args.memory:
        return
    if not args.ranks or not (args.subject or args.config):
        raise ConfigError(
            "--memory needs --ranks, and --subject FILE.py:NAME or CONFIG.toml for the model, its "
            "optimizer and a micro-batch"
        )
    if args.rehearse or args.measure_profile:
        raise ConfigError("--memory goes with neither --rehearse nor --measure-profile")
    if args.tflops is not None and args.profile:
        raise ConfigError("--tflops and --profile both say how fast a rank computes; give one")
    if args.tflops is not None and not 0 < args.tflops < float("inf"):
        raise ConfigError(f"--tflops {args.tflops} must be above 0")


def memory_of(args: argparse.Namespace, machine: Machine | None) -> int:
    """Bytes that a rank has.

    Raises:
        ConfigError: neither the option nor the machine says it.
    """
    if args.memory_per_rank is not None:
        return bytes_in(args.memory_per_rank, "--memory-per-rank")
    if machine is not None and machine.memory_bytes_per_device:
        return machine.memory_bytes_per_device
    if machine is not None and machine.memory_bytes_per_node:
        return machine.memory_bytes_per_node // machine.ranks_per_node
    where = f"machine {machine.name} does not say" if machine else "no --machine says"
    raise ConfigError(
        f"{where} how much memory a rank has; give --memory-per-rank 80GB, or a machine file with "
        "memory_bytes_per_device or memory_bytes_per_node"
    )


def parse_tensor(words: list[str] | None) -> dict[str, str]:
    """Patterns and styles from `PATTERN=HOW`. Pure."""
    pairs = [word.rpartition("=") for word in words or ()]
    for word, (pattern, _, style) in zip(words or (), pairs, strict=True):
        if not pattern or not style:
            raise ConfigError(f"--tensor {word}: write PATTERN=column, row or vocabulary")
    return {pattern: style for pattern, _, style in pairs}


def print_grids(args: argparse.Namespace) -> int:
    """Plan and print; 1 if nothing fits."""
    machine = machine_from(args) if args.machine else None
    memory = memory_of(args, machine)
    counts = parse_ranks(args.ranks)
    if machine is not None:
        for count in counts:
            check_network(args, machine, count)
    footprint = _footprint(args, counts)
    compute = _compute(args, machine, footprint)
    plans = [
        plan_grids(
            footprint,
            count,
            memory_per_rank=memory,
            global_batch=args.global_batch,
            micro_batch=args.micro_batch,
            compute=compute,
            ranks_per_node=args.ranks_per_node,
            shares_memory=machine is not None and not machine.memory_bytes_per_device,
            schedule=args.schedule or "1f1b",
        )
        for count in counts
    ]
    if args.json:
        print(json.dumps(_as_json(footprint, machine, plans), indent=1))
    else:
        print("\n\n".join(_describe(footprint, machine, plan) for plan in plans))
    return 0 if all(plan.best for plan in plans) else 1


def _footprint(args: argparse.Namespace, counts: list[int]) -> Footprint:
    tensor = parse_tensor(args.tensor)
    if args.subject:
        from hpctrain.predict import find_subject, measure_footprint

        make = find_subject(args.subject)
        return measure_footprint(make, precision=args.precision or "fp32", tensor=tensor)
    from hpctrain.predict import footprint_configured

    batch = args.micro_batch or max(1, args.global_batch // args.accumulate // max(counts))
    return footprint_configured(args.config, batch, precision=args.precision, tensor=tensor)


def _compute(
    args: argparse.Namespace, machine: Machine | None, footprint: Footprint
) -> Compute | None:
    """What times follow from; None, and said so, where something is missing."""
    if machine is None or not (args.profile or args.tflops):
        log.notice(
            "step times are not predicted: they need --machine, and --profile (measured) or "
            "--tflops (what a rank reaches in training)"
        )
        return None
    if args.profile:
        profile = read_profile(args.profile).at_batch(footprint.batch)
        return Compute(
            machine=machine,
            compute_s=profile.compute_s,
            update_s=profile.update_s,
            engine=args.engine,
        )
    return Compute.at(args.tflops, footprint, machine, args.engine)


def _as_json(
    footprint: Footprint, machine: Machine | None, plans: list[GridPlan]
) -> dict[str, object]:
    return {
        "schema": "hpctrain.grids/1",
        "simulated": True,
        "model": footprint.model,
        "precision": footprint.precision,
        "weight_bytes": footprint.weights,
        "state_copies": footprint.state_copies,
        "activation_bytes": footprint.activation_bytes,
        "batch": footprint.batch,
        "flops": footprint.flops,
        "units": [unit.name for unit in footprint.units],
        "machine": machine.title if machine else None,
        "plans": [plan.as_json() for plan in plans],
    }


def _row(choice: GridChoice) -> list[object]:
    need, time = choice.need, choice.time
    spare = choice.spare or 0
    return [
        *choice.shape,
        choice.shard,
        f"{choice.micro_batches} x {choice.micro_batch}",
        *(log.format_bytes(each) for each in (need.weights, need.gradients, need.state)),
        log.format_bytes(need.activations),
        log.format_bytes(max(0, need.gathered + need.transient)),
        log.format_bytes(need.total),
        "yes" if choice.fits else f"{log.format_bytes(-spare)} too much",
        f"{1000 * time.step_s:.4g}" if time else "not known",
        f"{100 * (choice.efficiency or 0):.0f}" if time else "not known",
        log.format_bytes(choice.sent.data + choice.sent.pipeline + choice.sent.tensor),
    ]


def _describe(footprint: Footprint, machine: Machine | None, plan: GridPlan) -> str:
    headers = ["data", "pipeline", "tensor", "shard", "micro-batches", "weights", "gradients"]
    headers += ["state", "activations", "working", "a rank", "fits", "step ms", "computing %"]
    headers += ["sent"]
    place = machine.title if machine else "no machine given"
    title = (
        f"SIMULATED: {footprint.model} ({log.format_bytes(footprint.weights)} of weights, "
        f"{footprint.precision}) on {plan.num_ranks} ranks, {place}; global batch "
        f"{plan.global_batch}, {log.format_bytes(plan.memory_per_rank or 0)} a rank of which "
        f"{HEADROOM:.0%} stay free"
    )
    lines = [log.table(headers, map(_row, plan.choices[:_SHOWN]), title=title)]
    more = len(plan.choices) - _SHOWN
    if more > 0:
        lines.append(f"{more} more grids are in --json")
    lines += [f"- {reason}" for reason in plan.why]
    if plan.best and plan.best.shape.pipeline > 1:
        lines.append(f"- its stages but the first begin at {', '.join(plan.best.cuts)}")
    if plan.best:
        lines.append(f"- take it by {_call(plan.best)}")
    reasons = dict.fromkeys(why for _, why in plan.refused)
    lines += [f"- not possible: {why}" for why in list(reasons)[:4]]
    return "\n".join(lines)


def _call(choice: GridChoice) -> str:
    """What a script writes for it."""
    words = [] if choice.shard == "none" else [f'shard="{choice.shard}"']
    words += [f"stages={list(choice.cuts)}"] if choice.cuts else []
    words += ["tensor=..."] if choice.shape.tensor > 1 else []
    lines = [f"Grid(world, {choice.shape})"]
    lines += [f"split(grid, model, {', '.join(words)})"] if words else []
    count = "micro_batches" if choice.shape.pipeline > 1 else "accumulate"
    lines += [f"distribute(..., grid=grid, {count}={choice.micro_batches})"]
    return f"{', '.join(lines)}: {choice.micro_batch} samples each"
