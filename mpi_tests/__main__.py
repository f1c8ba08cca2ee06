"""One runner for all tests: `python -m mpi_tests [unit|ranks|launch ...] [-n 1,2,3,4] [-- pytest]`.

`--quick` runs what shows in minutes that everything works: all of `unit`, `ranks` at n = 2 without
Horovod and loggers, and scripts that know only torch under `hpctrain run` and mpirun. Without it,
everything runs.

Each part runs in a process of its own with an outer time limit; the last line counts all of them.
Where there are cores for it, parts run side by side: the halves of `unit`, one rank and a few
launches; and of `launch`, which waits more than it computes, what makes nodes of its own beside the
rest. Tests marked `alone` come after both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
_LONG = ("bench", "bench_slurm", "chaos", "eight_ranks", "jobs_restart_slurm", "jobs_resume")
_LONG += ("plan", "stopped_ranks")
PARTS = ("unit-1", "unit-2", "ranks", "launch")
_QUICK = ("plain_scripts",)
_QUICK_RANKS = "not horovod and not trainer_results"
LIMIT_S = {"unit": 600, "ranks": 900, "launch": 2100, "nodes": 900, "benchmarks": 900, "long": 2400}
LIMIT_S |= {"unit-1": 600, "unit-2": 600, "launch-quick": 600, "ranks-quick": 600}
_UNIT = sorted(f"unit/{path.name}" for path in (HERE / "unit").glob("test_*.py"))
MORE_PARTS = {
    "unit-1": _UNIT[::2],  # halves: there is work for two cores
    "unit-2": _UNIT[1::2],
    "nodes": ["launch/test_several_nodes.py", "launch/test_between_nodes.py"],
    "benchmarks": ["launch/test_benchmarks.py", "launch/test_benchmarks_node.py"],
    "long": [f"launch/test_{name}.py" for name in _LONG],
    "launch-quick": [f"launch/test_{name}.py" for name in _QUICK],
    "ranks-quick": ["ranks"],
}
QUICK_PARTS = ("unit-1", "unit-2", "launch-quick", "ranks-quick")
LAUNCH = {
    "launch cluster": "cluster and not alone",
    "launch others": "not cluster and not alone",
    "launch alone": "alone",
}
"""The pieces of `launch`, by their marks."""
SIDE_BY_SIDE = [
    {"unit-1", "unit-2", "ranks n=1", "launch-quick"},
    {"launch cluster", "launch others"},
]


def commands(parts: list[str], sizes: list[int], extra: list[str]) -> list[tuple[str, list[str]]]:
    """What to run for these parts, in order."""
    todo = []
    for part in parts:
        places = [str(HERE / place) for place in MORE_PARTS.get(part, [part])]
        pytest = ["-m", "pytest", *places, "--durations=12", *extra]
        if part in ("ranks", "ranks-quick"):
            if part == "ranks-quick" and "-k" not in extra:
                pytest += ["-k", _QUICK_RANKS]
            for size in sizes:
                run = ["-m", "hpctrain", "run", "-n", str(size), "--quiet"]
                together = ["-p", "mpi_tests.together"]
                todo.append((f"{part} n={size}", [sys.executable, *run, *pytest, *together]))
        elif part == "launch" and not extra and _num_cores() > 1:  # extra words may choose tests
            for name, marks in LAUNCH.items():
                todo.append((name, [sys.executable, *pytest, "-m", marks]))
        else:
            todo.append((part, [sys.executable, *pytest]))
    return todo


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


class Part:
    """A part that runs in a process of its own, ended when its time is up."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.limit_s = LIMIT_S[name.split()[0]]
        self.lines: list[str] = []
        self.out_of_time = False
        self.started = time.monotonic()
        self.seconds = 0.0
        self.process = subprocess.Popen(
            command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.timer = threading.Timer(self.limit_s, self._end)
        self.timer.daemon = True
        self.timer.start()

    def _end(self) -> None:
        self.out_of_time = True
        # pytest ends at the first; `hpctrain run` warns its ranks first, and ends them next.
        for limit_s in (5, 15):
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=limit_s)
                return
        self.process.kill()

    def follow(self, *, show: bool) -> None:
        """Read what it prints until it ends; show it as it comes, or later."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if show:
                print(line, end="", flush=True)
        self.process.wait()
        self.timer.cancel()
        self.seconds = time.monotonic() - self.started

    @property
    def text(self) -> str:
        """All that it has printed."""
        return "".join(self.lines)

    @property
    def trouble(self) -> str | None:
        """What went wrong, or None."""
        if self.out_of_time:
            return f"{self.name}: ended after {self.limit_s} s"
        code = self.process.returncode
        return f"{self.name}: exit code {code}" if code else None


def run_side_by_side(todo: list[tuple[str, list[str]]]) -> list[Part]:
    """Run parts at the same time; show the first as it runs, the others when they have ended."""
    parts = [Part(name, command) for name, command in todo]
    readers = [
        threading.Thread(target=part.follow, kwargs={"show": part is parts[0]}) for part in parts
    ]
    print(f"\n=== {' and '.join(part.name for part in parts)}", flush=True)
    for reader in readers:
        reader.start()
    for part, reader in zip(parts, readers, strict=True):
        reader.join()  # bounded by the part's own timer
        if part is not parts[0]:
            print(f"\n=== {part.name}\n{part.text}", end="")
        print(f"=== {part.name}: {part.seconds:.0f} s", flush=True)
    return parts


def groups_of(todo: list[tuple[str, list[str]]]) -> list[list[tuple[str, list[str]]]]:
    """What runs at the same time, in the order of the first of each group."""
    groups: dict[int, list[tuple[str, list[str]]]] = {}
    for number, one in enumerate(todo):
        beside = [-1 - i for i, names in enumerate(SIDE_BY_SIDE) if one[0] in names]
        groups.setdefault(beside[0] if beside and _num_cores() > 1 else number, []).append(one)
    return list(groups.values())


def counts(text: str) -> dict[str, int]:
    """Read pytest's closing line."""
    closing = [line for line in text.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", closing[-1]) if closing else []
    return {name: int(number) for number, name in found}


def main() -> int:
    """Run the parts and count what they did."""
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="python -m mpi_tests", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        choices=["unit", "ranks", "launch", *MORE_PARTS, []],
        help="default: all of them",
    )
    parser.add_argument("--quick", action="store_true", help="what shows that it works; n = 2")
    parser.add_argument("-n", "--sizes", help="ranks to run `ranks` with (default: 1,2,3,4)")
    parser.add_argument("--keep-result", action="store_true", help="write a dated summary")
    args = parser.parse_args(own)
    sizes = [int(n) for n in (args.sizes or ("2" if args.quick else "1,2,3,4")).split(",")]
    parts = args.parts or list(QUICK_PARTS if args.quick else PARTS)
    total: dict[str, int] = {}
    broken = []
    for group in groups_of(commands(parts, sizes, extra)):
        for part in run_side_by_side(group):
            for key, number in counts(part.text).items():
                total[key] = total.get(key, 0) + number
            if part.trouble is not None:
                broken.append(part.trouble)
            if args.keep_result:
                keep_result(part)
    for line in broken:
        print(f"BROKEN {line}")
    failed = total.get("failed", 0) + total.get("error", 0)
    failed = max(failed, len(broken))  # a part that died counts even if it counted nothing
    closing = f"{total.get('passed', 0)} passed, {failed} failed, {total.get('skipped', 0)} skipped"
    print(closing)
    return 1 if failed else 0


def keep_result(part: Part) -> None:
    """Write what a part gave to the day's file, which is committed, instead of what it gave before.

    All parts take long on a small machine, and may be run one by one.
    """
    from importlib.metadata import version

    from hpctrain.install.mpi import loaded_mpi
    from hpctrain.install.setup.sequence import TORCH

    day = time.strftime("%Y-%m-%d")
    machine = f"{platform.machine()}-{len(os.sched_getaffinity(0))}cores"
    torch = version("torch")
    words = f"{day}, {machine}, torch {torch}, {loaded_mpi().mpi}"
    # `make setup` has one version; `make test-torch` others.
    kind = "test-all" if torch.split("+")[0] == TORCH else f"torch-{torch.split('+')[0]}"
    path = HERE / "results" / f"{kind}-{day}-{machine}.txt"
    path.parent.mkdir(exist_ok=True)
    before = path.read_text().splitlines()[1:] if path.exists() else []
    kept = {line.split(": ")[0]: line for line in before}
    told = ", ".join(f"{number} {what}" for what, number in counts(part.text).items())
    trouble = f"BROKEN ({part.trouble}), " if part.trouble else ""
    kept[part.name] = f"{part.name}: {trouble}{told} in {part.seconds:.0f} s, commit {_commit()}"
    path.write_text("\n".join([words, *sorted(kept.values())]) + "\n")


def _commit() -> str:
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(git, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
