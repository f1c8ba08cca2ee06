"""Predicted against measured step times: on this machine, or on several hosts made of namespaces.

`python -m benchmarks.predict --fit 1,2,4 --ranks 8,16` fits the machine at the first numbers of
ranks and predicts the others; `--hosts 2,4 --rates 100mbit,1gbit` makes hosts with limited links
(needs root), fits each network from allreduces, and predicts steps. docs/plan.md has what goes in.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain import log
from hpctrain.bench import run_main
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.predict import Machine, Measurement, Profile, fit_machine, parse_profile, predict

__all__ = ["Launched", "main", "predict_here", "predict_hosts", "row"]

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 170.0
_LARGEST = 16 << 20


class Launched:
    """What one launch has measured."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.measurement = Measurement.from_json(data["measurement"])
        self.profile: Profile = parse_profile(json.dumps(data["profile"]))
        self.step_s: float = data["step_s"]


def words(out: Path, workload: str, engine: str, steps: int, largest: int) -> list[str]:
    """What each rank runs."""
    module = ["-m", "benchmarks.predict_subjects"]
    return [*module, str(out), workload, engine, str(steps), str(largest)]


def row(
    machine: Machine, launches: Sequence[Launched], profile: Profile, num_ranks: int, **key: object
) -> dict[str, object]:
    """One predicted and measured step: the median of all launches, and between which they lie."""
    times = sorted(each.step_s for each in launches)
    measured = median(times)
    found = predict(profile, machine, num_ranks, engine=next(iter(machine.engines)))
    return {
        "case": profile.model,
        "engine": found.exchange.engine,
        "ranks": num_ranks,
        **key,
        "simulated_ms": round(1000 * found.step_s.value, 3),
        "measured_ms": round(1000 * measured, 3),
        "between_ms": f"{1000 * times[0]:.1f} to {1000 * times[-1]:.1f}",
        "error_percent": round(100 * (found.step_s.value / measured - 1), 1),
        "exposed_ms": round(1000 * found.exposed_s.value, 3),
        "compute_ms": round(1000 * profile.compute_s, 3),
    }


def launch_here(
    ranks: Sequence[int], workload: str, engine: str, steps: int, repeats: int
) -> dict[int, list[Launched]]:
    """Measure at these numbers of ranks of this machine.

    Launches of all numbers alternate, so that a machine which drifts does so for all of them.
    """
    cores = len(os.sched_getaffinity(0))
    if max(ranks) > cores:
        raise ConfigError(f"{max(ranks)} ranks on {cores} cores: they would share cores")
    launches: dict[int, list[Launched]] = {count: [] for count in sorted(ranks)}
    for _ in range(repeats):
        for count, each in launches.items():
            each.append(_launch_here(count, workload, engine, steps))
    return launches


def predict_here(
    launches: dict[int, list[Launched]], fit: Sequence[int]
) -> list[dict[str, object]]:
    """Fit at some numbers of ranks, predict all of them. Pure."""
    machine = fit_machine(
        [each.measurement for count in fit for each in launches[count]],
        title="this machine",
        ranks_per_node=max(launches),
    )
    alone = sorted((each.profile for each in launches[1]), key=lambda each: each.compute_s)
    return [
        row(machine, each, alone[len(alone) // 2], count, fitted=count in fit)
        for count, each in launches.items()
        if count > 1
    ]


def _launch_here(count: int, workload: str, engine: str, steps: int) -> Launched:
    with tempfile.TemporaryDirectory(prefix="hpctrain-predict-") as directory:
        out = Path(directory) / "out.json"
        command = [sys.executable, "-m", "hpctrain", "run", "-n", str(count), "--quiet"]
        command += words(out, workload, engine, steps, _LARGEST)
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise LaunchError(f"{count} ranks failed:\n{done.stdout}{done.stderr}")
        return Launched(json.loads(out.read_text(encoding="utf-8")))


def predict_hosts(
    hosts: Sequence[int], rates: Sequence[str], workload: str, engine: str, steps: int
) -> list[dict[str, object]]:
    """Hosts of one rank each whose links are limited; the network is fitted from allreduces."""
    from mpi_tests.cluster.nodes import Nodes

    rows = []
    for rate in rates:
        launches: dict[int, Launched] = {}
        for count in sorted(hosts):
            with Nodes(count) as nodes:
                for host in nodes.hosts:
                    _limit(nodes, host, rate)
                launches[count] = _launch_hosts(nodes, workload, engine, steps)
        for count, each in launches.items():
            # Training steps are in no fit; allreduces of that many hosts are.
            alone = replace(each.measurement, training=())
            fitted = fit_machine([alone], title=f"hosts at {rate}", ranks_per_node=1)
            # Hosts share this machine's cores, so each profile is taken with all of them computing.
            machine = replace(fitted, jitter=0.0)
            rows.append(row(machine, [each], each.profile, count, rate=rate))
    return rows


def _limit(nodes: Any, host: str, rate: str) -> None:
    """Limit what a host sends, with a queue that loses nothing: lost packets are not predicted."""
    limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "2s"]
    words = ["tc", "qdisc", "replace", "dev", "eth0", "root", *limit]
    nodes.run(host, words, timeout_s=20)


def _launch_hosts(nodes: Any, workload: str, engine: str, steps: int) -> Launched:
    from mpi_tests.cluster.mpi import mpi_of_this_python

    out = nodes.directory / "out.json"
    where = ",".join(f"{host}:1" for host in nodes.hosts)
    command = [sys.executable, "-m", "hpctrain", "run", "--hosts", where, "--quiet"]
    env = {**nodes.environment(mpi_of_this_python().family), "OMP_NUM_THREADS": "1"}
    nodes.run(
        nodes.hosts[0],
        [*command, *words(out, workload, engine, steps, _LARGEST // 4)],
        timeout_s=_LIMIT_S,
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)},
    )
    return Launched(json.loads(out.read_text(encoding="utf-8")))


def main() -> int:
    """Measure, predict, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__)
    parser.add_argument("--fit", default="1,2", metavar="A,B", help="ranks to fit at, 1 among them")
    parser.add_argument("--ranks", default="", metavar="A,B", help="ranks to predict")
    parser.add_argument("--hosts", default="", metavar="A,B", help="hosts instead of ranks")
    parser.add_argument(
        "--rates", default="100mbit,1gbit", metavar="A,B", help="of the hosts' links"
    )
    parser.add_argument("--workload", default="mlp-256", help="or mlp-512; see predict_subjects.py")
    parser.add_argument("--engine", default="mpi", help="default: mpi")
    parser.add_argument(
        "--steps", type=int, default=20, metavar="S", help="of a profile (default: 20)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="R", help="launches of each (default: 3)"
    )
    parser.add_argument("--save", action="store_true", help="keep it in benchmarks/results/plan")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="predict anew what was kept of ranks, and stop"
    )
    args = parser.parse_args()
    if args.again is not None:
        return _show(predict_again(json.loads(args.again.read_text(encoding="utf-8"))))
    kept: dict[str, object] = {}
    if args.hosts:
        name = "hosts"
        rows = predict_hosts(
            _counts(args.hosts), args.rates.split(","), args.workload, args.engine, args.steps
        )
    else:
        name, fit = "ranks", _counts(args.fit)
        ranks = sorted({1, *fit, *(_counts(args.ranks) if args.ranks else [])})
        launches = launch_here(ranks, args.workload, args.engine, args.steps, args.repeats)
        rows = predict_here(launches, fit)
        kept = {
            "fit": fit,
            "launches": {count: [one.data for one in each] for count, each in launches.items()},
        }
    _show(rows)
    if args.save:
        machine = f"{platform.machine()}-{os.cpu_count()}cores"
        today = datetime.now(UTC).date().isoformat()
        result = {"benchmark": f"predict_{name}", "date": today, "machine": machine, "rows": rows}
        result |= kept
        folder = ROOT / "benchmarks" / "results" / "plan"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}-{args.workload}-{today}-{machine}.json"
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


def predict_again(result: dict[str, Any]) -> list[dict[str, object]]:
    """The rows that today's predictor makes of measurements that were kept. Pure."""
    if "launches" not in result:
        raise ConfigError("it keeps no launches; `predict --ranks ... --save` does")
    launches = {
        int(count): [Launched(data) for data in each] for count, each in result["launches"].items()
    }
    return predict_here(launches, result["fit"])


def _show(rows: Sequence[dict[str, object]]) -> int:
    print(log.table(list(rows[0]), [list(each.values()) for each in rows]))
    return 0


def _counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(run_main(main))
