"""Site profiles: what a centre's nodes, directives, environment and launch line look like.

A profile is one TOML file. `inherits` names another whose keys it takes over; tables are merged,
everything else is replaced.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.batch_systems import find_template, parse_duration, parse_memory
from hpctrain.errors import ConfigError
from hpctrain.submit.limits import QUEUE_OPTIONS, Queue, queue_from_table
from hpctrain.submit.words import (
    check_directive_value,
    check_identifier,
    check_name,
    check_path,
    check_printable,
    check_variable,
)
from hpctrain.tables import Key, adapt, check_keys, keys_of, mistake, trouble_with

__all__ = ["Site", "find_sites", "load_site", "site_from_table"]

GPU_REQUESTS = ("gpus-per-node", "gpus-per-task", "gres", "none")
GPU_VISIBILITIES = ("all", "launcher", "local-rank", "reversed")
# What ran or was read elsewhere did not run here, nor was it read for here.
_PROVENANCE = ("ever_run", "as_of", "source", "assumed", "sources")
_MASK = re.compile(r"(0x)?[0-9a-f]{1,64}|\d+(-\d+)?(,\d+(-\d+)?)*")
_SPEC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
_SUFFIX = re.compile(r"[a-z0-9.-]{0,63}")
_RESOURCE = re.compile(r"[a-z0-9][a-z0-9./-]{0,62}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One site, checked."""

    name: str
    title: str
    template: str
    """The template used unless the job names another."""
    ever_run: bool = False
    """Whether hpctrain ever ran there; if not, the profile was written from `source`."""
    as_of: str = ""
    """The day of that run, or on which the source was read."""
    source: str = ""
    """Where it ran, or what was read."""
    assumed: tuple[str, ...] = ()
    """Keys and variables of the profile that no site documentation confirms."""
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Which page, of which day, says which keys and variables."""
    hints: tuple[str, ...] = ()
    """Notes for the user that no key can express; written into every script."""
    mpi: str = ""
    gpus_per_node: int = 0
    """GPUs of a node: the most a job may request."""
    default_gpus_per_node: int | None = None
    """What a job gets by default; left out, all of them."""
    ranks_per_node: int | None = None
    """Left out, one for each requested GPU, or one."""
    cpus_per_rank: int | None = None
    threads_per_core: int = 1
    """How many of the batch system's CPUs are one core; OpenMP gets one thread per core."""
    max_walltime: str = ""
    """Of every queue; limits of single queues are in `queues`."""
    queues: Mapping[str, Queue] = field(default_factory=dict)
    queue_by: str = "partition"
    """Whether a job names its queue as partition or as qos."""
    memory: str = ""
    """Default per node with all its GPUs; left out, the batch system's."""
    partition: str = ""
    qos: str = ""
    constraint: str = ""
    account: str = ""
    """The account to charge if the job names none."""
    needs_account: bool = False
    whole_nodes: bool = False
    """Nodes are allocated whole, so cores and memory are not requested (PBS)."""
    select: tuple[str, ...] = ()
    """More parts of a PBS chunk, as `system=polaris`."""
    gpu_request: str = "gpus-per-node"
    gpu_visibility: str = "all"
    gpu_variable: str = "CUDA_VISIBLE_DEVICES"
    directives: tuple[str, ...] = ()
    launch_options: tuple[str, ...] = ()
    cpu_masks: tuple[str, ...] = ()
    """The cores of each local rank: masks for srun, lists for PALS."""
    modules: tuple[str, ...] = ()
    modules_after: tuple[str, ...] = ()
    """Loaded after the job's own modules, on which they depend."""
    library_paths: tuple[str, ...] = ()
    """Folders put in front of LD_LIBRARY_PATH, as those of a network plugin."""
    image_options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    multi_node_environment: Mapping[str, str] = field(default_factory=dict)
    """Added only where there is more than one node, as network plugins must be."""
    job_folders: Mapping[str, str] = field(default_factory=dict)
    """Variables that name a folder on the node: the path, and the job's id after it."""
    host_suffix: str = ""
    """Suffix of a node's name for its address on the fast network."""
    gpu_resource: str = "nvidia.com/gpu"
    """The Kubernetes resource name of a GPU."""
    node_local: str = "/tmp"

    def __post_init__(self) -> None:
        check_name(self.name, "site name")
        for text in (self.title, self.source, *self.hints, *self.sources):
            check_printable(text, f"site {self.name}: text")
        self._check_choices()
        self._check_named("assumed", self.assumed)
        for source, keys in self.sources.items():
            self._check_named(f"sources {source!r}", keys)
        for count, what in (
            (self.gpus_per_node + 1, "gpus_per_node"),
            ((self.default_gpus_per_node or 0) + 1, "default_gpus_per_node"),
            (_or_one(self.ranks_per_node), "ranks_per_node"),
            (_or_one(self.cpus_per_rank), "cpus_per_rank"),
            (self.threads_per_core, "threads_per_core"),
        ):
            if count < 1:
                raise ConfigError(f"site {self.name}: {what} is too small; correct the profile")
        if (self.default_gpus_per_node or 0) > self.gpus_per_node:
            raise ConfigError(
                f"site {self.name}: default_gpus_per_node = {self.default_gpus_per_node} is more "
                f"than gpus_per_node = {self.gpus_per_node}; correct the profile"
            )
        for name in (self.partition, self.qos, self.account):
            if name:
                check_identifier(name, f"site {self.name}: directive value")
        if self.constraint:
            check_directive_value(self.constraint, f"site {self.name}: constraint")
        for word in (*self.select, *self.cpu_masks):
            check_directive_value(word, f"site {self.name}: value")
        for word in (*self.launch_options, *self.image_options):
            check_printable(word, f"site {self.name}: word")
        for name, value in self.variables.items():
            check_variable(name)
            check_printable(value, f"site {self.name}: {name}")
        check_variable(self.gpu_variable)
        paths = {"node_local": self.node_local, **self.job_folders}
        paths |= {f"library path {path}": path for path in self.library_paths}
        for what, path in paths.items():
            check_path(path, f"site {self.name}: {what}")
            if not path.startswith("/"):
                raise ConfigError(f"site {self.name}: {what} must be an absolute path")
        if self.max_walltime:
            parse_duration(self.max_walltime, what=f"site {self.name}: max_walltime")
        if self.memory:
            parse_memory(self.memory)

    @property
    def variables(self) -> dict[str, str]:
        """All environment variables that the profile sets."""
        return {**self.environment, **self.multi_node_environment, **self.job_folders}

    def _check_named(self, what: str, names: Sequence[str]) -> None:
        known = {entry.name for entry in dataclasses.fields(self)} - {"name", *_PROVENANCE}
        if unknown := sorted(set(names) - known - set(self.variables)):
            raise ConfigError(
                f"site {self.name}: {what} names {', '.join(unknown)}, which are neither keys nor "
                "variables of the profile"
            )

    def _check_choices(self) -> None:
        template = find_template(self.template)
        for given, known, what in (
            (self.mpi, ("", *template.mpis), "mpi"),
            (self.gpu_request, GPU_REQUESTS, "gpu_request"),
            (self.gpu_visibility, GPU_VISIBILITIES, "gpu_visibility"),
            (self.queue_by, QUEUE_OPTIONS, "queue_by"),
        ):
            if given not in known:
                raise ConfigError(
                    f"site {self.name}: {what} = {given!r} is not possible; choose from "
                    f"{', '.join(repr(word) for word in known)}"
                )
        for mask in self.cpu_masks:
            if not _MASK.fullmatch(mask):
                raise ConfigError(
                    f"site {self.name}: cpu mask {mask!r} is neither a hexadecimal mask nor a list "
                    "of cores"
                )
        for text, pattern, what in (
            *((module, _SPEC, "a module") for module in (*self.modules, *self.modules_after)),
            (self.host_suffix, _SUFFIX, "the end of a host name"),
            (self.gpu_resource, _RESOURCE, "a resource of Kubernetes"),
        ):
            check_printable(text, f"site {self.name}: {what}")
            if not pattern.fullmatch(text):
                raise ConfigError(f"site {self.name}: {text!r} cannot be {what}; correct it")
        try:
            if self.as_of or self.ever_run:
                datetime.date.fromisoformat(self.as_of)
        except ValueError:
            raise ConfigError(
                f"site {self.name}: as_of = {self.as_of!r} is not a date; write it as 2026-11-15"
            ) from None


def _or_one(count: int | None) -> int:
    return 1 if count is None else count


def find_sites(folders: Sequence[Path]) -> dict[str, Path]:
    """All profiles by name; those of earlier folders come first."""
    found: dict[str, Path] = {}
    for folder in folders:
        if folder.is_dir():
            for path in sorted(folder.glob("*.toml")):
                found.setdefault(path.stem, path)
    return found


def load_site(name: str, folders: Sequence[Path]) -> Site:
    """Read a site by its name in one of the folders, or by the path of its file.

    Raises:
        ConfigError: there is no such profile, or it has an error.
    """
    sites = find_sites(folders)
    path = Path(name) if name.endswith(".toml") else sites.get(name)
    if path is None:
        raise ConfigError(
            f"no site {name!r}; there are {', '.join(sorted(sites))}; or give the path of a "
            "profile, as ./mysite.toml"
        )
    return site_from_table(path.stem, _resolve(path, folders, ()))


def _resolve(path: Path, folders: Sequence[Path], below: tuple[Path, ...]) -> dict[str, Any]:
    if path in below:
        chain = " -> ".join(str(step) for step in (*below, path))
        raise ConfigError(f"site profiles inherit in a circle: {chain}; break it")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"site profile {path} cannot be read: {error}") from error
    if "inherits" not in table:
        return table
    parent = table.pop("inherits")
    merged = _resolve(_find_parent(path, parent, folders), folders, (*below, path))
    for key in _PROVENANCE:
        merged.pop(key, None)
    return _merge(merged, table)


def _merge(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """The upper table over the lower, table by table."""
    merged = dict(lower)
    for key, value in upper.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _find_parent(path: Path, parent: object, folders: Sequence[Path]) -> Path:
    """The profile that one inherits from: a site's name, or a path from its own folder on.

    One that takes the name of its parent, to change a site for oneself, means the one it hides.
    """
    if isinstance(parent, str) and parent.endswith(".toml"):
        return path.parent / parent
    known = [find_sites([folder]) for folder in folders]
    for sites in known:
        if isinstance(parent, str) and sites.get(parent, path) != path:
            return sites[parent]
    names = sorted({name for sites in known for name in sites} - {path.stem})
    raise ConfigError(
        f"site profile {path} inherits {parent!r}, which does not exist; there are "
        f"{', '.join(names)}; or give the path of a profile, as ./other.toml"
    )


def site_from_table(name: str, table: Mapping[str, Any]) -> Site:
    """Make a site of what a profile says.

    Raises:
        ConfigError: a key is missing, unknown or of the wrong type.
    """
    keys = {key.name: key for key in keys_of(Site) if key.name != "name"}
    needed = [key.name for key in keys.values() if key.is_required]
    check_keys(table, f"site {name}", needed=needed, known=keys)
    values = {given: _adapt(name, keys[given], value) for given, value in table.items()}
    for given, value in values.items():
        if trouble := trouble_with(keys[given], value):
            raise ConfigError(f"site {name}: {mistake(given, table[given], trouble)}")
    return Site(name=name, **values)


def _adapt(site: str, key: Key, value: Any) -> Any:
    """Convert a value of TOML to the type of the field."""
    if key.name == "queues":
        if not isinstance(value, dict):
            raise ConfigError(
                f"site {site}: {mistake(key.name, value, 'must be a table of queues')}"
            )
        return {name: _queue(site, name, table) for name, table in value.items()}
    if isinstance(value, dict):
        return {name: tuple(one) if isinstance(one, list) else one for name, one in value.items()}
    if key.name == "as_of" and isinstance(value, datetime.date):  # TOML has dates of its own
        return str(value)
    return adapt(key, value)


def _queue(site: str, name: str, table: object) -> Queue:
    check_identifier(name, f"site {site}: queue")
    return queue_from_table(f"site {site}: queue {name}", table)
