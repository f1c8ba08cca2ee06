"""Rules about how ranks are started: how many, by what, and with which GPUs and cores."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.submit.lint.rule import Rule
from hpctrain.submit.lint.script import (
    Script,
    gpus_per_node,
    num_nodes,
    ranks_per_node,
    tasks_per_node,
)
from hpctrain.submit.lint.shell import LAUNCHERS, Start

__all__ = ["RULES", "uses_gpus"]

_PER_NODE = ("-ppn", "--ppn", "-perhost", "-npernode", "--npernode", "-N", "--map-by", "-map-by")
_HOSTS = ("-H", "-host", "--host", "-hosts", "--hosts", "-hostfile", "--hostfile", "-f")
_REACHES_NODES = re.compile(r"ssh|pdsh|clush|parallel|ray|flux|hpctrain|prun|dask\S*|deepspeed")
_RANK = re.compile(
    r"(SLURM_(PROCID|LOCALID|NODEID)|OMPI_COMM_WORLD_\w*RANK|PMI_RANK|PALS_\w*RANKID)"
)


def uses_gpus(script: Script) -> bool:
    """Whether anything in a script speaks of GPUs."""
    asks = any(re.search(r"gpu", f"{o.name} {o.value}") for o in script.options)
    return asks or bool(re.search(r"nccl|--nv\b|CUDA_", script.text, re.IGNORECASE))


def _own_ranks(script: Script) -> Iterator[tuple[Start, int]]:
    """Launches that start the ranks of a Python program themselves, and how many on a node."""
    for start in script.launches:
        ranks = ranks_per_node(script, start)
        if ranks and start.runs_python and not start.spawns:
            yield start, ranks


def _tasks_and_gpus(script: Script) -> Iterator[tuple[int, str]]:
    gpus = gpus_per_node(script)
    for start, ranks in _own_ranks(script):
        if gpus and 1 < ranks != gpus[0] > 0:
            yield start.line, f"{ranks} ranks and {gpus[0]} GPUs on a node"
            return
    for start in script.trainings:
        each = script.resolve(start.argument("--nproc[_-]per[_-]node", "--num_gpus"))
        seen = script.number("gpus-per-task") or (gpus[0] if gpus else 0)
        if start.spawns and each and 0 < seen != each:
            yield start.line, f"{start.spawns} starts {each} processes for {seen} GPUs"
            return


def _gpus_per_task(script: Script) -> Iterator[tuple[int, str]]:
    directive = script.option("gpus-per-task")
    for start, ranks in _own_ranks(script):
        own = start.option("--gpus-per-task")
        if ranks > 1 and (directive or own) and "--gpu-bind=none" not in script.text:
            line = start.line if own or not directive else directive.line
            yield line, "--gpus-per-task shows each rank only one GPU"
            return


def _cpus_lost(script: Script) -> Iterator[tuple[int, str]]:
    asked = script.option("cpus-per-task")
    known_good = script.slurm and not (22, 5) <= script.slurm < (23, 11)
    if asked is None or asked.value == "1" or known_good or "SRUN_CPUS_PER_TASK" in script.shell:
        return
    for start in script.launches:
        bound = re.search(r"mask_cpu|map_cpu", start.option("--cpu-bind", "--cpu_bind") or "")
        own = start.option("-c", "--cpus-per-task")
        if start.launcher == "srun" and own is None and not bound:
            yield start.line, "srun does not get --cpus-per-task"
            return


def _if_affected(script: Script) -> str:
    return "warning" if script.slurm else "note"


def _no_mpi(script: Script) -> Iterator[tuple[int, str]]:
    # Who names the host of rank 0 lets the ranks meet there, without MPI.
    if re.search(r"SLURM_MPI_TYPE|MASTER_ADDR|--master[_-]addr", script.shell):
        return
    for start in script.launches:
        alone = ranks_per_node(script, start) == 1 == num_nodes(script)
        alone = alone or script.resolve(start.option("-n", "--ntasks")) == 1
        needs = start.launcher == "srun" and start.runs_python and not start.spawns and not alone
        if needs and start.option("--mpi") is None:
            yield start.line, "srun without --mpi"


def _no_launcher(script: Script) -> Iterator[tuple[int, str]]:
    nodes = num_nodes(script) or 1
    reached = any(s.launcher or _REACHES_NODES.fullmatch(s.name) for s in script.starts)
    if nodes > 1 and not reached and not script.opaque and script.trainings:
        start = script.trainings[0]
        yield start.line, f"{nodes} nodes are requested, and {start.name} starts on one"


def _no_exec(script: Script) -> Iterator[tuple[int, str]]:
    for start in script.launches:
        words = start.program
        at = next((n for n, w in enumerate(words[:-1]) if re.fullmatch(r"-\w*c", w)), None)
        if at is None or not re.fullmatch(r"(.*/)?(ba)?sh", words[at - 1]):
            continue
        parts = [part.strip() for part in re.split(r"(?<!\\)\n|;|&&", words[at + 1])]
        parts = [part for part in parts if part and not part.startswith("#")]
        if len(parts) > 1 and not parts[-1].startswith("exec "):
            yield start.line, f"{parts[-1].split()[0]!r} runs as a child of the shell"


def _if_signalled(script: Script) -> str:
    return "warning" if script.option("signal") else "note"


def _no_workdir(script: Script) -> Iterator[tuple[int, str]]:
    moved = re.search(r"\bcd\b|\bpushd\b|PBS_O_WORKDIR", script.shell)
    if not moved and not script.option("d", "w") and script.commands:
        yield script.first_command or 1, "the script never leaves the home directory"


def _launchers_squared(script: Script) -> Iterator[tuple[int, str]]:
    for start in script.launches:
        ranks = ranks_per_node(script, start)
        inner = start.program[0] if LAUNCHERS.fullmatch("".join(start.program[:1])) else ""
        if not (start.spawns or inner) or not ranks or ranks == 1:
            continue
        agents = start.argument("--nnodes", "--num_machines") or ""
        tasks = ranks * (num_nodes(script) or 1)
        if script.resolve(agents) != tasks and "NTASKS" not in agents:
            yield start.line, f"{ranks} tasks on a node each start {inner or start.spawns}"


def _agents_missing(script: Script) -> Iterator[tuple[int, str]]:
    nodes = num_nodes(script)
    for start in script.trainings:
        agents = script.resolve(start.argument("--nnodes", "--num_machines"))
        ranks = ranks_per_node(script, start) if start.launcher else 1
        if not start.spawns or not agents or not nodes or not ranks or script.opaque:
            continue
        started = ranks * nodes if start.launcher else 1
        if agents > started and (start.launcher or nodes == 1) and "-w" not in start.options:
            yield start.line, f"{start.spawns} waits for {agents} nodes, and {started} start it"


def _wrong_world(script: Script) -> Iterator[tuple[int, str]]:
    nodes, given = num_nodes(script), script.assigned.get("WORLD_SIZE", [])
    own = [ranks for _, ranks in _own_ranks(script)]
    if len(given) == 1 and nodes and own:
        world = script.resolve(given[0][1])
        if world and world != own[0] * nodes:
            yield given[0][0], f"WORLD_SIZE={world}, and {own[0] * nodes} ranks are started"


def _no_mpiprocs(script: Script) -> Iterator[tuple[int, str]]:
    select = script.option("select")
    cores = re.search(r"ncpus=(\d+)", select.value) if select else None
    if not select or not cores or int(cores.group(1)) < 2 or "mpiprocs" in select.value:
        return
    chunks = re.match(r"\d+", select.value)
    for start in script.launches:
        ranks = script.resolve(start.option("-n", "-np", "--np"))
        placed = start.option(*_PER_NODE, *_HOSTS, "-machinefile", "--machinefile")
        if start.launcher == "mpirun" and placed is None and chunks and ranks != int(chunks[0]):
            yield (
                select.line,
                f"{start.name} finds one slot on each node without mpiprocs=",
            )
            return


def _no_gpus_of_jsrun(script: Script) -> Iterator[tuple[int, str]]:
    for start in script.launches:
        given = start.option("-g", "--gpu_per_rs")
        if start.launcher == "jsrun" and given is None and (start.runs_python or uses_gpus(script)):
            yield start.line, "jsrun without -g"


def _too_many_ranks(script: Script) -> Iterator[tuple[int, str]]:
    tasks, nodes = script.number("ntasks"), num_nodes(script)
    if tasks is None and script.option("ntasks-per-node") and nodes:
        each = tasks_per_node(script)
        tasks = each * nodes if each else None
    if tasks is None or script.batch != "slurm" or script.option("exclusive"):
        return
    for start in script.launches:
        ranks = script.resolve(start.option("-n", "--ntasks", "-np", "--np"))
        forced = "oversubscribe" in start.command.text or start.option(*_HOSTS)
        cores = script.number("cpus-per-task") or 1 if start.launcher == "srun" else 1
        if start.launcher in ("srun", "mpirun") and ranks and not forced and ranks > tasks * cores:
            yield start.line, f"{start.name} is to start {ranks} ranks in a job of {tasks} tasks"


def _rank_of_batch_shell(script: Script) -> Iterator[tuple[int, str]]:
    many = [s for s in script.launches if (ranks_per_node(script, s) or 1) > 1]
    nodes = num_nodes(script) or 1
    if not script.batch or not script.launches or not (many or nodes > 1):
        return
    launches = [start.command for start in script.launches]
    for command in script.commands:
        named = sorted(name for name in command.expands if _RANK.fullmatch(name))
        meets = re.search(r"rdzv[_-]backend[= ]['\"]?c10d", script.shell)  # ranks are given out
        if not named or command.captured or command.function or (meets and not many):
            continue
        if command in launches or (command.assigned and command.words[:1] in ((), ("export",))):
            yield command.line, f"${named[0]} is the batch shell's value, 0"


def _told_otherwise(script: Script) -> Iterator[tuple[int, str]]:
    nodes = num_nodes(script)
    for start, ranks in _own_ranks(script):
        for names, number, what in (
            (r"--(?:trainer\.)?num[_-]nodes", nodes, "nodes"),
            (r"--(?:trainer\.|num[_-])devices", ranks, "devices on a node"),
        ):
            told = script.resolve(start.argument(names))
            if start.launcher == "srun" and told and number and told != number:
                yield start.line, f"the program expects {told} {what}, and there are {number}"


def _without_gpus(script: Script) -> Iterator[tuple[int, str]]:
    for start in script.trainings:
        text = " ".join(start.program)
        told = re.search(r"--(?:device|accelerator)[= ]cpu\b|--no[_-](?:cuda|gpu)\b", text)
        if told and uses_gpus(script) and gpus_per_node(script):
            yield start.line, f"GPUs are requested, and {told.group()} leaves them idle"


def _slots_apart(script: Script) -> Iterator[tuple[int, str]]:
    slots, option = script.number("ntasks"), script.option("ntasks")
    together = any(re.search(r"hosts=1\b|ptile=", o.value) for o in script.options if o.name == "R")
    started = script.opaque or any(s.launcher for s in script.starts)
    if option and slots and slots > 1 and not together and not started and script.trainings:
        yield option.line, f"{slots} slots, perhaps on several hosts, for one process"


def _wrong_interpreter(script: Script) -> Iterator[tuple[int, str]]:
    for start in script.starts:
        for name, ending in (("python[\\d.]*", "sh"), ("(?:ba)?sh", "py")):
            text = " ".join(word for word in start.program[:3] if not re.fullmatch("-[uxeE]", word))
            if match := re.match(rf"({name}) (\S+\.{ending})(?:\s|$)", text):
                yield start.line, f"{match.group(1)} is to run {match.group(2)}"


def _one_word(script: Script) -> Iterator[tuple[int, str]]:
    for start in script.launches:
        if start.program and re.search(r"\S\s+\S", start.program[0]):
            yield start.line, f"{start.name} looks for a program named {start.program[0]!r}"


RULES = (
    Rule(
        id="J20",
        why="One rank drives one GPU: the others are idle, or ranks share one.",
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
        why="In Slurm 22.05 to 23.02 srun does not take --cpus-per-task from the job: ranks get "
        "one core. Older and newer versions pass it on.",
        cure="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun.",
        check=_cpus_lost,
        level=_if_affected,
        batches=("slurm",),
    ),
    Rule(
        id="J23",
        why="Where the site's default is not the MPI of the program, ranks start as separate jobs "
        "of one.",
        cure="Of `srun --mpi=list`, the one that the program's MPI was built with: srun --mpi=pmix "
        "for Open MPI; pmix or pmi2 for MPICH.",
        check=_no_mpi,
        level="note",
        batches=("slurm",),
    ),
    Rule(
        id="J27",
        why="The other nodes are charged and idle, or the first waits for them.",
        cure="Start it on every node: srun, mpiexec or `hpctrain run`; or request one node.",
        check=_no_launcher,
    ),
    Rule(
        id="J28",
        why="A signal ends the shell between launcher and program, and the program is killed "
        "without getting the signal.",
        cure="Write exec before the last command.",
        check=_no_exec,
        level=_if_signalled,
    ),
    Rule(
        id="J29",
        why="PBS starts jobs in the home directory, regardless of where they were submitted.",
        cure='cd "$PBS_O_WORKDIR"',
        check=_no_workdir,
        batches=("pbs",),
    ),
    Rule(
        id="J30",
        why="torchrun, accelerate and deepspeed start one process for each GPU themselves: so too "
        "many processes share the GPUs, or compete for a port.",
        cure="Start one of them per node: --ntasks-per-node=1.",
        check=_launchers_squared,
    ),
    Rule(
        id="J36",
        why="PBS lists a node once for each of its mpiprocs, 1 unless given: mpirun refuses more "
        "ranks or puts them on too few nodes.",
        cure="select=N:ncpus=C:mpiprocs=R, with R ranks on a node.",
        check=_no_mpiprocs,
        batches=("pbs",),
    ),
    Rule(
        id="J37",
        why="A resource set of jsrun has no GPU without -g.",
        cure="jsrun -n SETS -a 1 -c CORES -g 1",
        check=_no_gpus_of_jsrun,
    ),
    Rule(
        id="J38",
        why="Open MPI and srun refuse more ranks than tasks; others put them on the same cores.",
        cure="Request as many tasks as ranks are started.",
        check=_too_many_ranks,
    ),
    Rule(
        id="J39",
        why="The batch shell expands it before the launcher starts anything: every rank gets the "
        "same number.",
        cure="Read it in the program, or quote it: srun bash -c '... $SLURM_PROCID ...'.",
        check=_rank_of_batch_shell,
    ),
    Rule(
        id="J50",
        why="In quotes, program and arguments are one word, and there is no program of that name.",
        cure="Leave the quotes out, or write bash -c before them.",
        check=_one_word,
    ),
    Rule(
        id="J54",
        why="torchrun and accelerate wait until that many nodes have joined, and fail after "
        "minutes.",
        cure="--nnodes=$SLURM_NNODES, started once on each node.",
        check=_agents_missing,
    ),
    Rule(
        id="J55",
        why="Ranks wait for WORLD_SIZE ranks, or some are left out.",
        cure="export WORLD_SIZE=$SLURM_NTASKS",
        check=_wrong_world,
    ),
    Rule(
        id="J58",
        why="The interpreter cannot read it and stops at its first line.",
        cure="python for .py, bash for .sh.",
        check=_wrong_interpreter,
    ),
    Rule(
        id="J60",
        why="Lightning and similar tools compare these with the job and stop, or use a part of it.",
        cure="--num_nodes=$SLURM_NNODES, and as many devices as tasks on a node.",
        check=_told_otherwise,
        batches=("slurm",),
    ),
    Rule(
        id="J62",
        why="The GPUs are charged.",
        cure="Request none, or let the program use them.",
        check=_without_gpus,
    ),
    Rule(
        id="J63",
        why="LSF may take the slots from several hosts; a program without a launcher uses one.",
        cure='#BSUB -R "span[hosts=1]"',
        check=_slots_apart,
        batches=("lsf",),
    ),
)
