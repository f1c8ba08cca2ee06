"""How ranks are connected: the predictor's second input. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2

from hpctrain.errors import ConfigError
from hpctrain.predict.checks import count_of, number_of, positive

__all__ = ["LOAD_LIMIT", "NO_LATENCY_S", "NO_LIMIT", "TOPOLOGIES", "Costs", "Link", "Machine"]

TOPOLOGIES = ("ring", "halving", "tree", "hierarchical")
LOAD_LIMIT = 0.05
"""The share of all cores that others may use while a machine is measured, as in benchmarks."""
NO_LATENCY_S = 1e-9
NO_LIMIT = 1e15
"""What a fit writes for a link that it knows nothing of: it costs nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A way between ranks: inside a node of each rank, between nodes of each whole node."""

    latency_s: float
    bytes_per_s: float
    latency_error: float = 0.0
    """Relative, one standard deviation, like all errors here."""
    bandwidth_error: float = 0.0

    @property
    def is_unknown(self) -> bool:
        """Whether a fit had no measurement of it."""
        return self.latency_s <= NO_LATENCY_S and self.bytes_per_s >= NO_LIMIT

    def __post_init__(self) -> None:
        number_of(self.latency_s, "latency_s")
        positive(self.bytes_per_s, "bytes_per_s")
        number_of(self.latency_error, "latency_error")
        number_of(self.bandwidth_error, "bandwidth_error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a collective costs, by one engine."""

    topology: str
    intra: Link
    inter: Link
    reduce_s_per_byte: float = 0.0
    """Adding up, and what training adds to a collective, if bandwidth does not contain it."""
    crowding: float = 0.0
    """In shared memory, how much of the time for two ranks every doubling of them adds to it."""

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ConfigError(f"topology={self.topology!r}; choose one of {', '.join(TOPOLOGIES)}")
        number_of(self.reduce_s_per_byte, "reduce_s_per_byte")
        number_of(self.crowding, "crowding")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine as far as training on it is concerned."""

    name: str
    title: str
    ranks_per_node: int
    costs: Costs
    """What holds for engines that are not named below."""
    engines: Mapping[str, Costs] = field(default_factory=dict)
    jitter: float = 0.0
    """Standard deviation of a rank's compute time from step to step, relative."""
    jitter_error: float = 0.0
    contention: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """Ranks on a node, and how many times longer computing takes then."""
    contention_error: float = 0.0
    """Relative uncertainty of the part that is above 1."""
    memory_bytes_per_node: int = 0
    """0: not said."""
    memory_bytes_per_device: int = 0
    """Of a rank's GPU; 0: ranks compute in the node's memory."""
    measured: bool = False
    """Whether `hpctrain bench fit` wrote it, or somebody from documentation."""
    foreign_load: float = 0.0
    """The largest share of all cores that others used while it was measured."""
    as_of: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    """For each number, by its dotted key, where it is from."""

    def __post_init__(self) -> None:
        count_of(self.ranks_per_node, "ranks_per_node")
        for name in ("jitter", "jitter_error", "contention_error", "foreign_load"):
            number_of(getattr(self, name), name)
        for name in ("memory_bytes_per_node", "memory_bytes_per_device"):
            count_of(getattr(self, name), name, least=0)
        ranks = [count for count, _ in self.contention]
        if not ranks or ranks[0] != 1 or ranks != sorted(set(ranks)):
            raise ConfigError(f"contention.ranks={ranks} must rise, beginning with 1")
        if self.contention[0][1] != 1.0 or min(slow for _, slow in self.contention) < 1.0:
            raise ConfigError(
                "contention.slowdown must begin with 1.0 and never be below it: it counts from a "
                "rank that has the node to itself"
            )

    @property
    def is_disturbed(self) -> bool:
        """Whether others used so much of the machine that its numbers are not to be trusted."""
        return self.foreign_load > LOAD_LIMIT

    def costs_of(self, engine: str | None) -> Costs:
        """What a collective costs by this engine."""
        return self.engines.get(engine or "", self.costs)

    def slowdown(self, num_ranks: int) -> float:
        """How many times longer a rank computes among so many on its node.

        Between measured points, and beyond them, it goes with the logarithm of the number of ranks:
        caches and memory fill up, and each further rank takes a smaller share from the others.
        """
        count = count_of(num_ranks, "num_ranks")
        points = self.contention
        if len(points) == 1:
            return points[0][1]
        after = next((i for i, (n, _) in enumerate(points) if n >= count), len(points) - 1)
        after = max(after, 1)
        (n0, s0), (n1, s1) = points[after - 1], points[after]
        if count > n1:
            return s1 + max(0.0, self._trend()) * log2(count / n1)
        return s0 + (s1 - s0) * log2(count / n0) / log2(n1 / n0)

    def _trend(self) -> float:
        """The slope over all points: two noisy ones at the end alone would say too much."""
        pairs = [(log2(n), slow - 1.0) for n, slow in self.contention]
        return sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)
