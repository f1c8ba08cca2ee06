"""A job script as the linter sees it: directives, what the shell runs, nodes, GPUs and ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from hpctrain.submit.lint.shell import Command, Shell, Start, find_start, read_shell

__all__ = [
    "PREFIXES",
    "Option",
    "Script",
    "gpus_per_node",
    "is_shared",
    "num_nodes",
    "ranks_per_node",
    "read_script",
    "tasks_per_node",
]

PREFIXES = {"#SBATCH": "slurm", "#PBS": "pbs", "#BSUB": "lsf"}
_SHORT = {
    "slurm": {
        **{"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "p": "partition"},
        **{"A": "account", "J": "job-name", "o": "output", "e": "error", "G": "gpus"},
        **{"C": "constraint", "a": "array", "d": "dependency", "q": "qos", "D": "chdir"},
        **{"tasks-per-node": "ntasks-per-node"},
    },
    "pbs": {"N": "job-name", "q": "queue", "A": "account", "o": "output", "e": "error"},
    "lsf": {
        **{"J": "job-name", "W": "time", "q": "queue", "P": "account", "o": "output"},
        **{"oo": "output", "e": "error", "eo": "error", "nnodes": "nodes", "n": "ntasks"},
        **{"M": "mem", "wa": "signal", "wt": "signal-lead"},
    },
}
_ABBREVIATED = {"out": "output", "err": "error", "node": "nodes", "job": "job-name"}
"""sbatch accepts any unambiguous prefix of an option; these are in use."""
_VARIABLE = re.compile(r"(?<!\\)\$(?:\{(\w+)\}|(\w+))")
_OTHER_SHELL = re.compile(r"#!.*\b(python\d?[\d.]*|perl|t?csh|fish|ruby|Rscript)\b")
_OF_SLURM = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NPROCS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a directive, under its long name."""

    name: str
    value: str
    line: int
    active: bool
    """False after the first command, when batch systems stop reading."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A whole script, and what is known of the machine it is for."""

    text: str
    lines: tuple[str, ...]
    batch: str
    """`slurm`, `pbs`, `lsf`, or empty where there are no directives."""
    options: tuple[Option, ...]
    commands: tuple[Command, ...]
    """Simple commands; none where the script is not for a shell of the Bourne family."""
    first_command: int | None
    """The line of the first command."""
    exists: Callable[[str], bool]
    slurm: tuple[int, int] | None
    """The version of Slurm, such as (22, 5); None where it is not known."""
    syntax: str
    """What `bash -n` complains of."""

    def option(self, *names: str) -> Option | None:
        """The option that counts: the last active one of these names."""
        found = [each for each in self.options if each.active and each.name in names]
        return found[-1] if found else None

    def number(self, *names: str) -> int | None:
        """An option's value where it is a whole number."""
        option = self.option(*names)
        return int(option.value) if option and option.value.isdecimal() else None

    @cached_property
    def starts(self) -> tuple[Start, ...]:
        """What the script runs, in order, each with its launcher if it has one."""
        found = (find_start(command, self.expand(command.words)) for command in self.commands)
        return tuple(start for start in found if start)

    def expand(self, words: Iterable[str], depth: int = 3) -> list[str]:
        """Put in the values of variables that are assigned once: launch lines are built of them."""
        values = {name: given[0][1] for name, given in self.assigned.items() if len(given) == 1}
        expanded: list[str] = []
        for word in words:
            whole = _VARIABLE.fullmatch(word)
            full = _VARIABLE.sub(lambda m: values.get(m[1] or m[2], m[0]), word)
            if full == word or not depth:
                expanded.append(word)
            else:
                again = full.split() if whole else [full]
                expanded += self.expand(again, depth - 1)
        return expanded

    @cached_property
    def launches(self) -> tuple[Start, ...]:
        """Steps that start ranks of a program: not `srun hostname`, nothing inside `$(...)`."""
        steps = (s for s in self.starts if not s.command.captured and not s.is_small)
        return tuple(s for s in steps if s.launcher)

    @cached_property
    def trainings(self) -> tuple[Start, ...]:
        """Steps that do the job's work; without a launcher the last one that runs Python."""
        steps = [s for s in self.starts if not s.command.captured and not s.is_small]
        work = [s for s in steps if s.launcher or s.spawns]
        alone = [s for s in steps if s.runs_python or s.name == "hpctrain"]
        return tuple(work or alone[-1:])

    @cached_property
    def work(self) -> tuple[Start, ...]:
        """The trainings; without any, the last step that is more than housekeeping."""
        steps = [s for s in self.starts if not s.command.captured and not s.is_small]
        return self.trainings or tuple(steps[-1:])

    @cached_property
    def assigned(self) -> dict[str, list[tuple[int, str]]]:
        """Each variable that is assigned, also by `env`, `-x` or `--env`: lines and values."""
        found: dict[str, list[tuple[int, str]]] = {}
        for command in self.commands:
            given = [w for w in command.words[1:] if re.match(r"[A-Z][A-Z0-9_]*=", w)]
            for name, value in (*command.assigned, *(w.split("=", 1) for w in given)):
                found.setdefault(name, []).append((command.line, value))
        return found

    def resolve(self, value: str | None) -> int | None:
        """A whole number, also behind a variable that is assigned once or that Slurm sets."""
        if value is None or value.isdecimal():
            return int(value) if value else None
        match = re.fullmatch(r"\$\{?(\w+)(?::-\d+)?\}?", value)
        if match is None:
            return None
        if name := _OF_SLURM.get(match.group(1)):
            return self.number(name)
        values = {text for _, text in self.assigned.get(match.group(1), [])} - {value}
        return self.resolve(values.pop()) if len(values) == 1 else None

    @cached_property
    def shell(self) -> str:
        """The text of all commands, without directives and comments."""
        text = "\n".join(command.text for command in self.commands)
        return re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)

    @cached_property
    def opaque(self) -> bool:
        """Whether it runs something that is only known when it runs: `$CMD`, `eval`, a script."""
        return any(re.match(r"\$|eval$|(.*/)?(ba|z|)sh$|.*\.sh$", s.name) for s in self.starts)

    @property
    def strict(self) -> bool:
        """Whether the shell stops at a failing command."""
        first = self.lines[0] if self.lines else ""
        sets = [c.words[1:] for c in self.commands if c.words[:1] == ("set",)]
        flags = any(
            re.fullmatch(r"-[a-zA-Z]*e[a-zA-Z]*|errexit", word) for words in sets for word in words
        )
        return flags or bool(re.match(r"#!.*\s-\w*e", first))


def read_script(
    text: str,
    exists: Callable[[str], bool],
    slurm: tuple[int, int] | None = None,
    syntax: str = "",
) -> Script:
    """Take a script apart; nothing in it is an error here."""
    lines = text.split("\n")
    bare = text.replace("\r\n", "\n")
    shell = Shell(commands=(), here=frozenset()) if _OTHER_SHELL.match(text) else read_shell(bare)
    code = (n for n, line in enumerate(lines, 1) if line.strip() and not _is_comment(line))
    first = next(code, None)
    batch, options = "", []
    for number, line in enumerate(lines, 1):
        for prefix, system in PREFIXES.items():
            after = line[len(prefix) :].rstrip("\r")
            if number in shell.here or not line.startswith(prefix) or after[:1] not in (" ", "\t"):
                continue
            batch = batch or system
            active = first is None or number < first
            for name, value in _read_options(system, after.strip()):
                options.append(Option(name=name, value=value, line=number, active=active))
    return Script(
        text=text,
        lines=tuple(lines),
        batch=batch,
        options=tuple(options),
        commands=shell.commands,
        first_command=first,
        exists=exists,
        slurm=slurm,
        syntax=syntax,
    )


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _read_options(system: str, text: str) -> list[tuple[str, str]]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # a quote is left open
        words = text.split()
    found: list[tuple[str, str]] = []
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            name = _SHORT[system].get(name, name) if len(name) > 1 else name
            name = _ABBREVIATED.get(name, name)
        elif re.match(r"-[a-z-]{3,}=", word) and system == "slurm":
            found.append(("", word))  # a long option with one hyphen
            continue
        elif word.startswith("-") and len(word) > 1:
            name, value = word[1:], ""
            if system != "lsf" and len(name) > 1:
                name, value = name[0], name[1:]
            elif words and (not words[0].startswith("-") or words[0][1:2].isdigit()):
                value = words.pop(0)
            name = _SHORT[system].get(name, name)
        else:
            found.append(("", word))  # sbatch refuses a word that belongs to no option
            continue
        found += _pbs_resources(value) if system == "pbs" and name == "l" else [(name, value)]
    return found


def _pbs_resources(value: str) -> list[tuple[str, str]]:
    pairs = (part.partition("=") for part in value.split(","))
    return [("time" if key == "walltime" else key, given) for key, _, given in pairs]


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
    """How many nodes are requested; None if unknown."""
    if option := script.option("nodes", "select"):
        match = re.match(r"\d+", option.value)
        return int(match.group()) if match else None
    tasks, each = script.number("ntasks"), script.number("ntasks-per-node")
    if tasks and each:
        return -(-tasks // each)
    return None if (tasks or 1) > 1 and script.batch == "slurm" else 1


def gpus_per_node(script: Script) -> tuple[int, int] | None:
    """The requested number of GPUs per node, and its line."""
    for name, pattern in _GPUS.items():
        option = script.option(name)
        if option and (match := re.fullmatch(pattern, option.value)):
            nodes = (num_nodes(script) or 1) if name == "gpus" else 1
            return int(match.group(1)) // nodes, option.line
    return None


def tasks_per_node(script: Script) -> int | None:
    """Tasks on a node by the directives; 1 by default."""
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
    """Whether other jobs are likely on the same node: a few GPUs of one node are requested."""
    gpus = gpus_per_node(script)
    whole = script.option("exclusive") or (script.option("mem") and script.number("mem") == 0)
    return num_nodes(script) == 1 and not whole and gpus is not None and 0 < gpus[0] < 4
