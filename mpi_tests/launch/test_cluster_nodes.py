"""The test nodes behave as separate machines, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpi_tests.cluster.claim import remove_leftovers, start_time
from mpi_tests.cluster.command import ClusterError, end_group, run_command
from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.cluster.nodes import Nodes

LIMIT_S = 20

RANKS = """
import json, os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
host = socket.gethostname()
if node.rank == 0:
    open(f"/dev/shm/mark-{host}", "w").close()
world.Barrier()
marks = sorted(name for name in os.listdir("/dev/shm") if name.startswith("mark-"))
facts = {"host": host, "peers": node.allgather(host), "marks": marks, "cwd": os.getcwd()}
everything = world.gather(facts)
if world.rank == 0:
    print(json.dumps(everything))
"""

RECEIVE = """
import socket, time
with socket.create_server(("", 5000)) as server:
    server.settimeout(15)
    print("ready", flush=True)
    link, _ = server.accept()
    with link:
        link.settimeout(15)
        start, count = time.perf_counter(), 0
        while data := link.recv(1 << 20):
            count += len(data)
print(count / (time.perf_counter() - start))
"""

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3])) as link:
    link.sendall(bytes(int(sys.argv[2])))
"""

CRASH = """
import time
from mpi_tests.cluster.nodes import Nodes
nodes = Nodes(1).__enter__()
stray = nodes.popen("node1", ["sleep", "300"])
print(nodes.directory.name, stray.pid, flush=True)
time.sleep(300)
"""


def python(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", script, *map(str, arguments)]


@contextmanager
def receiver(nodes: Nodes, host: str) -> Iterator[subprocess.Popen[str]]:
    """A program on a node that takes one connection and prints its bytes per second."""
    with nodes.popen(host, python(RECEIVE)) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            end_group(process)


def rate(nodes: Nodes, source: str, target: str, count: int) -> float:
    """Sends bytes from one node to another and returns how many arrived in a second."""
    with receiver(nodes, target) as process:
        nodes.run(source, python(SEND, target, count, 10), timeout_s=LIMIT_S)
        return float(process.communicate(timeout=LIMIT_S)[0])


def namespaces() -> str:
    return run_command(["ip", "netns", "list"], timeout_s=LIMIT_S).stdout


def alive(pid: int) -> bool:
    return start_time(pid) is not None


def test_ranks_over_two_nodes_see_two_machines(nodes: Nodes, tmp_path: Path) -> None:
    mpi = mpi_of_this_python()
    command = mpi.command({"node1": 2, "node2": 2}, python(RANKS))
    env = nodes.environment(mpi.family)
    result = nodes.run("node1", command, timeout_s=40, cwd=tmp_path, env=env)
    ranks = json.loads(result.stdout)
    assert [rank["host"] for rank in ranks] == ["node1", "node1", "node2", "node2"]
    assert all(rank["peers"] == [rank["host"]] * 2 for rank in ranks)
    assert all(rank["marks"] == [f"mark-{rank['host']}"] for rank in ranks)
    assert {rank["cwd"] for rank in ranks} == {str(tmp_path)}
    assert nodes.interface_bytes("node2").received > 1000


def test_a_node_has_its_own_names_links_and_shared_memory() -> None:
    if reason := Nodes.why_not():
        pytest.skip(reason)
    look = "hostname; cat /etc/hosts; ls /sys/class/net; stat -f -c '%b %S' /dev/shm"
    with Nodes(2, shm_size="8m", extra=["login"]) as nodes:
        assert nodes.hosts == ("node1", "node2", "login")
        for host in nodes.hosts:
            name, *lines = nodes.run(host, ["sh", "-c", look], timeout_s=LIMIT_S).stdout.split("\n")
            assert name == host
            assert lines[:4] == [
                "127.0.0.1 localhost",
                *(f"{nodes.address(h)} {h}" for h in nodes.hosts),
            ]
            assert lines[4:6] == ["eth0", "lo"]
            blocks, size = map(int, lines[6].split())
            assert blocks * size == 8 << 20
    assert "10.77.0." not in run_command(["ip", "address"], timeout_s=LIMIT_S).stdout


def test_commands_get_directory_environment_input_and_status(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "7")
    script = 'pwd; echo "$GIVEN ${SLURM_PROCID-none}"; cat; exit 3'
    result = nodes.run(
        "node2",
        ["sh", "-c", script],
        timeout_s=LIMIT_S,
        cwd=tmp_path,
        env={"GIVEN": "a b"},
        stdin="text",
        check=False,
    )
    assert result.returncode == 3
    assert result.stdout == f"{tmp_path}\na b none\ntext"
    with pytest.raises(ClusterError, match="exited with 1"):
        nodes.run("node2", ["false"], timeout_s=LIMIT_S)
    with pytest.raises(ValueError, match="no node 'node9'; there are node1, node2"):
        nodes.run("node9", ["true"], timeout_s=LIMIT_S)


def test_a_slow_command_is_ended_with_its_children(nodes: Nodes) -> None:
    start = time.monotonic()
    with pytest.raises(ClusterError, match=r"(?s)still ran after 2 s.*begun"):
        nodes.run("node1", ["sh", "-c", "echo begun; sleep 300 & sleep 300"], timeout_s=2)
    assert time.monotonic() - start < 10
    assert nodes.processes() == {}


def test_the_agent_does_as_ssh_does(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "kept")
    agent = [str(nodes.rsh_agent), "-x", "-o", "BatchMode=yes", "-oPort=1"]
    for name in ("node2", "root@node2", nodes.address("node2")):
        command = [*agent, name, "hostname;", 'echo "${SECRET-unset}"']
        said = nodes.run("node1", command, timeout_s=LIMIT_S).stdout
        assert said == "node2\nunset\n"
    result = nodes.run("node1", [*agent, "node9", "true"], timeout_s=LIMIT_S, check=False)
    assert (result.returncode, result.stderr) == (255, "no node node9\n")
    with pytest.raises(ValueError, match="family='lam'; choose one of mpich, openmpi"):
        nodes.environment("lam")


def test_a_bandwidth_limit_holds_both_ways_and_can_be_lifted(nodes: Nodes) -> None:
    size, limit = 6_000_000, 10e6
    nodes.limit_bandwidth("node2", "80mbit")
    before = nodes.interface_bytes("node2")
    for source, target in (("node1", "node2"), ("node2", "node1")):
        # The burst and the socket buffers let a little through at once.
        assert 0.1 * limit < rate(nodes, source, target, size) < 1.3 * limit
    after = nodes.interface_bytes("node2")
    assert after.received - before.received > size
    assert after.sent - before.sent > size
    nodes.limit_bandwidth("node2", None)
    assert rate(nodes, "node1", "node2", 5 * size) > 3 * limit


def test_a_cut_node_cannot_be_reached_until_mended(nodes: Nodes) -> None:
    with receiver(nodes, "node2") as process:
        nodes.cut("node2")
        result = nodes.run("node1", python(SEND, "node2", 9, 0.5), timeout_s=LIMIT_S, check=False)
        assert "TimeoutError" in result.stderr or "No route to host" in result.stderr
        nodes.mend("node2")
        nodes.run("node1", python(SEND, "node2", 9, 10), timeout_s=LIMIT_S)
        assert float(process.communicate(timeout=LIMIT_S)[0]) > 0


def test_two_sets_of_nodes_do_not_meet(nodes: Nodes) -> None:
    with Nodes(2) as others:
        assert others.directory != nodes.directory
        with receiver(others, "node2"):
            result = nodes.run("node1", python(SEND, "node2", 9, 5), timeout_s=LIMIT_S, check=False)
            assert "ConnectionRefusedError" in result.stderr
        assert nodes.directory.name in namespaces()
    assert nodes.run("node1", ["hostname"], timeout_s=LIMIT_S).stdout == "node1\n"


def test_nothing_is_left_even_of_what_still_ran() -> None:
    if reason := Nodes.why_not():
        pytest.skip(reason)
    links = run_command(["ip", "-o", "link"], timeout_s=LIMIT_S).stdout
    with Nodes(2) as nodes:
        directory = nodes.directory
        daemon = "setsid sleep 300 >/dev/null 2>&1 </dev/null &"
        nodes.run("node2", ["sh", "-c", daemon], timeout_s=LIMIT_S)
        (stray,) = nodes.processes()
        pids = {stray, *(int(path.read_text()) for path in (directory / "pids").iterdir())}
        assert len(pids) == 3
        assert all(map(alive, pids))
        assert namespaces().count(directory.name) == 3
    assert not any(map(alive, pids))
    assert not directory.exists()
    assert directory.name not in namespaces()
    assert run_command(["ip", "-o", "link"], timeout_s=LIMIT_S).stdout == links
    with pytest.raises(ClusterError, match="not up"):
        nodes.run("node1", ["true"], timeout_s=LIMIT_S)


def test_what_a_killed_session_left_is_removed() -> None:
    if reason := Nodes.why_not():
        pytest.skip(reason)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", CRASH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as session:
        assert session.stdout is not None
        name, stray = session.stdout.readline().split()
        assert name not in remove_leftovers(), "its owner lives"
        assert alive(int(stray))
        session.send_signal(signal.SIGKILL)
        session.wait(timeout=LIMIT_S)
    assert name in namespaces()
    assert name in remove_leftovers()
    assert name not in namespaces()
    assert not alive(int(stray))


def test_without_root_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Nodes.why_not() == "test nodes are namespaces, which need root"
    with pytest.raises(ClusterError, match="need root"), Nodes(1):
        pytest.fail("nodes were made without root")
