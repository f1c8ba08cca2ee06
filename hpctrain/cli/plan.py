"""`hpctrain plan`: what happens at N ranks, before there are N ranks."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from hpctrain import log
from hpctrain.errors import ConfigError
from hpctrain.scaling.plan.advice import advise
from hpctrain.scaling.plan.collectives import Layout
from hpctrain.scaling.plan.exchange import ENGINES, Exchange, default_exchange
from hpctrain.scaling.plan.machine import TOPOLOGIES, Machine
from hpctrain.scaling.plan.machine_files import find_machine, machine_names
from hpctrain.scaling.plan.prediction import Prediction, predict
from hpctrain.scaling.plan.profile import Profile, read_profile, write_profile
from hpctrain.scaling.plan.subject import load_subject

__all__ = ["add_arguments", "main"]

_EPILOG = """\
A profile is what one rank does in a step. Measure it where you are, with a function that returns a
hpctrain.scaling.plan.profiling.Subject; a machine is one of --machines, or what
`hpctrain bench fit` wrote. Everything that is predicted is simulated and says so.

exit codes: 0 well; 1 something failed; 2 the command line or a file is wrong

examples:
  hpctrain plan --measure-profile p.json --subject train.py:subject
  hpctrain plan --profile p.json --machine perlmutter-gpu --ranks 8,64,512,4096
  hpctrain plan --profile p.json --machine mine.toml --ranks 64 --global-batch 8192 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = _EPILOG
    parser.add_argument("--profile", type=Path, metavar="P.json", help="one rank's step")
    parser.add_argument("--machine", metavar="M", help="a name, or a file that ends in .toml")
    parser.add_argument("--machines", action="store_true", help="list the machines there are")
    parser.add_argument("--ranks", metavar="A,B", help="numbers of ranks, such as 8,64,512")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    how = parser.add_argument_group("how gradients travel (default: as hpctrain.distribute does)")
    how.add_argument("--engine", choices=ENGINES, help="whose costs of the machine count")
    how.add_argument("--topology", choices=TOPOLOGIES, help="how an allreduce goes")
    how.add_argument("--bucket-mib", type=float, metavar="M", help="fusion size; 0: all at once")
    how.add_argument("--cycle-ms", type=float, metavar="T", help="pieces leave every T ms")
    how.add_argument("--accumulate", type=int, default=1, metavar="K", help="passes a step")
    how.add_argument("--wire-bits", type=int, choices=(16, 32), default=32, help="on the wire")
    what = parser.add_argument_group("what is asked")
    what.add_argument("--global-batch", type=int, metavar="G", help="of all ranks: strong scaling")
    what.add_argument("--ranks-per-node", type=int, metavar="R", help="instead of the machine's")
    what.add_argument("--train-samples", type=int, default=0, metavar="N", help="for node-hours")
    what.add_argument("--efficiency", type=float, default=0.8, metavar="E", help="still worth it")
    own = parser.add_argument_group("measuring a profile")
    own.add_argument("--measure-profile", type=Path, metavar="OUT", help="write OUT and end")
    own.add_argument("--subject", metavar="FILE:NAME", help="what to measure")
    own.add_argument("--repeats", type=int, default=20, metavar="K", help="steps (default: 20)")


def main(args: argparse.Namespace) -> int:
    """List, measure or predict."""
    if args.machines:
        return _list(as_json=args.json)
    if args.measure_profile:
        return _measure(args)
    if not args.profile or not args.machine or not args.ranks:
        raise ConfigError("a prediction needs --profile, --machine and --ranks; or see --help")
    profile, machine = read_profile(args.profile), _machine(args)
    predictions = [_predict(args, profile, machine, count) for count in parse_ranks(args.ranks)]
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
            "predictions": [each.as_json() for each in predictions],
            "advice": advice.as_json(),
        }
        print(json.dumps(data, indent=1))
        return 0
    print(_table(profile, machine, predictions))
    print("\n".join(f"- {line}" for line in advice.lines(args.efficiency)))
    return 0


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks, rising, each once."""
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise ConfigError(f"--ranks {text}: give whole numbers from 1 on, such as 8,64,512")
    return counts


def _machine(args: argparse.Namespace) -> Machine:
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


def _predict(
    args: argparse.Namespace, profile: Profile, machine: Machine, num_ranks: int
) -> Prediction:
    if args.global_batch is not None:
        batch, left = divmod(args.global_batch, num_ranks * args.accumulate)
        if left or batch < 1:
            raise ConfigError(
                f"--global-batch {args.global_batch} does not divide over {num_ranks} ranks x "
                f"{args.accumulate} passes; choose a multiple of {num_ranks * args.accumulate}"
            )
        profile = profile.at_batch(batch)
    return predict(
        profile, machine, num_ranks, exchange=_exchange(args, profile, machine, num_ranks)
    )


def _exchange(
    args: argparse.Namespace, profile: Profile, machine: Machine, num_ranks: int
) -> Exchange:
    layout = Layout(num_ranks=num_ranks, ranks_per_node=machine.ranks_per_node)
    chosen = default_exchange(
        args.engine,
        layout,
        gradient_bytes=profile.gradient_bytes,
        on_gpu=machine.memory_bytes_per_device > 0,
    )
    chosen = replace(chosen, accumulate=args.accumulate, wire_ratio=args.wire_bits / 32)
    if args.bucket_mib is not None:
        size = round(args.bucket_mib * 2**20)
        chosen = replace(chosen, bucket_bytes=size or None, overlap=size > 0, divided_update=False)
    if args.cycle_ms is not None:
        chosen = replace(chosen, cycle_s=args.cycle_ms / 1000)
    return chosen


def _measure(args: argparse.Namespace) -> int:
    if not args.subject:
        raise ConfigError("--measure-profile needs --subject FILE.py:NAME")
    subject = load_subject(args.subject)
    from hpctrain.scaling.plan.profiling import measure_profile

    profile = measure_profile(subject, repeats=args.repeats)
    write_profile(profile, args.measure_profile)
    log.notice(
        f"{profile.model}: {len(profile.layers)} gradients, {profile.gradient_bytes / 1e6:.1f} MB, "
        f"forward {1000 * profile.forward_s:.2f} ms, backward {1000 * profile.backward_s:.2f} ms; "
        f"written to {args.measure_profile}"
    )
    return 0


def _list(*, as_json: bool) -> int:
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
    title = f"SIMULATED: {profile.model} on {machine.title} (machine file {kind})"
    return log.table(headers, rows, title=title)
