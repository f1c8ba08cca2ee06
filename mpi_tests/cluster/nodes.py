"""Several nodes on one machine: each has its own network, host name, /etc/hosts and /dev/shm.

The nodes hang on a bridge inside a namespace of its own. The machine's own network gets neither
an interface nor a route, and no node has a way out, so nothing but the nodes is ever addressed.
File systems, /tmp too, are shared by the nodes as on a cluster with a parallel file system.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from mpi_tests.cluster.agent import write_agent
from mpi_tests.cluster.claim import (
    TOOL_LIMIT_S,
    claim,
    process_ids,
    release,
    remove_leftovers,
)
from mpi_tests.cluster.command import ClusterError, run_command
from mpi_tests.cluster.node import Node, ip, make_switch, start_node

__all__ = ["Nodes", "Traffic"]

TOOLS = ("ip", "tc", "nsenter", "unshare", "mount", "hostname", "env")
# The variables of a launcher around the tests would be mistaken for the node's own.
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL")

PROBE = """
ip link add bridge0 type bridge && ip link add veth0 type veth peer name veth1 &&
ip link set veth0 master bridge0 && mount -t sysfs sysfs /sys &&
mount -t tmpfs tmpfs /dev/shm
"""


class Traffic(NamedTuple):
    """Bytes that a node has received and sent since it was made."""

    received: int
    sent: int


class Nodes:
    """A context manager that makes nodes `node1` ... and removes all of them at its end.

    Attributes:
        hosts: The host names; those of `extra` come last.
        directory: A temporary directory, seen by all nodes, for whatever a test needs.
        rsh_agent: A program to give to a launcher instead of ssh.
    """

    def __init__(self, count: int, *, shm_size: str = "1g", extra: Sequence[str] = ()) -> None:
        """Only notes what to make.

        Args:
            count: How many nodes.
            shm_size: The size of each /dev/shm, as the tmpfs option `size` takes it.
            extra: More hosts, such as a login node.
        """
        if not 1 <= count + len(extra) <= 200:
            raise ValueError(f"count={count} with {len(extra)} extra hosts; choose 1 to 200 in all")
        self.hosts = (*(f"node{i}" for i in range(1, count + 1)), *extra)
        self._shm_size = shm_size
        self._nodes: dict[str, Node] = {}
        self._directory: Path | None = None

    @staticmethod
    def why_not() -> str | None:
        """Why this machine cannot make nodes; None when it can."""
        if os.geteuid() != 0:
            return "test nodes are namespaces, which need root"
        return _missing()

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise ClusterError("these nodes are not up; use them inside `with Nodes(...)`")
        return self._directory

    @property
    def rsh_agent(self) -> Path:
        return self.directory / "rsh"

    def __enter__(self) -> Self:
        if reason := self.why_not():
            raise ClusterError(reason)
        remove_leftovers()
        self._directory = claim()
        try:
            self._make()
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
        """Removes everything that was made; harmless when nothing is left."""
        directory, self._directory = self._directory, None
        if directory is None:
            return
        nodes, self._nodes = self._nodes, {}
        try:
            release(directory)
        finally:
            for node in nodes.values():
                node.end()

    def address(self, host: str) -> str:
        """The IPv4 address of a node."""
        return self._node(host).address

    def environment(self, family: str) -> dict[str, str]:
        """What makes `mpirun`, started inside one node, reach the others.

        Args:
            family: The MPI that mpirun belongs to, `mpich` or `openmpi`.
        """
        agent, scratch = str(self.rsh_agent), str(self.directory / "tmp")
        settings = {
            "mpich": {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": agent},
            # The second names are those of Open MPI 5. Waiting ranks yield, since all nodes
            # share the cores of one machine.
            "openmpi": {
                "OMPI_MCA_plm_rsh_agent": agent,
                "PRTE_MCA_plm_ssh_agent": agent,
                "OMPI_MCA_orte_tmpdir_base": scratch,
                "PRTE_MCA_prte_tmpdir_base": scratch,
                "OMPI_MCA_mpi_yield_when_idle": "1",
            },
        }
        if family not in settings:
            raise ValueError(f"family={family!r}; choose one of {', '.join(settings)}")
        return settings[family]

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node to its end; `env` is added to this process's environment.

        Raises:
            ClusterError: It took longer than `timeout_s`, or failed and `check` is on.
        """
        command = self._enter(host, argv, cwd)
        whole = self._whole(env)
        return run_command(command, timeout_s=timeout_s, env=whole, stdin=stdin, check=check)

    def popen(
        self,
        host: str,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Starts a command on a node, in a process group of its own (see `command.end_group`).

        Whatever still runs when the nodes are removed is killed; the caller closes the pipes.
        """
        return subprocess.Popen(
            self._enter(host, argv, cwd),
            env=self._whole(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def processes(self) -> dict[int, str]:
        """Everything that runs on the nodes: process ids and command lines."""
        found = {}
        holders = {node.holder.pid for node in self._nodes.values()}
        for node in self._nodes.values():
            for pid in set(process_ids(node.namespace)) - holders:
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                found[pid] = line.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def limit_bandwidth(self, host: str, rate: str | None) -> None:
        """Limits what a node sends and what it receives, each to a rate such as `400mbit`.

        None takes the limit away.
        """
        for namespace, link in ((self._node(host).namespace, "eth0"), (self._switch, host)):
            command = ["tc", "-n", namespace, "qdisc"]
            if rate is None:
                command += ["del", "dev", link, "root"]
            else:
                command += ["replace", "dev", link, "root", "tbf", "rate", rate]
                command += ["burst", "256kb", "latency", "50ms"]
            run_command(command, timeout_s=TOOL_LIMIT_S)

    def interface_bytes(self, host: str) -> Traffic:
        """The traffic of a node so far, without what it sent to itself."""
        name = self._node(host).namespace
        (link,) = json.loads(ip("-n", name, "-json", "-statistics", "link", "show", "dev", "eth0"))
        return Traffic(link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"])

    def cut(self, host: str) -> None:
        """Pulls a node's cable: packets to and from it vanish, connections stay open."""
        ip("-n", self._switch, "link", "set", "dev", self._node(host).host, "down")

    def mend(self, host: str) -> None:
        """Plugs the cable in again."""
        ip("-n", self._switch, "link", "set", "dev", self._node(host).host, "up")

    def power_off(self, host: str) -> None:
        """Ends everything on a node at once; nobody there can say goodbye."""
        node = self._node(host)
        self.cut(host)
        for pid in set(process_ids(node.namespace)) - {node.holder.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + TOOL_LIMIT_S
        while set(process_ids(node.namespace)) - {node.holder.pid}:
            if time.monotonic() > deadline:
                raise ClusterError(f"something on {host} outlives SIGKILL")
            time.sleep(0.02)
        self.mend(host)

    @property
    def _switch(self) -> str:
        return f"{self.directory.name}-switch"

    def _node(self, host: str) -> Node:
        if host not in self.hosts:
            raise ValueError(f"no node {host!r}; there are {', '.join(self.hosts)}")
        if host not in self._nodes:
            raise ClusterError("these nodes are not up; use them inside `with Nodes(...)`")
        return self._nodes[host]

    def _enter(self, host: str, argv: Sequence[str], cwd: Path | None) -> list[str]:
        return [*self._node(host).enter(), "env", "-C", str(cwd or Path.cwd()), *argv]

    @staticmethod
    def _whole(env: Mapping[str, str] | None) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return own | dict(env or {})

    def _make(self) -> None:
        root = self.directory
        for name in ("pids", "cgroup", "tmp"):
            (root / name).mkdir()
        (root / "tmp").chmod(0o1777)
        addresses = {host: f"10.77.0.{i}" for i, host in enumerate(self.hosts, start=1)}
        names = {"localhost": "127.0.0.1"} | addresses
        lines = [f"{address} {host}\n" for host, address in names.items()]
        (root / "hosts").write_text("".join(lines), encoding="utf-8")
        write_agent(self.rsh_agent, root / "pids")
        make_switch(self._switch)
        for host, address in addresses.items():
            self._nodes[host] = start_node(
                host, address, directory=root, switch=self._switch, shm_size=self._shm_size
            )
        for node in self._nodes.values():
            node.wait_until_ready()
            for name in (node.host, node.address):
                (root / "pids" / name).write_text(f"{node.holder.pid}\n", encoding="ascii")


@functools.cache
def _missing() -> str | None:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"test nodes need {', '.join(missing)}; install iproute2, util-linux and hostname"
    command = ["unshare", "--net", "--uts", "--mount", "--ipc", "sh", "-c", PROBE]
    result = run_command(command, timeout_s=TOOL_LIMIT_S, check=False)
    if result.returncode != 0:
        return f"this machine lets root make no namespaces or links: {result.stderr.strip()}"
    return None
