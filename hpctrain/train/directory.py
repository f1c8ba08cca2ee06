"""The run directory: what a run leaves behind, and the lock that lets one job in at a time."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hpctrain import __version__
from hpctrain.atomic import write_atomically
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.world import World

__all__ = [
    "Lock",
    "RunDirectory",
    "describe_environment",
    "holder_of",
    "is_alive",
    "is_held",
    "read_summary",
    "replace_file",
]


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
        """Whether there is a checkpoint to resume from."""
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
                f"run directory {self.path} cannot be created ({error}); name another one"
            ) from error

    def put_aside(self) -> Path | None:
        """Rename an existing run, so that a new one can start; returns its new path."""
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
    write_atomically(path, text if text.endswith("\n") else text + "\n", sync=True)


LOCK_NAME = "run.lock"
_BEAT_S = 30.0
_STOP_S = 5.0
_SILENT_S = 300.0
"""A holder on another host that was silent for this long is gone."""
_ENDING_S = 60.0
"""How long the processes of a cancelled job may take to exit."""
_ASK_AGAIN_S = 2.0


class Lock:
    """The lock of a run directory, held from its making to `release`.

    A file that appears at once with its content (a link), for file systems on which `flock` means
    nothing between nodes. A thread touches it every 30 s, so that other hosts can see that its
    holder is alive.

    Args:
        directory: The run directory.
        job_id: This batch job, where it is one.
        batch_system: Of this job, as `Launch.batch_system`.
        cluster: Whose ids these are: a job of another cluster cannot be queried.
        ask: Checks whether a job still runs, as `faults.ask_job`; None: unknown,
            and a holder on another host counts as alive until it has been silent for long.

    Raises:
        ConfigError: another job holds it; the message says which.
    """

    def __init__(
        self,
        directory: Path,
        *,
        job_id: str | None = None,
        batch_system: str | None = None,
        cluster: str | None = None,
        ask: Callable[[str | None, str], str | None] | None = None,
    ) -> None:
        self.path = directory / LOCK_NAME
        self._mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "job_id": job_id,
            "batch_system": batch_system,
            "cluster": cluster,
            "since": time.time(),
        }
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="run.lock")
        for _ in range(5):  # removing a stale lock may lose the race for the new one
            if self._try():
                self._thread.start()
                return
            holder = holder_of(directory)
            if holder is None:
                continue  # it has just been released
            alive = is_alive(holder, silent_s=self._silence(), job_id=job_id)
            if alive and not self._is_over(holder, ask):
                raise ConfigError(_refusal(directory, holder, self.path))
            with contextlib.suppress(FileNotFoundError):
                self.path.rename(self.path.with_suffix(f".stale-{os.getpid()}"))
                self.path.with_suffix(f".stale-{os.getpid()}").unlink()
        raise ConfigError(
            f"{self.path} is repeatedly taken by other jobs; check who else uses {directory}"
        )

    def _is_over(
        self, holder: Mapping[str, Any], ask: Callable[[str | None, str], str | None] | None
    ) -> bool:
        """Whether the batch system says that the holder's job has ended.

        A job that was killed is silent, but so is one whose file system is slow: the batch system
        has at once what silence shows after minutes.
        """
        same = ("batch_system", "cluster")
        if ask is None or not holder.get("job_id"):
            return False
        if any(self._mine[key] is None or holder.get(key) != self._mine[key] for key in same):
            return False
        deadline = time.monotonic() + _ENDING_S
        while (said := ask(holder["batch_system"], holder["job_id"])) == "ending":
            if time.monotonic() > deadline:
                return False
            self._over.wait(_ASK_AGAIN_S)
        return said == "over"

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_S):
            if holder_of(self.path.parent) == self._mine:
                with contextlib.suppress(OSError):  # a busy file system is no reason to stop
                    os.utime(self.path)

    def _silence(self) -> float:
        """Seconds since the lock was touched, by the file system's own clock."""
        return self._now - _touched(self.path, self._now)

    def _try(self) -> bool:
        draft = self.path.with_suffix(f".draft-{self._mine['host']}-{os.getpid()}")
        draft.write_text(json.dumps(self._mine))
        self._now = draft.stat().st_mtime
        try:
            os.link(draft, self.path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def release(self) -> None:
        """Release the lock; one that is no longer ours is left alone."""
        self._over.set()
        self._thread.join(_STOP_S)  # a dead file system must not keep the run from ending
        if holder_of(self.path.parent) == self._mine:
            self.path.unlink(missing_ok=True)


def holder_of(directory: Path) -> dict[str, Any] | None:
    """Who holds the lock of a run directory; None where it is free."""
    try:
        found: dict[str, Any] = json.loads((directory / LOCK_NAME).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found


def is_alive(holder: Mapping[str, Any], *, silent_s: float, job_id: str | None = None) -> bool:
    """Whether the holder of a lock still runs, as far as can be seen from here.

    Args:
        holder: What the lock says.
        silent_s: How long it was not touched.
        job_id: This batch job: one that was requeued has its old number, and runs only once.
    """
    if holder.get("host") == socket.gethostname():
        try:
            process = psutil.Process(int(holder.get("pid", 0)))
            return abs(process.create_time() - float(holder.get("started", 0.0))) < 1.0
        except psutil.NoSuchProcess:
            return False
    if job_id is not None and holder.get("job_id") == job_id:
        return False
    return silent_s < _SILENT_S


def is_held(directory: Path) -> bool:
    """Whether a holder that seems to be alive has the lock of a run directory."""
    holder = holder_of(directory)
    now = time.time()
    silent_s = now - _touched(directory / LOCK_NAME, now)
    return holder is not None and is_alive(holder, silent_s=silent_s)


def _touched(path: Path, otherwise: float) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return otherwise


def _refusal(directory: Path, holder: Mapping[str, Any], path: Path) -> str:
    job = f", job {holder['job_id']}" if holder.get("job_id") else ""
    return (
        f"{directory} is in use by process {holder.get('pid', '?')} on "
        f"{holder.get('host', 'an unknown host')}{job}; wait for it, name another "
        f"logging.directory, or, if that job is gone, wait {_SILENT_S / 60:g} minutes or remove "
        f"{path}"
    )
