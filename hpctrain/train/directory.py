"""The run directory: what a run leaves behind, and where."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import __version__
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.world import World

__all__ = ["RunDirectory", "describe_environment", "read_summary", "replace_file"]

_PACKAGES = ("numpy", "torch", "mpi4py", "horovod", "h5py", "safetensors")


class RunDirectory:
    """Paths of a run directory, and the small files in it. Written by one rank.

    Args:
        path: The directory; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.summary = path / "summary.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.csv = path / "metrics.csv"
        self.wandb = path / "wandb.json"

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is something to go on from."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def make(self) -> None:
        """Make the directory.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run directory {self.path} cannot be made ({error}); name another one"
            ) from error

    def put_aside(self) -> Path | None:
        """Rename what is there, so that a run can begin anew; where it went."""
        if not self.path.exists() or not any(self.path.iterdir()):
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json at once: it is never half written."""
        replace_file(self.summary, json.dumps(dict(summary), indent=1))

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration."""
        replace_file(self.config, text)

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Keep what the run ran on."""
        replace_file(self.environment, json.dumps(dict(facts), indent=1))


def read_summary(directory: Path) -> dict[str, Any] | None:
    """What summary.json says; None where there is none."""
    try:
        found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found


def describe_environment(world: World) -> dict[str, Any]:
    """What the run runs on, as plain data."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": versions,
        "mpi": world.mpi,
        "launcher": world.launch.title,
        "batch_system": world.launch.batch_system,
        "job_id": world.launch.job_id,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": world.seed,
        "num_nodes": world.num_nodes,
        "ranks": [
            {
                "host": info.host,
                "cores": info.cpus,
                "threads": info.num_threads,
                "device": str(info.device),
            }
            for info in world.ranks
        ],
    }


def replace_file(path: Path, text: str) -> None:
    """Write a small file at once: it is the old one or the new one, never half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w") as file:
        file.write(text if text.endswith("\n") else text + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
