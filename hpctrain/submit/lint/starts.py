"""What a command starts: the launcher, the launcher's options, and the program behind them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.submit.lint.shell import Command

__all__ = ["LAUNCHERS", "Start", "find_start"]

LAUNCHERS = re.compile(
    r"(?P<mpirun>mpirun\S*|mpiexec\S*|orterun|prterun|oshrun)|srun|jsrun|aprun|ibrun|lrun|horovodrun"
)
"""Programs that start ranks on the nodes of a job, and whose options they take."""
_SPAWNS = re.compile(
    r"(.*/)?(torchrun\w*(\.sh)?|accelerate|accelerate\.commands\.launch|deepspeed|colossalai"
    r"|torch\.distributed\.(run|launch))"
)
"""Programs and modules that start one process for each GPU."""
_WRAPPERS = re.compile(r"exec|time|nohup|command|env|nice|stdbuf|ionice|setsid|timeout")
_SMALL = frozenset(
    re.findall(
        r"\S+",
        """
        . : [ [[ alias awk basename bc cat cd chmod chown clear conda cp curl cut date deactivate
        declare df dirname du echo env export false file find free git grep head hostname id
        ifconfig ip jobs kill let ln local ls lscpu make mamba mkdir ml module mv nproc numactl
        nvcc nvidia-smi perl pip pip3 printenv printf ps pwd read readonly return rm rocm-smi rsync
        sacct scancel scontrol scp sed seq set shift shopt shuf sleep sort source squeue sstat
        stat sync tail tar tee test touch tr trap true type ulimit umask uname uniq unset unzip
        virtualenv wait wc wget which whoami xargs zip exit
        """,
    )
)
"""Commands that prepare, report or clean up; a step that runs one is not the work of a job."""
_FLAGS = {
    "srun": re.compile(
        r"-[luvQKIOXskEH]+|--(label|unbuffered|verbose|quiet|kill-on-bad-exit|immediate"
        r"|overcommit|exclusive|exact|overlap|oversubscribe|preserve-env|pty|no-kill|contiguous"
        r"|spread-job|use-min-nodes|no-container-\S+|container-(mount-home|remap-root|writable))"
    ),
    "mpirun": re.compile(
        r"--?(oversubscribe|allow-run-as-root|report-bindings|display-(map|allocation)|verbose|v|q"
        r"|tag-output|bynode|byslot|nolocal|pernode|l|line-buffer|prepend-rank|no-?oversubscribe"
        r"|use-hwthread-cpus|envall|genvall|gpu|novm|bind-to-(core|socket)|no-vni|iface-\S+)"
    ),
    "horovodrun": re.compile(r"--(verbose|disable-cache|gloo|mpi|autotune|tcp|start-timeout=.*)"),
}
_NO_FLAG = re.compile(r"(?!)")
_TWO_VALUES = re.compile(r"--?(mca|g?mca|pmca|env|genv)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A command that starts a program."""

    command: Command
    launcher: str
    """The family of the launcher, such as `srun` or `mpirun`; empty without one."""
    name: str
    """The launcher as written, or the program's own name."""
    options: dict[str, str]
    """The launcher's options; a flag has an empty value."""
    program: tuple[str, ...]
    """The program and its arguments."""

    @property
    def line(self) -> int:
        """Where it stands."""
        return self.command.line

    @property
    def spawns(self) -> str:
        """`torchrun`, `accelerate` or the like, which start one process per GPU; or ""."""
        before = ""
        for word in self._plain_words():
            if word.endswith(".py"):
                break  # what follows are arguments of the program
            is_value = before.startswith("-") and not re.fullmatch(r"-\w*c|-m|--", before)
            if _SPAWNS.fullmatch(word) and not is_value:
                return word.rpartition("/")[2]
            before = word
        return ""

    def _plain_words(self) -> Iterator[str]:
        """The program's words, and those of the text that a shell is given by `-c`."""
        before = ""
        for word in self.program:
            yield from word.split() if re.fullmatch(r"-\w*c", before) else [word]
            before = word

    def argument(self, *names: str) -> str | None:
        """The value of one of these options of the program, such as `--nproc_per_node`."""
        found = re.search(rf"(?:{'|'.join(names)})[= ](\S+)", " ".join(self.program))
        return found.group(1) if found else None

    @property
    def runs_python(self) -> bool:
        """Whether the program is Python, also inside a container or a shell."""
        text = " ".join(self.program) + " "
        return bool(re.search(r"(^|[\s/;])python[\d.]*\s(?!-V|--version|-c)|\.py\b", text))

    @property
    def is_small(self) -> bool:
        """Whether the program is `hostname` or the like, and no work."""
        program = self.program[0].rpartition("/")[2] if self.program else ""
        return not program or program in _SMALL

    def option(self, *names: str) -> str | None:
        """The launcher's option of one of these names."""
        return next((self.options[name] for name in names if name in self.options), None)


def find_start(command: Command, words: list[str]) -> Start | None:
    """See through `time`, `env` and their kin to what is started; None for an assignment.

    Args:
        command: The command.
        words: Its words, with the variables that are known put in.
    """
    while words and (_WRAPPERS.fullmatch(words[0]) or _is_argument_of_wrapper(words[0])):
        words.pop(0)
    if not words:
        return None
    name = words[0].rpartition("/")[2]
    found = LAUNCHERS.fullmatch(name)
    if found is None:
        return Start(
            command=command, launcher="", name=name, options={}, program=(name, *words[1:])
        )
    family = "mpirun" if found["mpirun"] else name
    options, program = _split(family, words[1:])
    return Start(
        command=command, launcher=family, name=name, options=options, program=tuple(program)
    )


def _is_argument_of_wrapper(word: str) -> bool:
    return bool(re.fullmatch(r"-\S*|\d+[smhd]?|[A-Za-z_]\w*=.*", word, re.DOTALL))


def _split(family: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The launcher's own options, and what follows them."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        short = re.fullmatch(r"(-[A-Za-z])(\$?\{?\d.*|\$.*)", word)
        if short and family in ("srun", "jsrun", "aprun"):
            name, equals, value = short.group(1), "=", short.group(2)
        if _TWO_VALUES.fullmatch(name) and len(words) > 1:
            value = f"{words.pop(0)} {words.pop(0)}"
        elif not equals and words and not _FLAGS.get(family, _NO_FLAG).fullmatch(word):
            value = words.pop(0)
        options[name] = value
    return options, words
