"""Rules about what ranks find around them: where they meet, their devices, their software."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.submit.lint.rule import Rule
from hpctrain.submit.lint.script import Script, gpus_per_node, is_shared, num_nodes, ranks_per_node
from hpctrain.submit.lint.shell import Command

__all__ = ["RULES"]

_PORT = re.compile(
    r"--(?:master|main_process)[_-]port[= ]['\"]?(\d+)\b|--rdzv[_-]endpoint[= ]\S*:(\d+)\b"
)
_OWN_PORT = re.compile(r"port|rdzv[_-]endpoint|standalone|config_file|hostfile|include")
_HERE = re.compile(r"(?:localhost|127\.0\.0\.1)\b")
_MEET = re.compile(
    r"--(?:master[_-]addr|main_process_ip|rdzv[_-]endpoint)[= ]['\"]?(localhost|127\.0\.0\.1)\b"
)
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_SWITCHES = {
    "NCCL_P2P_DISABLE": "GPUs of a node no longer copy to each other directly",
    "NCCL_SHM_DISABLE": "GPUs of a node communicate through the network",
    "CUDA_LAUNCH_BLOCKING": "every kernel launch is synchronous",
    "HIP_LAUNCH_BLOCKING": "every kernel launch is synchronous",
}
_SET_IF_ASKED = {
    "SLURM_CPUS_PER_TASK": ("cpus-per-task",),
    "SLURM_NTASKS_PER_NODE": ("ntasks-per-node",),
    "SLURM_GPUS_PER_NODE": ("gpus-per-node",),
    "SLURM_GPUS_PER_TASK": ("gpus-per-task",),
    "SLURM_GPUS": ("gpus",),
    "SLURM_MEM_PER_CPU": ("mem-per-cpu",),
}
_FOR_RANKS = re.compile(
    r"MASTER_(ADDR|PORT)|WORLD_SIZE|(NCCL|GLOO|OMP|MKL|UCX|FI|HOROVOD|MPICH|OMPI|TORCH)_\w+"
    r"|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING)|PYTHONPATH|HF_HOME"
)
_SWITCHES_OF_NODES = {"NCCL_IB_DISABLE": "InfiniBand and RoCE are not used"}


def _values(script: Script, *names: str) -> Iterator[tuple[int, str, str]]:
    for name in names:
        for line, value in script.assigned.get(name, []):
            yield line, name, value


def _fixed_port(script: Script) -> Iterator[tuple[int, str]]:
    if not script.batch:
        return
    for line, _, value in _values(script, "MASTER_PORT", "RDZV_PORT"):
        if match := re.fullmatch(r"(?:\$\{\w+:-)?\s*(\d+)\s*\}?", value):
            yield line, f"the port is always {match.group(1)}"
    for start in script.starts:
        text = " ".join(start.program)
        if match := _PORT.search(text):
            yield start.line, f"the port is always {match.group(1) or match.group(2)}"
        elif start in script.trainings and start.spawns and _takes_default(script, text):
            yield start.line, f"the port is the default of {start.spawns}, 29500"


def _takes_default(script: Script, text: str) -> bool:
    chosen = _OWN_PORT.search(text) or "MASTER_PORT" in script.assigned
    return not chosen and num_nodes(script) in (1, None)


def _if_shared(script: Script) -> str:
    return "warning" if is_shared(script) else "note"


def _local_master(script: Script) -> Iterator[tuple[int, str]]:
    nodes = num_nodes(script) or 1
    if nodes < 2:
        return
    for line, name, value in _values(script, "MASTER_ADDR"):
        if _HERE.match(value):
            yield line, f"{name}={value} on {nodes} nodes"
    for start in script.launches:
        if match := _MEET.search(" ".join(start.program)):
            yield start.line, f"the ranks meet on {match.group(1)} of {nodes} nodes"


def _no_threads(script: Script) -> Iterator[tuple[int, str]]:
    for start in script.launches:
        bind = start.option("--bind-to", "-bind-to") or ""
        unbound = start.launcher == "horovodrun" or (start.launcher == "mpirun" and bind == "none")
        several = ranks_per_node(script, start) != 1
        if unbound and several and start.runs_python and "OMP_NUM_THREADS" not in script.shell:
            yield start.line, "OMP_NUM_THREADS is not set, and ranks are not bound to cores"
            return


def _own_address(script: Script) -> Iterator[tuple[int, str]]:
    for start in script.starts:
        name, *words = start.program or ("",)
        if name != "hostname" or start.command.pipe_to:
            continue
        if asked := {"-i", "--ip-address"} & set(words):
            yield start.line, f"hostname {asked.pop()} may print 127.0.1.1, or several addresses"
        elif {"-I", "--all-ip-addresses"} & set(words) and "[0]" not in script.shell:
            yield start.line, "hostname -I prints all addresses of the node"


def _if_several(script: Script) -> str:
    return "note" if num_nodes(script) == 1 else "warning"


def _activates(command: Command) -> bool:
    text = " ".join(command.words)
    return bool(re.match(r"(source|\.) (\S*/)?activate\b|(conda|(micro)?mamba) activate\b", text))


def _purged(script: Script) -> Iterator[tuple[int, str]]:
    purges = [
        c.line
        for c in script.commands
        if c.words[:1] in (("module",), ("ml",)) and "purge" in c.words
    ]
    active = [c.line for c in script.commands if _activates(c)]
    if purges and active and active[0] < purges[-1] and not any(n > purges[-1] for n in active):
        yield purges[-1], f"module purge after the environment of line {active[0]}"


def _loopback(script: Script) -> Iterator[tuple[int, str]]:
    for line, name, value in _values(script, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if value in ("lo", "=lo"):
            yield line, f"{name}={value}"


def _fixed_devices(script: Script) -> Iterator[tuple[int, str]]:
    gpus = gpus_per_node(script)
    lists = [v for v in _values(script, *_DEVICES) if re.fullmatch(r"\d+(,\s*\d+)*", v[2])]
    if gpus and gpus[0] and lists:
        named = {int(n) for _, _, value in lists for n in value.split(",")}
        line, name, value = lists[0]
        if max(named) >= gpus[0]:
            yield line, f"{name}={value} in a job of {gpus[0]} GPUs, numbered from 0"
        elif len(named) < gpus[0]:
            yield line, f"{name}={value} leaves {gpus[0] - len(named)} of {gpus[0]} GPUs unused"
    directive = "--gpus-per-task" if script.option("gpus-per-task") else ""
    bound = re.search(r"--gpus-per-task|--gpu-bind(?!=none)", directive + script.shell)
    if bound:
        for line, name, value in _values(script, *_DEVICES):
            if "LOCAL" in value or re.match(r"\d", value):
                yield line, f"{name}={value} together with {bound.group()}"
                return


def _switches(script: Script) -> Iterator[tuple[int, str]]:
    several = (num_nodes(script) or 1) > 1
    table = {**_SWITCHES, **(_SWITCHES_OF_NODES if several else {})}
    for line, name, value in _values(script, *table):
        if value == "1":
            yield line, f"{name}=1: {table[name]}"


def _conda(script: Script) -> Iterator[tuple[int, str]]:
    first = script.lines[0] if script.lines else ""
    if re.search(r"\s-\w*[li]|--login", first) or script.option("get-user-env", "L"):
        return
    for command in script.commands:
        if command.words[:1] in (("source",), (".",), ("eval",), ("module",), ("ml",)):
            return
        if command.words[:2] == ("conda", "activate"):
            yield command.line, "conda activate before anything has set conda up"
            return


def _unset(script: Script) -> Iterator[tuple[int, str]]:
    told: set[str] = set()
    for command in script.commands:
        for name in sorted(command.expands & set(_SET_IF_ASKED) - told):
            asked = script.option(*_SET_IF_ASKED[name])
            guarded = re.search(rf"\{{{name}:?[-=+?]|-[nzv] \W*{name}", script.shell)
            if asked or guarded or name in script.assigned or command.words[:1] == ("echo",):
                continue
            told.add(name)
            options = " or ".join(f"--{option}" for option in _SET_IF_ASKED[name])
            yield command.line, f"${name} is set only with {options}"


def _not_exported(script: Script) -> Iterator[tuple[int, str]]:
    used = {name for command in script.commands for name in command.expands}
    exported = {n for c in script.commands if c.words[:1] == ("export",) for n in c.words[1:]}
    bare = {n for c in script.commands if not c.words for n, _ in c.assigned}
    others = {n for c in script.commands if c.words for n, _ in c.assigned}
    if re.search(r"\bset -\w*a|allexport", script.shell) or script.opaque or not script.trainings:
        return
    alone = num_nodes(script) == 1 and all(ranks_per_node(script, s) == 1 for s in script.launches)
    for name in sorted(bare - used - exported - others):
        if alone and re.match(r"MASTER|WORLD", name):
            continue  # one rank has no peers
        if _FOR_RANKS.fullmatch(name) and name not in script.shell.replace(f"{name}=", ""):
            yield script.assigned[name][0][0], f"{name} is assigned and not exported"


def _name_for_value(script: Script) -> Iterator[tuple[int, str]]:
    for command in script.commands:
        if command.words[:1] in (("kill",), ("wait",)):
            for word in command.words[1:]:
                if word in script.assigned:
                    yield command.line, f"{command.words[0]} {word} for {command.words[0]} ${word}"


def _asks(script: Script) -> Iterator[tuple[int, str]]:
    for command in script.commands:
        text = " ".join(command.words)
        if re.match(r"(conda|mamba) (env )?(install|create|remove|update)\b", text):
            answered = re.search(r"\s(-y|--yes|-q?y|--file|-f)\b", text) or "env" in command.words
            piped = any(other.pipe_to.startswith(command.text) for other in script.commands)
            if not answered and not piped and "CONDA_ALWAYS_YES" not in script.assigned:
                yield command.line, f"{' '.join(command.words[:2])} asks for confirmation"


def _new_shell(script: Script) -> Iterator[tuple[int, str]]:
    for command in script.commands:
        text = " ".join(command.words)
        if re.fullmatch(
            r"(exec )?(\S*/)?(ba|z|tc|c)?sh( -[il]+)?|scl enable .* (ba)?sh|newgrp \S+", text
        ):
            redirected = "<" in script.lines[command.line - 1] or command.captured
            piped = any(other.pipe_to.startswith(command.text) for other in script.commands)
            if not redirected and not piped:
                yield command.line, f"{text!r} starts a new shell"


RULES = (
    Rule(
        id="J24",
        why="Two jobs on a node, or a lingering one, use the same port, and one of them fails.",
        cure="torchrun --standalone on one node; else a port from the job's id, or `hpctrain run`, "
        "which looks for a free one.",
        check=_fixed_port,
        level=_if_shared,
    ),
    Rule(
        id="J25",
        why="Ranks of other nodes look for rank 0 on their own node and wait forever.",
        cure="Use the first host of the job: scontrol show hostnames | head -n 1; or `hpctrain "
        "run`.",
        check=_local_master,
    ),
    Rule(
        id="J26",
        why="Each rank starts as many threads as the node has cores, and they compete.",
        cure="export OMP_NUM_THREADS= the cores of one rank.",
        check=_no_threads,
    ),
    Rule(
        id="J31",
        why="The address may be that of the loopback or of a slow network, or several words: "
        "ranks of other nodes cannot reach it.",
        cure="Use the host's name: scontrol show hostnames | head -n 1.",
        check=_own_address,
        level=_if_several,
    ),
    Rule(
        id="J32",
        why="purge removes the paths that modules set, including those that the environment needs.",
        cure="module purge first, then module load, then activate.",
        check=_purged,
    ),
    Rule(
        id="J33",
        why="NCCL and Gloo use the interface that is named; lo reaches no other node.",
        cure="Leave it out, or name the fast network, such as ib0 or hsn.",
        check=_loopback,
        level=_if_several,
    ),
    Rule(
        id="J34",
        why="The batch system has set it to the GPUs of this job; your own numbers select other "
        "GPUs or leave some out.",
        cure="Leave it out, and choose the device by the local rank.",
        check=_fixed_devices,
    ),
    Rule(
        id="J35",
        why="A debugging switch was left in; it slows down the training.",
        cure="Take it out, and measure with and without.",
        check=_switches,
    ),
    Rule(
        id="J51",
        why="A batch shell does not read .bashrc: conda activate is not defined there, and the "
        "system's Python runs.",
        cure='eval "$(conda shell.bash hook)" before it.',
        check=_conda,
        batches=("slurm", "lsf"),
    ),
    Rule(
        id="J56",
        why="Slurm sets it only if the option is given; otherwise it is empty, and arithmetic "
        "or the program's options break.",
        cure="Give the option in a directive, or a default: ${NAME:-1}.",
        check=_unset,
        batches=("slurm",),
    ),
    Rule(
        id="J57",
        why="Only exported variables reach the ranks; this one changes nothing.",
        cure="Write export before it.",
        check=_not_exported,
    ),
    Rule(
        id="J59",
        why="A batch job has no input, so that shell exits at once, and its settings are lost.",
        cure="scl: source scl_source enable NAME; else leave it out.",
        check=_new_shell,
    ),
    Rule(
        id="J61",
        why="Without $ it is the variable's name, and no process has such an id.",
        cure='Write "$pid".',
        check=_name_for_value,
    ),
    Rule(
        id="J64",
        why="A batch job has no input: conda reads that as no, and installs nothing.",
        cure="Add -y; better, install on the login node.",
        check=_asks,
    ),
)
