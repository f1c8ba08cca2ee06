"""One test node: a network namespace, and a holder process with the other namespaces."""

from __future__ import annotations

import select
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mpi_tests.cluster.claim import TOOL_LIMIT_S
from mpi_tests.cluster.command import ClusterError, run_command

__all__ = ["Node", "ip", "make_switch", "start_node"]

BRIDGE = "bridge0"

# /sys shows the network it was mounted in, so that each node needs its own; the control groups
# mounted below the old one are carried over.
HOLDER = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --rbind /sys/fs/cgroup "$2/cgroup"
mount -t sysfs sysfs /sys
mount --rbind "$2/cgroup" /sys/fs/cgroup
umount --lazy "$2/cgroup"
mount -t tmpfs -o "mode=1777,size=$3" tmpfs /dev/shm
echo ready
exec sleep infinity
"""


def ip(*words: str) -> str:
    """Runs `ip` and returns what it printed."""
    return run_command(["ip", *words], timeout_s=TOOL_LIMIT_S).stdout


def make_switch(name: str) -> None:
    """Makes the namespace whose bridge the nodes are plugged into."""
    ip("netns", "add", name)
    ip("-n", name, "link", "add", "name", BRIDGE, "type", "bridge")
    ip("-n", name, "link", "set", "dev", BRIDGE, "up")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node that was started.

    Attributes:
        host: Its host name, and the name of its port on the switch.
        namespace: Its network namespace.
        address: Its IPv4 address.
        holder: The process that keeps its namespaces; its pid is the way in.
    """

    host: str
    namespace: str
    address: str
    holder: subprocess.Popen[str]

    def wait_until_ready(self) -> None:
        """Waits until the holder has set the node up."""
        stream = self.holder.stdout
        said = ""
        if stream is not None and select.select([stream], [], [], TOOL_LIMIT_S)[0]:
            said = stream.readline()
        if said != "ready\n":
            raise ClusterError(f"{self.host} did not come up: {said.strip() or 'it said nothing'}")

    def enter(self) -> list[str]:
        """The words before a command that run it inside this node."""
        return ["nsenter", "-t", str(self.holder.pid), "-n", "-u", "-m", "-i", "--"]

    def end(self) -> None:
        """Ends the holder; whatever else runs there keeps its namespaces."""
        self.holder.kill()
        self.holder.wait(timeout=TOOL_LIMIT_S)
        if self.holder.stdout is not None:
            self.holder.stdout.close()


def start_node(host: str, address: str, *, directory: Path, switch: str, shm_size: str) -> Node:
    """Plugs a new node into the switch and starts its holder, without waiting for it.

    Args:
        host: Its host name.
        address: Its IPv4 address, in a network of 24 bits.
        directory: Holds the file `hosts` and an empty directory `cgroup`.
        switch: The namespace of the bridge.
        shm_size: The size of its /dev/shm.
    """
    name = f"{directory.name}-{host}"
    ip("netns", "add", name)
    pair = ["type", "veth", "peer", "name", "eth0", "netns", name]
    ip("-n", switch, "link", "add", "name", host, *pair)
    ip("-n", switch, "link", "set", "dev", host, "master", BRIDGE, "up")
    ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        ip("-n", name, "link", "set", "dev", link, "up")
    # None of these programs forks: the pid stays the same down to the final `sleep`.
    command = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "--ipc"]
    command += ["--propagation", "slave", "sh", "-c", HOLDER, "sh"]
    holder = subprocess.Popen(
        [*command, host, str(directory), shm_size],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return Node(host=host, namespace=name, address=address, holder=holder)
