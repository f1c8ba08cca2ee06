"""One runner for all tests: `python -m mpi_tests [unit|ranks|launch ...] [-n 1,2,3,4] [-- pytest]`.

Each part runs in a process of its own with an outer time limit; the last line counts all of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("unit", "ranks", "launch")
OUT_OF_TIME = -1000  # no process ends so
LIMIT_S = {"unit": 600, "ranks": 900, "launch": 1200, "nodes": 900}
MORE_PARTS = {"nodes": "launch/test_several_nodes.py"}


def commands(parts: list[str], sizes: list[int], extra: list[str]) -> list[tuple[str, list[str]]]:
    """What to run for these parts, in order."""
    todo = []
    for part in parts:
        pytest = ["-m", "pytest", str(HERE / MORE_PARTS.get(part, part)), *extra]
        if part == "ranks":
            for size in sizes:
                run = ["-m", "hpctrain", "run", "-n", str(size), "--quiet"]
                together = ["-p", "mpi_tests.together"]
                todo.append((f"ranks n={size}", [sys.executable, *run, *pytest, *together]))
        else:
            todo.append((part, [sys.executable, *pytest]))
    return todo


def run_bounded(command: list[str], limit_s: float) -> tuple[int, str]:
    """Run a command, show its output as it comes, and end it when its time is up."""
    lines = []
    with subprocess.Popen(
        command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        killer = _alarm(process, limit_s)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        signal.alarm(0)
        code = process.wait()
    return (OUT_OF_TIME if killer["fired"] else code), "".join(lines)


def _alarm(process: subprocess.Popen[str], limit_s: float) -> dict[str, bool]:
    state = {"fired": False}

    def end(_number: int, _frame: object) -> None:
        state["fired"] = True
        process.terminate()  # hpctrain run ends its ranks; pytest ends with its children
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()

    signal.signal(signal.SIGALRM, end)
    signal.alarm(int(limit_s))
    return state


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
        "parts", nargs="*", choices=[*PARTS, *MORE_PARTS, []], help="default: unit ranks launch"
    )
    parser.add_argument("-n", "--sizes", default="1,2,3,4", help="ranks to run `ranks` with")
    parser.add_argument("--keep-result", action="store_true", help="write a dated summary")
    args = parser.parse_args(own)
    sizes = [int(size) for size in args.sizes.split(",")]
    total: dict[str, int] = {}
    broken, rows = [], []
    for name, command in commands(args.parts or list(PARTS), sizes, extra):
        print(f"\n=== {name}", flush=True)
        started = time.monotonic()
        limit_s = LIMIT_S[name.split()[0]]
        code, text = run_bounded(command, limit_s)
        for key, number in counts(text).items():
            total[key] = total.get(key, 0) + number
        if code != 0:
            why = f"ended after {limit_s} s" if code == OUT_OF_TIME else f"exit code {code}"
            broken.append(f"{name}: {why}")
        rows.append(f"{name}: {counts(text)} in {time.monotonic() - started:.0f} s")
        print(f"=== {name}: {time.monotonic() - started:.0f} s", flush=True)
    for line in broken:
        print(f"BROKEN {line}")
    failed = total.get("failed", 0) + total.get("error", 0)
    failed = max(failed, len(broken))  # a part that died counts even if it counted nothing
    closing = f"{total.get('passed', 0)} passed, {failed} failed, {total.get('skipped', 0)} skipped"
    if args.keep_result:
        keep_result([*rows, *(f"BROKEN {line}" for line in broken), closing])
    print(closing)
    return 1 if failed else 0


def keep_result(lines: list[str]) -> None:
    """Write what a complete run gave to a dated file that is committed."""
    from importlib.metadata import version

    from hpctrain.install.mpi import loaded_mpi

    day = time.strftime("%Y-%m-%d")
    machine = f"{platform.machine()}-{len(os.sched_getaffinity(0))}cores"
    words = f"{day}, {machine}, torch {version('torch')}, {loaded_mpi().mpi}"
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    text = "\n".join([words, *lines]) + "\n"
    (folder / f"test-all-{day}-{machine}.txt").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
