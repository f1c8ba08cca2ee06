"""What is predicted and how it is shown: a profile, a configuration, options, tables."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from hpctrain import log
from hpctrain.errors import ConfigError
from hpctrain.predict import (
    Exchange,
    Machine,
    Prediction,
    Profile,
    RankLayout,
    advise,
    default_exchange,
    find_machine,
    machine_names,
    predict,
    read_profile,
)
from hpctrain.wire import BITS, NONE

__all__ = [
    "check_given",
    "check_network",
    "check_ranks",
    "machine_from",
    "parse_ranks",
    "predict_from",
    "print_list",
    "print_plan",
    "profile_from",
    "take_config",
]


def print_plan(
    args: argparse.Namespace, profile: Profile, machine: Machine, predictions: list[Prediction]
) -> None:
    """Print predictions and advice."""
    advice = advise(
        profile,
        machine,
        predictions,
        efficiency=args.efficiency,
        num_samples=args.train_samples,
    )
    if args.json:
        data = {
            "schema": "hpctrain.plan/1",
            "simulated": True,
            "model": profile.model,
            "machine": machine.title,
            "machine_measured": machine.measured,
            "profile_machine": profile.machine,
            "predictions": [each.as_json() for each in predictions],
            "advice": advice.as_json(),
        }
        print(json.dumps(data, indent=1))
        return
    print(_table(profile, machine, predictions))
    print("\n".join(f"- {line}" for line in advice.lines(args.efficiency)))


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks, rising, each once."""
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise ConfigError(f"--ranks {text}: give whole numbers from 1 on, such as 8,64,512")
    return counts


def machine_from(args: argparse.Namespace) -> Machine:
    """The requested machine, with the changes of the options."""
    machine = find_machine(args.machine)
    if args.ranks_per_node is not None:
        machine = replace(machine, ranks_per_node=args.ranks_per_node)
    if args.topology is not None:
        engines = {
            name: replace(costs, topology=args.topology) for name, costs in machine.engines.items()
        }
        costs = replace(machine.costs, topology=args.topology)
        machine = replace(machine, costs=costs, engines=engines)
    return machine


def predict_from(
    args: argparse.Namespace, profile: Profile, machine: Machine, num_ranks: int
) -> Prediction:
    """Predict one number of ranks."""
    check_ranks(args, machine, num_ranks)
    if args.global_batch is not None:
        profile = profile.at_batch(args.global_batch // (num_ranks * args.accumulate))
    return predict(
        profile,
        machine,
        num_ranks,
        exchange=_exchange(args, profile, machine, num_ranks),
        is_strong=args.global_batch is not None,
    )


def check_ranks(args: argparse.Namespace, machine: Machine, num_ranks: int) -> None:
    """Whether a number of ranks can be predicted, before anything is measured for it.

    Raises:
        ConfigError: with what is in the way.
    """
    check_network(args, machine, num_ranks)
    if args.global_batch is None or args.global_batch % (num_ranks * args.accumulate) == 0:
        return
    raise ConfigError(
        f"a global batch of {args.global_batch} does not divide over {num_ranks} ranks x "
        f"{args.accumulate} passes; choose a multiple of {num_ranks * args.accumulate} "
        "(--global-batch)"
    )


def check_network(args: argparse.Namespace, machine: Machine, num_ranks: int) -> None:
    """A network that was never measured would cost nothing."""
    num_nodes = -(-num_ranks // machine.ranks_per_node)
    if num_nodes > 1 and machine.costs_of(args.engine).inter.is_unknown:
        raise ConfigError(
            f"{machine.name} was measured on one node and has no network numbers, and {num_ranks} "
            "ranks "
            f"are {num_nodes} nodes of {machine.ranks_per_node}; give --ranks-per-node "
            f"{num_ranks} if they fit on one node, or add the network's numbers under [inter]"
        )


def _exchange(
    args: argparse.Namespace, profile: Profile, machine: Machine, num_ranks: int
) -> Exchange:
    layout = RankLayout(num_ranks=num_ranks, ranks_per_node=machine.ranks_per_node)
    size = None if args.bucket_mib is None else round(args.bucket_mib * 2**20)
    chosen = default_exchange(
        args.engine,
        layout,
        gradient_bytes=profile.gradient_bytes,
        on_gpu=machine.memory_bytes_per_device > 0,
        overlap=False if size == 0 else args.overlap,
        bucket_bytes=size or None,
        wire=args.wire,
    )
    chosen = replace(chosen, accumulate=args.accumulate, wire_ratio=args.wire_bits / 32)
    if args.cycle_ms is not None:
        chosen = replace(chosen, cycle_s=args.cycle_ms / 1000)
    return chosen


def print_list(*, as_json: bool) -> int:
    """List the machines there are."""
    machines = [find_machine(name) for name in machine_names()]
    if as_json:
        print(json.dumps([{"name": m.name, "title": m.title} for m in machines], indent=1))
    else:
        print(log.table(["machine", "what"], [[m.name, m.title] for m in machines]))
    return 0


def _table(profile: Profile, machine: Machine, predictions: list[Prediction]) -> str:
    rows = [
        [
            each.num_ranks,
            each.num_nodes,
            each.batch,
            f"{1000 * each.step_s.value:.4g}",
            f"{1000 * each.step_s.low:.4g}-{1000 * each.step_s.high:.4g}",
            f"{100 * each.efficiency.value:.1f}",
            f"{100 * each.efficiency.low:.1f}-{100 * each.efficiency.high:.1f}",
            f"{1000 * each.exposed_s.value:.4g}",
            f"{1000 * each.straggling_s:.4g}",
            f"{1000 * each.contention_s:.4g}",
            f"{each.samples_per_s:.5g}",
        ]
        for each in predictions
    ]
    headers = ["ranks", "nodes", "batch", "step ms", "+-", "efficiency %", "+-"]
    headers += ["exposed ms", "straggling ms", "contention ms", "samples/s"]
    kind = "measured" if machine.measured else "from documentation"
    if machine.is_disturbed:
        kind += f" under {machine.foreign_load:.0%} background load: do not trust it"
    title = (
        f"SIMULATED: {profile.model} on {machine.title} (machine file {kind}); computing as on "
        f"{profile.machine}"
    )
    return log.table(headers, rows, title=title)


def take_config(args: argparse.Namespace) -> None:
    """Fill what no option says from the configuration, or with defaults."""
    args.steps, args.even_last, args.overlap = None, True, None
    if args.config is not None:
        from hpctrain.predict import read_options

        asked = read_options(args.config)
        for name in ("global_batch", "accumulate", "engine", "warmup_steps"):
            if getattr(args, name) is None:
                setattr(args, name, getattr(asked, name))
        if args.epochs is None:
            args.epochs, args.steps = asked.epochs, asked.steps
        if args.bucket_mib is None and asked.bucket_bytes is not None:
            args.bucket_mib = asked.bucket_bytes / 2**20
        args.drop_last = args.drop_last or asked.drop_last
        args.even_last, args.overlap = asked.even_last, asked.overlap
        args.wire = args.wire or asked.wire
    args.wire = args.wire or NONE
    if args.wire != NONE and args.wire_bits != BITS[NONE]:
        raise ConfigError(
            f"--wire {args.wire} and --wire-bits {args.wire_bits}; give one: the first is "
            "distribute(wire=), between nodes; the second is on all links"
        )
    if args.accumulate is None:
        args.accumulate = 1


def check_given(args: argparse.Namespace) -> None:
    """Whether there is enough to predict from."""
    measures = args.measure_profile is not None
    if not (args.profile or args.config) or not (measures or (args.machine and args.ranks)):
        raise ConfigError(
            "a prediction needs --profile or CONFIG.toml, --machine and --ranks; see --help"
        )


def profile_from(args: argparse.Namespace) -> Profile:
    """Read the profile, or measure it from the configuration."""
    check_given(args)
    if args.profile:
        return read_profile(args.profile)
    from hpctrain.predict import measure_configured

    # At the most ranks: small batches use a processor less well than their share says.
    most = max(parse_ranks(args.ranks)) if args.ranks else 1
    batch = max(1, args.global_batch // args.accumulate // most)
    log.notice(f"measuring {args.config} with {batch} samples, the share of one of {most} ranks")
    return measure_configured(args.config, batch, repeats=args.repeats)
