"""What a site's queues take: nodes, and walltime by the number of nodes. Pure.

A job past a limit is refused here, before it waits in a queue only to be refused by the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.batch_systems import format_clock, parse_duration
from hpctrain.errors import ConfigError
from hpctrain.tables import check_keys, count_of

__all__ = ["QUEUE_OPTIONS", "Queue", "check_limits", "queue_from_table"]

QUEUE_OPTIONS = ("partition", "qos")
"""The option with which a site's jobs choose their queue."""

_KEYS = ("min_nodes", "max_nodes", "max_walltime", "by_request")


@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """One queue, partition or quality of service, as far as its limits are known."""

    min_nodes: int = 1
    max_nodes: int | None = None
    max_walltime: tuple[tuple[int | None, int], ...] = ()
    """Seconds for jobs of up to this many nodes, the smallest first; None: of any size."""
    by_request: bool = False
    """By permission of the site only: never proposed."""

    def walltime_s(self, num_nodes: int) -> int | None:
        """The longest walltime for a job of this size; None where it is not known."""
        for most, seconds in self.max_walltime:
            if most is None or num_nodes <= most:
                return seconds
        return None

    def why_not(self, num_nodes: int, walltime_s: int) -> str:
        """What the queue takes, and what was requested instead; "" for a job that it takes."""
        if num_nodes < self.min_nodes or num_nodes > (self.max_nodes or num_nodes):
            return f"takes {self.nodes}, and {num_nodes} were requested"
        most = self.walltime_s(num_nodes)
        if most is not None and walltime_s > most:
            return (
                f"gives a job on {_nodes(num_nodes)} at most {format_clock(most)}, and "
                f"{format_clock(walltime_s)} was requested"
            )
        return ""

    @property
    def nodes(self) -> str:
        """How many nodes a job may have, in words."""
        if self.max_nodes is None:
            return (
                "any number of nodes" if self.min_nodes == 1 else f"{self.min_nodes} nodes or more"
            )
        if self.min_nodes == self.max_nodes:
            return _nodes(self.max_nodes)
        return f"{self.min_nodes} to {self.max_nodes} nodes"

    def describe(self) -> str:
        """Its limits in a few words."""
        times = [
            f"{format_clock(seconds)}{'' if most is None else f' on at most {_nodes(most)}'}"
            for most, seconds in self.max_walltime
        ]
        asked = ["by request only"] if self.by_request else []
        return ", ".join([self.nodes, *times, *asked])


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def queue_from_table(what: str, table: object) -> Queue:
    """Make a queue of what a profile says.

    Raises:
        ConfigError: a key is unknown, or a limit is not valid.
    """
    given = check_keys(table, what, needed=(), known=_KEYS)
    least = count_of(given.get("min_nodes", 1), f"{what}: min_nodes")
    most = count_of(given["max_nodes"], f"{what}: max_nodes") if "max_nodes" in given else None
    if most is not None and most < least:
        raise ConfigError(f"{what}: max_nodes = {most} is less than min_nodes = {least}")
    by_request = given.get("by_request", False)
    if not isinstance(by_request, bool):
        raise ConfigError(f"{what}: by_request = {by_request!r} must be true or false")
    return Queue(
        min_nodes=least,
        max_nodes=most,
        max_walltime=_walltimes(what, given.get("max_walltime")),
        by_request=by_request,
    )


def _walltimes(what: str, given: Any) -> tuple[tuple[int | None, int], ...]:
    """Read `"2 d"`, or `{91 = "2h", 183 = "6h"}`: by the most nodes that a limit is for."""
    if given is None:
        return ()
    what = f"{what}: max_walltime"
    if isinstance(given, str):
        return ((None, parse_duration(given, what=what)),)
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"{what} = {given!r} must be a duration, or a table of them by nodes")
    found = []
    for nodes, text in given.items():
        if not nodes.isdecimal() or int(nodes) < 1 or not isinstance(text, str):
            raise ConfigError(f"{what}: {nodes} = {text!r} is not understood; write 64 = '2h'")
        found.append((int(nodes), parse_duration(text, what=what)))
    return tuple(sorted(found))


def check_limits(
    queues: Mapping[str, Queue],
    queue: str,
    *,
    num_nodes: int,
    walltime_s: int,
    site: str,
    option: str = "partition",
) -> None:
    """Refuse a job that its queue does not take, and name the queues that would.

    Args:
        queues: Those of the site, by name.
        queue: The requested one; one that is not in `queues` has no known limits.
        num_nodes: Of the job.
        walltime_s: Of the job.
        site: Its title, for the message.
        option: By which the job chooses its queue: `partition` or `qos`.

    Raises:
        ConfigError: the queue does not accept it.
    """
    if queue not in queues:
        return
    why = queues[queue].why_not(num_nodes, walltime_s)
    if not why:
        return
    better = [
        f"--{option} {name} ({other.describe()})"
        for name, other in queues.items()
        if not other.by_request and not other.why_not(num_nodes, walltime_s)
    ]
    cure = (
        f"use {', or '.join(better)}"
        if better
        else "no queue in the profile takes it: request less and add --requeue, or another number "
        "of nodes"
    )
    raise ConfigError(f"{site}: queue {queue} {why}; {cure}")
