"""Rules about how ranks are started: GPUs, cores, MPI, and where they meet."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.submit.lint.rule import Rule
from hpctrain.submit.lint.script import Script

__all__ = ["RULES", "uses_gpus"]


_STARTS_SEVERAL = re.compile(
    r"\b(torchrun|torch\.distributed|accelerate launch|deepspeed|nproc[_-]per[_-]node)\b"
)
"""One such process starts one for each GPU, and lets them meet without MPI."""
_PORT = re.compile(
    r"\bMASTER_PORT=[\"']?(?:\$\{MASTER_PORT:-)?(\d+)\b[\"'}]*(?:\s|;|$)"
    r"|--(?:master|main_process)[_-]port[= ][\"']?(\d+)\b"
    r"|--rdzv[_-]endpoint[= ]\S*:(\d+)\b"
)


def gpus_per_node(script: Script) -> tuple[int, int] | None:
    """The number of GPUs per node that is asked for, and its line."""
    for name in ("gpus-per-node", "gres", "gpus", "select"):
        option = script.option(name)
        if option is None:
            continue
        pattern = {
            "gpus-per-node": r"(?:\w+:)?(\d+)",
            "gpus": r"(?:\w+:)?(\d+)",
            "gres": r"gpu(?::\w+)?:(\d+)",
            "select": r".*ngpus=(\d+).*",
        }[name]
        if match := re.fullmatch(pattern, option.value):
            nodes = (script.number("nodes") or 1) if name == "gpus" else 1
            return int(match.group(1)) // nodes, option.line
    return None


def tasks_per_node(script: Script) -> int | None:
    """Ranks on a node, where directives or srun say it in plain numbers."""
    if (select := script.option("select")) and (
        match := re.search(r"mpiprocs=(\d+)", select.value)
    ):
        return int(match.group(1))
    starts = [_before_program(c.text) for c in script.launches if c.launcher == "srun"]
    for words in starts:
        if match := re.search(r"\s--n?tasks-per-node[= ](\S+)", words):
            return int(match.group(1)) if match.group(1).isdecimal() else None
    if script.option("ntasks-per-node") is not None:
        return script.number("ntasks-per-node")
    nodes, tasks = script.number("nodes") or 1, script.number("ntasks")
    if tasks is not None and tasks % nodes == 0:
        return tasks // nodes
    counted = any(re.search(r"\s(-n|--ntasks)", words) for words in starts)
    return 1 if starts and script.option("ntasks") is None and not counted else None


def _before_program(text: str) -> str:
    """The launcher's own words."""
    return re.split(r"\s(?:python|bash|sh|apptainer|singularity|hpctrain|torchrun)", text)[0]


def uses_gpus(script: Script) -> bool:
    """Whether anything in a script speaks of GPUs."""
    asks = any(re.search(r"gpu", f"{o.name} {o.value}") for o in script.options)
    return asks or bool(re.search(r"nccl|--nv\b|CUDA_", script.text, re.IGNORECASE))


def _tasks_and_gpus(script: Script) -> Iterator[tuple[int, str]]:
    gpus, tasks = gpus_per_node(script), tasks_per_node(script)
    if _STARTS_SEVERAL.search(script.shell):
        return
    if gpus and tasks and gpus[0] and gpus[0] != tasks:
        yield gpus[1], f"{tasks} tasks and {gpus[0]} GPUs per node"


def _gpus_per_task(script: Script) -> Iterator[tuple[int, str]]:
    option = script.option("gpus-per-task")
    places = [option.line] if option else []
    places += [c.line for c in script.launches if "--gpus-per-task" in c.text]
    if places and "--gpu-bind=none" not in script.text:
        yield places[0], "--gpus-per-task shows each rank one GPU alone"


def _cpus_lost(script: Script) -> Iterator[tuple[int, str]]:
    if script.option("cpus-per-task") is None or "SRUN_CPUS_PER_TASK" in script.shell:
        return
    for command in script.launches:
        own = re.search(r"\s(-c|--cpus-per-task)", _before_program(command.text))
        if command.launcher == "srun" and not own:
            yield command.line, "srun does not get --cpus-per-task"
            return


def _no_mpi(script: Script) -> Iterator[tuple[int, str]]:
    # Who names the host of rank 0 lets the ranks meet there, without MPI.
    if re.search(r"SLURM_MPI_TYPE|MASTER_ADDR|--master[_-]addr", script.shell):
        return
    alone = (script.number("nodes") or 1) == 1 == tasks_per_node(script)
    for command in script.launches:
        words = _before_program(command.text)
        starts = re.search(r"python|hpctrain|apptainer|singularity", command.text)
        one = alone or re.search(r"\s(-n\s*|--ntasks[= ])1(\s|$)", words)
        without = one or "--mpi" in words or _STARTS_SEVERAL.search(command.text)
        if command.launcher == "srun" and starts and not without:
            yield command.line, "srun without --mpi"


def _fixed_port(script: Script) -> Iterator[tuple[int, str]]:
    for command in script.commands:
        if match := _PORT.search(command.text):
            port = next(group for group in match.groups() if group)
            yield command.line, f"the port is always {port}"


def _local_master(script: Script) -> Iterator[tuple[int, str]]:
    nodes = script.number("nodes") or 1
    for command in script.commands:
        found = re.search(r"\bMASTER_ADDR=[\"']?(localhost|127\.0\.0\.1)\b", command.text)
        if found and nodes > 1:
            yield command.line, f"MASTER_ADDR={found.group(1)} on {nodes} nodes"


def _no_threads(script: Script) -> Iterator[tuple[int, str]]:
    launches = [c for c in script.launches if "torchrun" not in c.text]  # it sets one thread
    if launches and "OMP_NUM_THREADS" not in script.shell:
        yield launches[0].line, "OMP_NUM_THREADS is not set"


def _no_launcher(script: Script) -> Iterator[tuple[int, str]]:
    asked = script.option("nodes")
    nodes = int(match.group()) if asked and (match := re.match(r"\d+", asked.value)) else 1
    if (select := script.option("select")) and (match := re.match(r"\d+", select.value)):
        nodes = int(match.group())
    started = re.search(
        r"\b(srun|mpirun|mpiexec|jsrun|torchrun|horovodrun|hpctrain run)\b", script.shell
    )
    python = next(
        (c for c in script.commands if re.match(r"(exec )?(python|hpctrain train)", c.text)), None
    )
    if nodes > 1 and not started and python:
        yield python.line, f"{nodes} nodes are asked for, and this starts one process on one"


def _no_exec(script: Script) -> Iterator[tuple[int, str]]:
    for command in script.launches:
        match = re.search(r"\b(?:ba)?sh\s+-l?c\s+(['\"])(.*)\1", command.text, re.DOTALL)
        if match and (inner := match.group(2).strip(" ;\n")):
            parts = [part.strip() for part in re.split(r"(?<!\\)\n|;|&&", inner)]
            parts = [part for part in parts if part and not part.startswith("#")]
            last = parts[-1] if parts else ""
            if len(parts) > 1 and not last.startswith("exec "):
                yield command.line, f"{last.split()[0]!r} runs as a child of the shell"


def _no_workdir(script: Script) -> Iterator[tuple[int, str]]:
    if not re.search(r"\bcd\b|PBS_O_WORKDIR", script.shell):
        yield script.first_command or 1, "the script never leaves the home directory"


RULES = (
    Rule(
        id="J20",
        why="One rank drives one GPU: the others stand idle, or ranks share one.",
        cure="Make tasks per node equal to GPUs per node.",
        check=_tasks_and_gpus,
    ),
    Rule(
        id="J21",
        why="GPUs hidden from each other by control groups cannot copy directly, so NCCL is slow "
        "or fails between ranks of one node.",
        cure="Use --gpus-per-node, and the local rank as the device; or --gpu-bind=none.",
        check=_gpus_per_task,
        batches=("slurm",),
    ),
    Rule(
        id="J22",
        why="From Slurm 22.05 on, srun does not take --cpus-per-task from the job: ranks get one "
        "core.",
        cure="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun.",
        check=_cpus_lost,
        batches=("slurm",),
    ),
    Rule(
        id="J23",
        why="With the wrong or no process manager, ranks start as separate jobs of one.",
        cure="srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH); `srun --mpi=list` shows them.",
        check=_no_mpi,
        batches=("slurm",),
    ),
    Rule(
        id="J24",
        why="Two jobs on a node, or one that lingers, take the same port, and one of them fails.",
        cure="Let MPI do the meeting (`hpctrain run` sets a free port), or use the job's id.",
        check=_fixed_port,
    ),
    Rule(
        id="J25",
        why="Ranks of other nodes look for rank 0 on themselves and wait for ever.",
        cure="Let MPI do the meeting (`hpctrain run`), or take the first host of the job.",
        check=_local_master,
    ),
    Rule(
        id="J26",
        why="Each rank starts as many threads as the node has cores, and they fight.",
        cure="export OMP_NUM_THREADS= the cores of one rank.",
        check=_no_threads,
    ),
    Rule(
        id="J27",
        why="The other nodes are paid for and do nothing.",
        cure="Start it with srun, mpiexec or `hpctrain run`, or ask for one node.",
        check=_no_launcher,
    ),
    Rule(
        id="J28",
        why="A signal ends the shell between launcher and program, and the program is killed "
        "without having heard of it.",
        cure="Write exec before the last command.",
        check=_no_exec,
    ),
    Rule(
        id="J29",
        why="PBS starts jobs in the home directory, wherever they were submitted.",
        cure='cd "$PBS_O_WORKDIR"',
        check=_no_workdir,
        batches=("pbs",),
    ),
)
