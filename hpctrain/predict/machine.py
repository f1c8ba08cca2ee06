"""How ranks are connected: the predictor's second input, and its TOML files. Pure.

A machine file has a source for each number.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from math import log2
from pathlib import Path
from typing import Any

from hpctrain.engines import communicating_names
from hpctrain.errors import ConfigError
from hpctrain.tables import check_keys, count_of, number_of, positive, text_of, write_toml

__all__ = [
    "LOAD_LIMIT",
    "NO_LATENCY_S",
    "NO_LIMIT",
    "SCHEMA",
    "TOPOLOGIES",
    "Costs",
    "Link",
    "Machine",
    "find_machine",
    "machine_names",
    "parse_machine",
    "render_machine",
    "sourced_keys",
    "write_machine",
]

TOPOLOGIES = ("ring", "halving", "tree", "hierarchical")
LOAD_LIMIT = 0.05
"""The highest background load while a machine is measured, as in benchmarks."""
NO_LATENCY_S = 1e-9
NO_LIMIT = 1e15
"""What a fit writes for an unmeasured link: it costs nothing."""


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
    """Time for summation, and what training adds to a collective, if not included in bandwidth."""
    crowding: float = 0.0
    """In shared memory: what every doubling of ranks adds, relative to the time for two ranks."""

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
    """Costs for engines that are not listed below."""
    engines: Mapping[str, Costs] = field(default_factory=dict)
    jitter: float = 0.0
    """Standard deviation of a rank's compute time from step to step, relative."""
    jitter_error: float = 0.0
    contention: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """Ranks on a node, and the slowdown of computing with that many."""
    contention_error: float = 0.0
    """Relative uncertainty of the part that is above 1."""
    memory_bytes_per_node: int = 0
    """0: not said."""
    memory_bytes_per_device: int = 0
    """Of a rank's GPU; 0: ranks compute in the node's memory."""
    measured: bool = False
    """Whether `hpctrain bench fit` wrote it, rather than a person from documentation."""
    foreign_load: float = 0.0
    """The largest background load while it was measured, as a share of all cores."""
    as_of: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The source of each number, by dotted key."""

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
                "contention.slowdown must begin with 1.0 and never be below it: it is relative to "
                "a rank that has the node to itself"
            )

    @property
    def is_disturbed(self) -> bool:
        """Whether background load was too high for its numbers to be trusted."""
        return self.foreign_load > LOAD_LIMIT

    def costs_of(self, engine: str | None) -> Costs:
        """What a collective costs by this engine."""
        return self.engines.get(engine or "", self.costs)

    def slowdown(self, num_ranks: int) -> float:
        """How many times longer a rank computes with this many on its node.

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


SCHEMA = "hpctrain.machine/1"


def machine_names() -> list[str]:
    """The machines that come with the package."""
    folder = resources.files("hpctrain.predict") / "machines"
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def find_machine(name: str | Path) -> Machine:
    """A machine by its name, or from a file that ends in `.toml`.

    Raises:
        ConfigError: there is none, or it is not as the schema says.
    """
    if str(name).endswith(".toml"):
        path = Path(name)
        try:
            return parse_machine(path.read_text(encoding="utf-8"), path.stem, where=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    if name not in (names := machine_names()):
        raise ConfigError(
            f"no machine {str(name)!r}; there are {', '.join(names)}, or give a file that ends in "
            ".toml (`hpctrain bench fit` writes one)"
        )
    entry = resources.files("hpctrain.predict") / "machines" / f"{name}.toml"
    return parse_machine(entry.read_text(encoding="utf-8"), str(name))


_CONTENTION = ("ranks", "slowdown", "error")
_COSTS = {"topology", "reduce_s_per_byte", "crowding", "intra", "inter"}
_LINK = ("latency_s", "bytes_per_s", "latency_error", "bandwidth_error")
_TOP = {
    *("schema", "title", "ranks_per_node", "jitter", "jitter_error", "contention", "measured"),
    *(
        "foreign_load",
        "memory_bytes_per_node",
        "memory_bytes_per_device",
        "as_of",
        "sources",
        "engines",
    ),
    *_COSTS,
}


def parse_machine(text: str, name: str, *, where: str = "") -> Machine:
    """Read a machine from TOML.

    Args:
        text: The file's.
        name: What the machine is called.
        where: What errors call the file; empty: by the machine's name.

    Raises:
        ConfigError: it is not as the schema says; with the file and the section.
    """
    where = where or f"machine {name}"
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error
    needed = {"schema", "title", "ranks_per_node", "topology", "intra", "inter"}
    table = dict(check_keys(data, where, needed=needed, known=_TOP))
    if (schema := table.pop("schema")) != SCHEMA:
        raise ConfigError(f"{where} has schema {schema!r}; this version reads {SCHEMA!r}")
    costs = _costs({key: table.pop(key) for key in _COSTS & set(table)}, where)
    parts = table.pop("engines", {})
    check_keys(parts, f"{where}, [engines]", needed=(), known=communicating_names())
    engines = {
        engine: _costs(part, where, base=costs, section=f"engines.{engine}")
        for engine, part in parts.items()
    }
    points, doubt = _contention(table.pop("contention", {}), where)
    sources = check_keys(
        table.pop("sources", {}), f"{where}, [sources]", needed=(), known=sourced_keys(data)
    )
    with _naming(where):
        return Machine(
            name=name,
            title=text_of(table.pop("title"), "title"),
            costs=costs,
            engines=engines,
            contention=points,
            contention_error=doubt,
            sources={key: text_of(value, f"sources.{key}") for key, value in sources.items()},
            **table,
        )


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Prefix an error with its place."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def sourced_keys(data: Mapping[str, Any], before: str = "") -> set[str]:
    """The dotted keys of all numbers and the topology: what a source can be given for."""
    keys: set[str] = set()
    for key, value in data.items():
        if isinstance(value, Mapping):
            if key != "sources":
                keys |= sourced_keys(value, f"{before}{key}.")
        elif key not in ("schema", "title", "as_of", "measured", "foreign_load"):
            keys.add(f"{before}{key}")
    return keys


def _costs(part: object, file: str, *, base: Costs | None = None, section: str = "") -> Costs:
    where = f"{file}, [{section}]" if section else file
    needed = () if base else ("topology", "intra", "inter")
    table = check_keys(part, where, needed=needed, known=_COSTS)
    links = {
        key: _link(
            table,
            key,
            f"{file}, [{section}{'.' * bool(section)}{key}]",
            getattr(base, key, None),
        )
        for key in ("intra", "inter")
    }
    with _naming(where):
        return Costs(
            topology=table.get("topology") or (base.topology if base else ""),
            reduce_s_per_byte=table.get(
                "reduce_s_per_byte", base.reduce_s_per_byte if base else 0.0
            ),
            crowding=table.get("crowding", base.crowding if base else 0.0),
            **links,
        )


def _link(table: Mapping[str, Any], key: str, where: str, base: Link | None) -> Link:
    if base is not None and key not in table:
        return base
    found = check_keys(table[key], where, needed=("latency_s", "bytes_per_s"), known=_LINK)
    with _naming(where):
        return Link(**found)


def _contention(part: object, where: str) -> tuple[tuple[tuple[int, float], ...], float]:
    where = f"{where}, [contention]"
    table = check_keys(part, where, needed=(), known=_CONTENTION)
    ranks, slow = table.get("ranks", [1]), table.get("slowdown", [1.0])
    if not isinstance(ranks, list) or not isinstance(slow, list) or len(ranks) != len(slow):
        raise ConfigError(f"{where} needs lists ranks and slowdown of one length")
    with _naming(where):
        pairs = tuple(
            (count_of(n, "ranks"), number_of(s, "slowdown"))
            for n, s in zip(ranks, slow, strict=True)
        )
        return pairs, number_of(table.get("error", 0.0), "error")


def render_machine(machine: Machine) -> str:
    """The machine as TOML, which `parse_machine` reads back."""
    tree: dict[str, Any] = {
        "schema": SCHEMA,
        "title": machine.title,
        "as_of": machine.as_of,
        "measured": machine.measured,
        "foreign_load": float(machine.foreign_load),
        "ranks_per_node": machine.ranks_per_node,
        "memory_bytes_per_node": machine.memory_bytes_per_node,
        "memory_bytes_per_device": machine.memory_bytes_per_device,
        "jitter": float(machine.jitter),
        "jitter_error": float(machine.jitter_error),
        **_costs_tree(machine.costs),
        "contention": {
            "ranks": [count for count, _ in machine.contention],
            "slowdown": [float(slow) for _, slow in machine.contention],
            "error": float(machine.contention_error),
        },
    }
    if machine.engines:
        tree["engines"] = {name: _costs_tree(costs) for name, costs in machine.engines.items()}
    if machine.sources:
        tree["sources"] = dict(machine.sources)
    return _warning(machine) + write_toml(tree)


def _costs_tree(costs: Costs) -> dict[str, Any]:
    links = {"intra": costs.intra, "inter": costs.inter}
    return {
        "topology": costs.topology,
        "reduce_s_per_byte": float(costs.reduce_s_per_byte),
        "crowding": float(costs.crowding),
        **{key: {n: float(getattr(link, n)) for n in _LINK} for key, link in links.items()},
    }


def _warning(machine: Machine) -> str:
    if not machine.is_disturbed:
        return ""
    return (
        f"# Other processes used {machine.foreign_load:.0%} of the cores while this was measured: "
        "do not\n"
        "# trust these numbers; measure again on a quiet machine.\n"
    )


def write_machine(machine: Machine, path: str | Path) -> None:
    """Write a machine file.

    Raises:
        ConfigError: it cannot be written, or would not be found again by its name.
    """
    if not str(path).endswith(".toml"):
        raise ConfigError(f"{path} must end in .toml: `hpctrain plan` recognizes a file by it")
    try:
        Path(path).write_text(render_machine(machine), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
