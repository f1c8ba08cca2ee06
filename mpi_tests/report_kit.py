"""Results, runs and traces made up for tests of reports: whatever a report may meet."""

from __future__ import annotations

import json
from pathlib import Path

MACHINE = {
    "id": "x86_64-16cores",
    "cpu": "A Processor",
    "arch": "x86_64",
    "cores": 16,
    "memory_gib": 125.9,
    "system": "Linux 6.1",
    "python": "3.11.7",
    "mpi": "MPICH 5.0.2",
    "torch": "2.13.0",
    "mpi4py": "4.1.2",
    "horovod": None,
    "commit": "0" * 40,
    "modified": False,
}
RANKS = (1, 2, 4, 8, 16)


def series(kind, num_ranks, seconds, **more):
    """One row of a result."""
    threads = more.pop("num_threads", 1)
    return {
        "case": more.pop("case", "transformer"),
        "variant": more.pop("variant", f"{kind}-{num_ranks}x{threads}"),
        "kind": kind,
        "num_ranks": num_ranks,
        "num_threads": threads,
        "seconds": seconds,
        "counts": {},
        "outcome": {},
        "metrics": more,
    }


def result(benchmark, rows, *, ratios=(), **settings):
    """A whole result that the schema accepts."""
    cases = dict.fromkeys(row["case"] for row in rows)
    blocks = [
        {"case": case, "order": [], "foreign_load": 0.0, "kept": True, "noisy": False}
        for case in cases
        for _ in range(max(len(row["seconds"]) for row in rows if row["case"] == case))
    ]
    return {
        "schema": 2,
        "benchmark": benchmark,
        "date": "2026-11-15",
        "machine": MACHINE,
        "settings": {"blocks": 5, "retries": 1, "load_limit": 0.05, "seed": 0, **settings},
        "series": list(rows),
        "ratios": list(ratios),
        "blocks": blocks,
        "num_thrown_away": 0,
        "num_noisy": 0,
    }


def spread(seconds, noise=0.02):
    """Five measurements around a time."""
    return [seconds * (1 + noise * k) for k in (-1, -0.4, 0, 0.5, 1)]


def row(kind, num_ranks, step_s, *, role="ranks", base_s=None, batch=64, **more):
    """One point of a sweep, as `hpctrain bench scale` writes it; `base_s` is one rank's step."""
    made = {
        "name": f"{kind} {num_ranks}x1",
        "role": role,
        "engine": kind,
        "kind": kind,
        "num_ranks": num_ranks,
        "num_threads": 1,
        "num_nodes": 1,
        "factor": num_ranks,
        "values": {},
        "why": "",
        "state": "ok",
        **_interval("step_s", step_s),
        "samples_per_step": float(batch * num_ranks),
        **_interval("samples_per_s", batch * num_ranks / step_s),
    }
    if base_s is not None:
        made |= _interval("efficiency", base_s / step_s)
        made |= _interval("speedup", num_ranks * base_s / step_s)
        made["speedup_per_sequential_s"] = made["speedup"] / base_s
        made["speedup_per_million_parameters"] = made["speedup"] / 12.5
    return made | more


def _interval(name, value, noise=0.02):
    return {name: value, f"{name}_low": value * (1 - noise), f"{name}_high": value * (1 + noise)}


def failed_row(kind, num_ranks, why):
    """A point that could not be measured."""
    place = {"kind": kind, "engine": kind, "num_ranks": num_ranks, "num_threads": 1, "num_nodes": 1}
    return {
        "name": f"{kind} {num_ranks}x1",
        "role": "ranks",
        "state": "failed",
        "why": why,
        **place,
    }


def split(compute_s, exchange_s, *, input_s=0.001, update_s=0.002, straggling_s=0.0):
    """The parts of a step."""
    parts = {
        "input": input_s,
        "forward": compute_s / 3,
        "backward": compute_s * 2 / 3,
        "exchange": exchange_s,
        "update": update_s,
    }
    return {"split_s": parts, "straggling_s": straggling_s}


def swept(rows, *, mode="weak", laws=(), notes=(), benchmark="scale"):
    """A whole sweep."""
    good = [one for one in rows if one["state"] == "ok"]
    made = result(
        benchmark,
        [
            series(one["kind"], one["num_ranks"], spread(one["step_s"]), variant=one["name"])
            for one in good
        ],
    )
    made["scale"] = {
        "program": "transformer",
        "mode": mode,
        "measured": "steps",
        "command": "hpctrain bench scale train.py --ranks 1,2,4,8,16 --mode weak",
        "points": list(rows),
        "laws": list(laws),
        "notes": list(notes),
    }
    return made


def weak_sweep():
    """Two engines up to 16 ranks with all there is: breakdown, baselines, a failed point."""
    base = 0.060
    rows = [
        row("alone", 1, base, role="alone", base_s=base, **split(0.055, 0.0)),
        row("node", 1, 0.30, role="node", batch=1024),
    ]
    for engine, slope in (("mpi", 0.0006), ("torch", 0.0032)):
        for n in RANKS:
            wait = slope * n if n > 1 else 0.0
            step = base * (1 + 0.004 * n) + wait
            more = split(step - wait - 0.003, wait, straggling_s=wait / 4)
            rows.append(row(engine, n, step, base_s=base, memory_bytes=3 << 28, **more))
    rows.append(failed_row("horovod", 16, "exit code 1: no such file"))
    return swept(rows, notes=("The model is not called as replica(x): input is part of forward.",))


def collectives():
    """Bandwidths of two engines, against memcpy."""
    rows = []
    for name, latency, speed in (("memcpy", 1e-6, 20e9), ("mpi", 5e-6, 12e9), ("torch", 4e-5, 3e9)):
        for size, text in (
            (2**10, "1 KiB"),
            (2**16, "64 KiB"),
            (2**22, "4 MiB"),
            (2**28, "256 MiB"),
        ):
            rows.append(series(name, 4, spread(latency + size / speed), case=text, variant=name))
    return result("collectives", rows)


def write_run(folder: Path, *, num_steps=600, killed=False) -> Path:
    """A run directory with two restarts, checkpoints and an evaluation every epoch."""
    folder.mkdir(parents=True)
    lines = []
    wall = 1_000_000.0
    for step in range(1, num_steps + 1):
        wall += 0.5 + 0.05 * (step % 7)
        clock = {"step": step, "epoch": step // 100, "time_s": wall - 1_000_000, "wall": wall}
        if step in (200, 401):
            wall += 30
            lines.append({"kind": "event", "event": "restored", **clock, "wall": wall})
        lines.append(
            {
                "kind": "step",
                **clock,
                "loss": 2.5 / (1 + step / 60) + 0.05 * ((step * 7919) % 13) / 13,
                "samples_per_s": 900 + 40 * ((step * 31) % 11) / 11,
                "step_s": 0.5,
                "input_s": 0.01,
                "forward_s": 0.15,
                "backward_s": 0.25,
                "exchange_s": 0.06,
                "update_s": 0.03,
                "slowest_rank": 3 if step % 4 else 1,
                "slowest_ratio": 1.08,
            }
        )
        if step % 50 == 0:
            lines.append({"kind": "event", "event": "saved", **clock, "path": f"step-{step}"})
        if step % 100 == 0:
            lines.append(
                {"kind": "eval", **clock, "loss": 2.6 / (1 + step / 60), "accuracy": step / 700}
            )
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + ('{"kind": "st' if killed else ""))
    (folder / "config.toml").write_text('[train]\nglobal_batch = 512\n\n[data]\ntrain = "a.npy"\n')
    if not killed:
        summary = {
            "state": "finished",
            "metrics": {"accuracy": 0.857},
            "steps": num_steps,
            "samples": 512 * num_steps,
            "seconds": 330.0,
            "samples_per_s": 930.9,
            "ranks": 8,
            "engine": "mpi",
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        facts = {
            "hosts": ["n1", "n2"],
            "torch": "2.13.0",
            "command": ["hpctrain", "train", "a.toml"],
        }
        (folder / "environment.json").write_text(json.dumps(facts))
    return folder
