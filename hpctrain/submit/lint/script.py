"""A job script as the linter sees it: directives with their options, and logical commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command", "Option", "Script", "read_script"]

PREFIXES = {"#SBATCH": "slurm", "#PBS": "pbs", "#BSUB": "lsf"}
LAUNCHERS = ("srun", "mpirun", "mpiexec", "jsrun", "torchrun", "horovodrun")
_BEFORE = re.compile(
    r"exec|time|timeout|nohup|command|if|while|until|then|else|do|env|\d+[smh]?|[A-Za-z_]\w*=.*|"
)
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
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$")
_PARTS = re.compile(r"""\\.|['"]|(?:^|(?<=\s))#.*$""")
_LONGEST_QUOTE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a directive, under its long name."""

    name: str
    value: str
    line: int
    active: bool
    """False after the first command, where batch systems stop reading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One logical line of shell: continuations joined, comments gone."""

    line: int
    text: str

    @property
    def launcher(self) -> str | None:
        """The launcher this starts, if it does."""
        if re.match(r"\w+=\(", self.text):  # an array of words, not a command
            return None
        for word in re.split(r"[\s;&|(){}!]+", self.text):
            if (name := word.rpartition("/")[2]) in LAUNCHERS:
                return name
            if not _BEFORE.fullmatch(word):
                return None
        return None

    @property
    def in_background(self) -> bool:
        """Whether it ends with `&`."""
        return bool(re.search(r"(?<!&)&\s*(?:[A-Za-z_]\w*=\$!\s*)?$", self.text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A whole script."""

    text: str
    lines: tuple[str, ...]
    batch: str
    """`slurm`, `pbs`, `lsf`, or empty where there are no directives."""
    options: tuple[Option, ...]
    commands: tuple[Command, ...]
    first_command: int | None
    """The line of the first command."""
    exists: Callable[[str], bool]

    def option(self, *names: str) -> Option | None:
        """The option that counts: the last active one of these names."""
        found = [each for each in self.options if each.active and each.name in names]
        return found[-1] if found else None

    def number(self, *names: str) -> int | None:
        """An option's value where it is a whole number."""
        option = self.option(*names)
        return int(option.value) if option and option.value.isdecimal() else None

    @property
    def launches(self) -> list[Command]:
        """Commands that start ranks."""
        return [command for command in self.commands if command.launcher]

    @property
    def trainings(self) -> list[Command]:
        """Commands that start ranks; without a launcher the last that runs a program of Python."""
        before, programs = r"(exec\s+|time\s+|\w+=\S*\s+)*", "python3?|hpctrain (run|train)"
        program = rf"{before}({programs}|accelerate|deepspeed)\s"
        alone = [command for command in self.commands if re.match(program, command.text)]
        return self.launches or alone[-1:]

    @property
    def shell(self) -> str:
        """All commands, without directives and comments."""
        return "\n".join(command.text for command in self.commands)

    @property
    def strict(self) -> bool:
        """Whether the shell stops at a failing command."""
        first = self.lines[0] if self.lines else ""
        flags = r"(^|[\n;])\s*set\s+([^\n;]*\s)?(-[a-zA-Z]*e[a-zA-Z]*|errexit)(\s|;|$)"
        return bool(re.search(flags, self.shell) or re.match(r"#!.*\s-\w*e", first))


def read_script(text: str, exists: Callable[[str], bool]) -> Script:
    """Take a script apart; nothing in it is an error here."""
    lines = text.split("\n")
    commands = _read_commands([line.rstrip("\r") for line in lines])
    first = commands[0].line if commands else None
    batch, options = "", []
    for number, line in enumerate(lines, 1):
        for prefix, system in PREFIXES.items():
            if line.startswith(prefix) and line[len(prefix) :][:1] in (" ", "\t"):
                batch = batch or system
                active = first is None or number < first
                for name, value in _read_options(system, line[len(prefix) :].strip()):
                    options.append(Option(name=name, value=value, line=number, active=active))
    return Script(
        text=text,
        lines=tuple(lines),
        batch=batch,
        options=tuple(options),
        commands=tuple(commands),
        first_command=first,
        exists=exists,
    )


def _read_commands(lines: list[str]) -> list[Command]:
    commands, start, joined, until = [], 0, "", ""
    position = 0
    while position < len(lines):
        number, line = position + 1, lines[position]
        position += 1
        if until:  # the body of a here-document
            until = "" if line.strip() == until else until
            continue
        if not joined and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start if joined else number
        end = _end_of_quote(lines, position - 1)
        if end is not None:  # a text in quotes over several lines
            line, position = "\n".join(lines[position - 1 : end + 1]), end + 1
        bare = _COMMENT.sub("", line) if line.count("'") % 2 == line.count('"') % 2 == 0 else line
        bare = line if end is not None else bare
        if bare.endswith("\\"):
            joined += bare[:-1] + " "
            continue
        if match := _HEREDOC.search(bare):
            until = match.group(2)
        commands.append(Command(line=start, text=(joined + bare).strip()))
        joined = ""
    return commands


def _end_of_quote(lines: list[str], first: int) -> int | None:
    """The line where a quote that is left open in this one is closed; None where there is none."""
    quote = ""
    for number in range(first, min(len(lines), first + _LONGEST_QUOTE)):
        quote = _open_quote(lines[number], quote)
        if not quote:
            return number if number > first else None
    return None  # it is never closed: no shell would run this


def _open_quote(line: str, quote: str) -> str:
    """The quote that is open at the end of a line, given the one at its start."""
    for part in _PARTS.finditer(line):
        word = part.group()
        if quote:
            quote = "" if word == quote else quote
        elif word[0] == "#":
            return ""
        elif word in ("'", '"'):
            quote = word
    return quote


def _read_options(system: str, text: str) -> list[tuple[str, str]]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    found: list[tuple[str, str]] = []
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            name = _SHORT[system].get(name, name) if len(name) > 1 else name
        elif word.startswith("-") and len(word) > 1:
            name, value = word[1:], ""
            if system != "lsf" and len(name) > 1:
                name, value = name[0], name[1:].removeprefix("=")
            elif words and (not words[0].startswith("-") or words[0][1:2].isdigit()):
                value = words.pop(0)
            name = _SHORT[system].get(name, name)
        else:
            continue
        found += _pbs_resources(value) if system == "pbs" and name == "l" else [(name, value)]
    return found


def _pbs_resources(value: str) -> list[tuple[str, str]]:
    pairs = (part.partition("=") for part in value.split(","))
    return [("time" if key == "walltime" else key, given) for key, _, given in pairs]
