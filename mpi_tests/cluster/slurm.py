"""A private Slurm over test nodes: controller and clients on `head`, one slurmd on each node."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mpi_tests.cluster.command import ClusterError, end_group, run_command
from mpi_tests.cluster.nodes import Nodes
from mpi_tests.cluster.slurm_config import write_files

__all__ = ["FINAL", "Slurm"]

HEAD = "head"
TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")
SETTLE_LIMIT_S = 30.0
CLIENT_LIMIT_S = 20.0
POLL_S = 0.1
SHOWN_LINES = 30
FINAL = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)


class Slurm:
    """A context manager that starts a Slurm cluster and removes it at its end.

    There are two partitions, `main` (the default) and `high`, whose jobs preempt those of the
    first. Jobs that exit with 75 are requeued.

    Attributes:
        nodes: The nodes, with `head` as the last host: it runs the clients, but no jobs.
    """

    def __init__(
        self, count: int = 3, *, cpus: int = 4, gpus: int = 2, slurmd_timeout_s: int = 30
    ) -> None:
        """Only notes what to make.

        Args:
            count: How many compute nodes, `node1` ...
            cpus: The cores that each claims to have.
            gpus: The GPUs that each claims to have.
            slurmd_timeout_s: How long a node may be silent before it is called down; Slurm's own
                default is 300.
        """
        self.nodes = Nodes(count, extra=(HEAD,))
        self._cpus = cpus
        self._gpus = gpus
        self._slurmd_timeout_s = slurmd_timeout_s
        self._daemons: list[subprocess.Popen[str]] = []
        self._daemons_of: dict[str, subprocess.Popen[str]] = {}

    @staticmethod
    def why_not() -> str | None:
        """Why this machine cannot run a private Slurm; None when it can."""
        return Nodes.why_not() or _missing()

    @property
    def directory(self) -> Path:
        """Where the configuration, logs and output of jobs are."""
        return self.nodes.directory / "slurm"

    def __enter__(self) -> Self:
        if reason := self.why_not():
            raise ClusterError(reason)
        self.nodes.__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the daemons, last started first, then removes the nodes with all that runs there."""
        try:
            while self._daemons:
                end_group(self._daemons.pop())
        finally:
            self.nodes.close()

    def environment(self) -> dict[str, str]:
        """What clients started on any of the nodes need."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a client such as srun on the head node; as `Nodes.run` otherwise."""
        whole = self.environment() | dict(env or {})
        return self.nodes.run(
            HEAD, argv, timeout_s=timeout_s, cwd=cwd, env=whole, stdin=stdin, check=check
        )

    def popen(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a client on the head node; as `Nodes.popen` otherwise."""
        return self.nodes.popen(HEAD, argv, cwd=cwd, env=self.environment() | dict(env or {}))

    def sbatch(
        self,
        script: str,
        options: Sequence[str] = (),
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Submits a script and returns the job's id.

        Args:
            script: Its text, from the `#!` on.
            options: More options for sbatch.
            cwd: The job's directory; that where `output` looks when left out.
            env: Added to the job's environment.
        """
        command = ["sbatch", "--parsable", *options]
        where = cwd or self.directory / "jobs"
        said = self.run(command, timeout_s=CLIENT_LIMIT_S, cwd=where, env=env, stdin=script).stdout
        return int(said.split(";")[0])

    def job(self, job: int | str) -> dict[str, str]:
        """What the controller knows of a job, such as its `JobState`, `Restarts`, `ExitCode`."""
        command = ["scontrol", "--oneliner", "show", "job", str(job)]
        said = self.run(command, timeout_s=CLIENT_LIMIT_S).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def output(self, job: int | str) -> str:
        """What a job has printed so far, if neither `--output` nor a directory was given."""
        path = self.directory / "jobs" / f"slurm-{job}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def wait(self, job: int | str, states: Collection[str] = FINAL, *, timeout_s: float) -> str:
        """Waits until a job is in one of the states, and returns that state.

        Raises:
            ClusterError: The time is over, or the job ended in another state.
        """
        deadline = time.monotonic() + timeout_s
        while (state := self.job(job)["JobState"]) not in states:
            late = time.monotonic() > deadline
            if late or state in FINAL:
                when = f"after {timeout_s:g} s" if late else "at its end"
                wanted = " or ".join(sorted(states))
                raise ClusterError(
                    f"job {job} is {state} {when}, not {wanted}\n{self.job(job)}\n"
                    f"--- output\n{self.output(job)}"
                )
            time.sleep(POLL_S)
        return state

    def clear(self) -> None:
        """Cancels all jobs, takes nodes back that were drained, and waits until all are idle."""
        self.run(["scancel", "--user=root"], timeout_s=CLIENT_LIMIT_S)
        for host in self.nodes.hosts[:-1]:
            self._take_back(host)
        self._until("all nodes are idle", self._all_idle)

    def _take_back(self, host: str) -> None:
        back = ["scontrol", "update", f"nodename={host}", "state=resume"]
        self.run(back, timeout_s=CLIENT_LIMIT_S, check=False)  # refused where it was never away

    def power_off(self, host: str, *, tell: bool = True) -> None:
        """A node breaks down.

        Args:
            host: The node.
            tell: Tell the controller, which would notice only minutes later.
        """
        daemon = self._daemons_of[host]
        self._daemons.remove(daemon)
        self.nodes.power_off(host)
        daemon.wait(timeout=CLIENT_LIMIT_S)
        if not tell:
            return
        down = ["scontrol", "update", f"nodename={host}", "state=down", "reason=test"]
        self.run(down, timeout_s=CLIENT_LIMIT_S)

    def power_on(self, host: str) -> None:
        """The node comes back, and is taken back."""
        self._daemon(host, ["slurmd", "-D"])
        self._take_back(host)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        parts = []
        for path in sorted((self.directory / "log").iterdir()):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            parts.append("\n".join([f"--- {path.name}", *lines[-SHOWN_LINES:]]))
        return "\n".join(parts)

    def _start(self) -> None:
        self.directory.mkdir()
        compute = self.nodes.hosts[:-1]
        write_files(
            self.directory,
            head=(HEAD, self.nodes.address(HEAD)),
            nodes={host: self.nodes.address(host) for host in compute},
            cpus=self._cpus,
            gpus=self._gpus,
            slurmd_timeout_s=self._slurmd_timeout_s,
        )
        root = self.directory
        munged = ["munged", "--foreground", f"--key-file={root}/munge.key", "--num-threads=4"]
        munged += [f"--socket={root}/munge.sock", f"--pid-file={root}/munged.pid"]
        munged += [f"--log-file={root}/log/munged.log", f"--seed-file={root}/munge.seed"]
        self._daemon(HEAD, munged)
        self._until("munged listens", (root / "munge.sock").exists)
        self._daemon(HEAD, ["slurmctld", "-D"])
        for host in compute:
            self._daemon(host, ["slurmd", "-D"])
        self._until("all nodes are idle", self._all_idle)

    def _daemon(self, host: str, argv: Sequence[str]) -> None:
        """Starts a daemon that stays in the foreground, so that its end is seen."""
        path = self.directory / "log" / f"{argv[0]}.{host}.console"
        with path.open("w", encoding="utf-8") as console:
            process = self.nodes.popen(
                host, argv, cwd=self.directory, env=self.environment(), stdout=console.fileno()
            )
        self._daemons.append(process)
        self._daemons_of[host] = process

    def _all_idle(self) -> bool:
        # A client that asks before the controller listens would retry for long: time it out.
        command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"]
        with contextlib.suppress(ClusterError):
            said = self.run(command, timeout_s=2, check=False).stdout.split()
            return said == ["idle"] * (len(self.nodes.hosts) - 1)
        return False

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits for a condition; a daemon that ends, or the limit, is an error."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while not condition():
            ended = [process.args for process in self._daemons if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"{ended} ended" if ended else f"not after {SETTLE_LIMIT_S:g} s"
                raise ClusterError(f"Slurm does not get to where {what}: {why}\n{self.logs()}")
            time.sleep(POLL_S / 2)


@functools.cache
def _missing() -> str | None:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        packages = "slurmctld, slurmd, slurm-client and munge"
        return f"a private Slurm needs {', '.join(missing)}; install {packages}"
    # Slurm's plugin opens the library by this name, without a version.
    command = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libpmix.so')"]
    if run_command(command, timeout_s=CLIENT_LIMIT_S, check=False).returncode != 0:
        return "a private Slurm needs libpmix.so for srun --mpi=pmix; install libpmix-dev"
    return None
