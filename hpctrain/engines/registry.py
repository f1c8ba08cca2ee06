"""The engines there are, what each can do, and where its class is. Pure; free of torch and MPI.

An engine of this package is one line of `BUILT_IN`. Another package adds its own by an
entry point of the group `hpctrain.engines`, whose value is a subclass of `Engine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from hpctrain.errors import ConfigError
from hpctrain.plugins import find_plugins, load_plugin

if TYPE_CHECKING:
    from hpctrain.engines.base import Engine

__all__ = [
    "AUTO",
    "BUILT_IN",
    "GROUP",
    "BuiltIn",
    "Capabilities",
    "capabilities_of",
    "communicating_names",
    "engine_names",
    "load_engine",
]

AUTO = "auto"
GROUP = "hpctrain.engines"
"""The entry point group of engines from other packages."""

Topology = Literal["none", "hierarchical", "ring", "halving", "tree"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an engine can do; the defaults are what every engine does.

    The rest of hpctrain checks these, never an engine's class or name.
    """

    topology: Topology
    """How an allreduce on CPUs is made, for predictions; `none`: it does not communicate."""
    device_types: frozenset[str] = frozenset()
    """The kinds of devices that ranks may compute on, as torch names them; empty: every kind."""
    shares_memory: bool = False
    """Whether the ranks of a node can share host memory: see
    `Engine.node_group`."""
    shares_gpus: bool = False
    """Whether several ranks may compute on one GPU; NCCL refuses that."""
    own_threads: bool = False
    """Whether the engine's own threads send messages while all cores compute."""
    has_process_group: bool = False
    """Whether torch's own distributed modules (FSDP2, DTensor, pipelines) can run over it."""
    capturable: bool = False
    """Whether its collectives may be captured in a CUDA graph."""
    fixed_order_sum: bool = False
    """Whether equal inputs on the same placement of ranks give equal bits in every run."""
    can_shrink: bool = False
    """Whether the remaining ranks can continue after one has died."""

    def serves(self, device_type: str) -> bool:
        """Whether ranks may compute on this kind of device."""
        return not self.device_types or device_type in self.device_types


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltIn:
    """An engine of this package."""

    place: str
    """Module and class, imported when the engine is made."""
    capabilities: Capabilities


BUILT_IN = {
    "local": BuiltIn(
        place="hpctrain.engines.local:LocalEngine",
        capabilities=Capabilities(topology="none", shares_gpus=True, fixed_order_sum=True),
    ),
    "mpi": BuiltIn(
        place="hpctrain.engines.mpi:MpiEngine",
        capabilities=Capabilities(
            topology="hierarchical", shares_memory=True, shares_gpus=True, fixed_order_sum=True
        ),
    ),
    "horovod": BuiltIn(
        place="hpctrain.engines.horovod:HorovodEngine",
        capabilities=Capabilities(
            topology="halving", device_types=frozenset({"cpu", "cuda"}), own_threads=True
        ),
    ),
    "torch": BuiltIn(
        place="hpctrain.engines.torch_dist:TorchEngine",
        capabilities=Capabilities(
            topology="ring",
            device_types=frozenset({"cpu", "cuda", "xpu"}),
            own_threads=True,
        ),
    ),
}
"""One line per engine of this package."""


def engine_names() -> tuple[str, ...]:
    """The names of all engines, those of other packages last."""
    return (*BUILT_IN, *find_plugins(GROUP, own=BUILT_IN))


def communicating_names() -> tuple[str, ...]:
    """The names of the engines for more than one rank; no engine is imported."""
    alone = {name for name, line in BUILT_IN.items() if line.capabilities.topology == "none"}
    return tuple(name for name in engine_names() if name not in alone)


def capabilities_of(name: str) -> Capabilities:
    """What an engine can do; imports only engines of other packages.

    Raises:
        ConfigError: there is no such engine, or it cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name].capabilities
    return load_engine(name).capabilities


def load_engine(name: str) -> type[Engine]:
    """Import the class of an engine.

    Raises:
        ConfigError: there is no such engine, or it cannot be imported.
    """
    if name in BUILT_IN:
        module, cls = BUILT_IN[name].place.split(":")
        built_in: type[Engine] = getattr(import_module(module), cls)
        return built_in
    point = find_plugins(GROUP, own=BUILT_IN).get(name)
    if point is None:
        valid = ", ".join((AUTO, *engine_names()))
        raise ConfigError(f"engine={name!r} is unknown; choose one of {valid}")
    return _check(name, point.value, load_plugin(point, f"engine={name!r}"))


def _check(name: str, value: str, loaded: object) -> type[Engine]:
    """See that an entry point is an engine, without importing torch for that."""
    can = getattr(loaded, "capabilities", None)
    if not isinstance(loaded, type) or not isinstance(can, Capabilities):
        raise ConfigError(
            f"engine={name!r}: the entry point {value} must be a subclass of "
            f"hpctrain.engines.Engine with capabilities=Capabilities(...), and is {loaded!r} with "
            f"capabilities={can!r}"
        )
    engine: type[Engine] = loaded
    if engine.name != name:
        raise ConfigError(
            f"engine={name!r}: {value} has name={engine.name!r}; give the class and its entry "
            "point the same name"
        )
    return engine
