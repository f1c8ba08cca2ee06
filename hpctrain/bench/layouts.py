"""The best layout of each script on each machine, where `hpctrain run -n auto` finds it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.atomic import write_atomically
from hpctrain.bench.results import cpu_name, machine_id
from hpctrain.errors import ConfigError, InstallError
from hpctrain.install import held

__all__ = [
    "BestLayout",
    "LayoutBook",
    "best_layout",
    "digest_script",
    "find_layout",
    "this_machine",
]

_KEPT = 1000
_LOCK_WAIT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BestLayout:
    """What was found best for a script on a machine."""

    target: str
    """The whole path of a script or configuration, or a module's name."""
    arguments: tuple[str, ...]
    machine: str
    digest: str
    """Of the script or configuration as it was measured; empty of a module."""
    num_ranks: int
    num_threads: int
    why: str
    date: str
    num_rounds: int = 0
    """How often every layout was measured; 0: not recorded."""
    num_disturbed: int = 0
    """Rounds with background load."""


def this_machine() -> str:
    """Distinguishes machines whose best layouts may differ: processor and allowed cores."""
    cores = len(os.sched_getaffinity(0))
    return f"{cpu_name()} {machine_id(platform.machine(), cores)}"


def digest_script(target: str) -> str:
    """Shows whether a script or a configuration has changed; empty for a module."""
    if not Path(target).is_absolute():
        return ""
    return hashlib.sha256(Path(target).read_bytes()).hexdigest()[:16]


def best_layout(rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """The row to use, and why. Pure.

    One process with all cores, unless a layout is faster beyond noise: ranks have a price that a
    sweep does not see, such as memory. What was measured once is never beyond noise.

    Raises:
        ConfigError: one process, or everything else, could not be measured.
    """
    good = [row for row in rows if row["state"] == "ok"]
    node = next((row for row in good if row["role"] == "node"), None)
    if node is None:
        why = next((row["why"] for row in rows if row["role"] == "node"), "it is not in the sweep")
        raise ConfigError(f"one process with all cores could not be measured: {why}")
    best = max(good, key=lambda row: row.get("over_node", 1.0))
    cores = f"one process with {node['num_threads']} threads"
    if best is node or best.get("over_node_low", 0.0) <= 1.0:
        nearest = "" if best is node else f"; {best['num_ranks']} ranks were {_ratio(best)}"
        return node, f"{cores}: no layout of ranks is faster by more than noise{nearest}"
    return best, f"{_ratio(best)} as fast as {cores}"


def _ratio(row: Mapping[str, Any]) -> str:
    if "over_node_low" not in row:
        return f"{row['over_node']:.2f} times, measured once"
    low, high = row["over_node_low"], row["over_node_high"]
    return f"{row['over_node']:.2f} [{low:.2f}, {high:.2f}] times"


class LayoutBook:
    """All layouts this user has found, in one small JSON file.

    Args:
        home: The folder where hpctrain remembers things.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / "layouts.json"

    def read(self) -> list[BestLayout]:
        """All that is remembered, the newest last.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            rows = json.loads(self.path.read_text("utf-8"))["layouts"]
            return [BestLayout(**{**row, "arguments": tuple(row["arguments"])}) for row in rows]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self.path}, the file of saved layouts, cannot be read ({error}); move it away"
            ) from error

    def add(self, layout: BestLayout) -> None:
        """Remember a layout instead of what was known of the same script and machine.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            with held(
                self.path.with_suffix(".lock"), what="remember a layout", wait_s=_LOCK_WAIT_S
            ):
                others = [each for each in self.read() if _place(each) != _place(layout)]
                rows = [asdict(each) for each in [*others, layout][-_KEPT:]]
                write_atomically(self.path, json.dumps({"version": 1, "layouts": rows}, indent=1))
        except (OSError, InstallError) as error:
            raise ConfigError(f"{self.path} cannot be written: {error}") from error


def _place(layout: BestLayout) -> tuple[str, tuple[str, ...], str]:
    return layout.target, layout.arguments, layout.machine


def find_layout(
    layouts: Sequence[BestLayout],
    *,
    target: str,
    arguments: Sequence[str],
    machine: str,
    digest: str,
) -> tuple[BestLayout, list[str]]:
    """The layout for a program here, and what speaks against trusting it. Pure.

    Raises:
        ConfigError: none was found on such a machine.
    """
    known = [each for each in layouts if each.target == target and each.machine == machine]
    if not known:
        elsewhere = any(each.target == target for each in layouts)
        tail = " (it was measured on another kind of machine)" if elsewhere else ""
        raise ConfigError(
            f"-n auto: no layout of {Path(target).name} has been measured on this machine{tail}; "
            f"run `hpctrain bench layout {Path(target).name}` first, or give -n a number"
        )
    same = [each for each in known if each.arguments == tuple(arguments)]
    found = (same or known)[-1]
    differences = []
    if not found.num_rounds:
        differences.append("how often it was measured is not recorded")
    elif found.num_disturbed:
        differences.append(
            f"{found.num_disturbed} of {found.num_rounds} rounds were disturbed by other "
            "processes when it was measured"
        )
    if not same:
        words = " ".join(found.arguments) or "none"
        differences.append(f"it was measured with other arguments: {words}")
    if found.digest != digest:
        differences.append("the script has changed since it was measured")
    return found, differences
