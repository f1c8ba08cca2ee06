"""What a script says of nodes, GPUs and ranks, as far as it says it in numbers."""

from __future__ import annotations

import re

from hpctrain.submit.lint.script import Script
from hpctrain.submit.lint.starts import Start

__all__ = ["gpus_per_node", "is_shared", "num_nodes", "ranks_per_node", "tasks_per_node"]

_GPUS = {
    "gpus-per-node": r"(?:\w+:)?(\d+)",
    "gres": r"(?:.*,)?gpu(?::[\w.-]+)?:(\d+)(?:[(,].*)?",
    "gpus": r"(?:[\w.-]+:)?(\d+)",
    "select": r".*ngpus=(\d+).*",
    "gpu": r"num=(\d+)(?!/task).*",
}
_EACH = ("--ntasks-per-node", "--tasks-per-node", "-ppn", "--ppn", "-perhost", "-npernode")
_TOTAL = ("-n", "--ntasks", "-np", "--np")


def num_nodes(script: Script) -> int | None:
    """How many nodes are asked for; None where it cannot be told."""
    if option := script.option("nodes", "select"):
        match = re.match(r"\d+", option.value)
        return int(match.group()) if match else None
    tasks, each = script.number("ntasks"), script.number("ntasks-per-node")
    if tasks and each:
        return -(-tasks // each)
    return None if (tasks or 1) > 1 and script.batch == "slurm" else 1


def gpus_per_node(script: Script) -> tuple[int, int] | None:
    """The number of GPUs per node that is asked for, and its line."""
    for name, pattern in _GPUS.items():
        option = script.option(name)
        if option and (match := re.fullmatch(pattern, option.value)):
            nodes = (num_nodes(script) or 1) if name == "gpus" else 1
            return int(match.group(1)) // nodes, option.line
    return None


def tasks_per_node(script: Script) -> int | None:
    """Tasks on a node by the directives; 1 where they ask for none."""
    for name, pattern in (("select", r"mpiprocs=(\d+)"), ("nodes", r"ppn=(\d+)")):
        option = script.option(name)
        if option and script.batch == "pbs" and (match := re.search(pattern, option.value)):
            return int(match.group(1))
    if script.option("ntasks-per-node"):
        return script.number("ntasks-per-node")
    if script.option("ntasks-per-gpu") and (gpus := gpus_per_node(script)):
        each = script.number("ntasks-per-gpu")
        return each * gpus[0] if each else None
    if script.option("ntasks"):
        tasks, nodes = script.number("ntasks"), num_nodes(script) or 1
        return tasks // nodes if tasks and tasks % nodes == 0 else None
    return 1


def ranks_per_node(script: Script, start: Start) -> int | None:
    """Ranks that a launcher starts on a node; None where it cannot be told."""
    if (each := start.option(*_EACH)) is not None:
        return script.resolve(each)
    if match := re.search(r"ppr:(\d+):node", start.option("--map-by", "-map-by") or ""):
        return int(match.group(1))
    if start.launcher not in ("srun", "mpirun", "horovodrun"):
        return None
    if (total := start.option(*_TOTAL)) is not None:
        ranks = script.resolve(total)
        given = start.option("-N", "--nodes") if start.launcher == "srun" else None
        nodes = script.resolve(given) if given else num_nodes(script)
        return -(-ranks // nodes) if ranks and nodes else None
    return tasks_per_node(script)


def is_shared(script: Script) -> bool:
    """Whether other jobs are likely on the same node: a few GPUs of one node are asked for."""
    gpus = gpus_per_node(script)
    whole = script.option("exclusive") or (script.option("mem") and script.number("mem") == 0)
    return num_nodes(script) == 1 and not whole and gpus is not None and 0 < gpus[0] < 4
