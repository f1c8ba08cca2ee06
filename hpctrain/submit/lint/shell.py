"""Shell text as simple commands, read by tree-sitter's grammar of bash, and what they start.

The parser continues after an error, which matters here: scripts with a leftover conflict marker or
an unclosed quote still have directives and launch lines worth looking at. `bash -n` judges the
syntax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

__all__ = ["LAUNCHERS", "Command", "Shell", "Start", "find_start", "read_shell"]

_BASH = Language(tree_sitter_bash.language())
_SIMPLE = ("command", "declaration_command", "variable_assignment", "test_command")
_GROUPS = ("subshell", "compound_statement", "do_group")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A simple command, an assignment or a test, and where it stands."""

    line: int
    """Its first line, counted from 1."""
    text: str
    """As written, with continued lines joined and without redirections."""
    words: tuple[str, ...] = ()
    """Its words without their quotes; variables stay unexpanded. Empty for a bare assignment."""
    assigned: tuple[tuple[str, str], ...] = ()
    """Variables assigned here: before the command, by `export`, or bare."""
    expands: frozenset[str] = frozenset()
    """Variables that this shell expands: not those in single quotes or after a backslash."""
    pipe_to: str = ""
    """The text after `|`: it determines the exit code of the pipeline unless pipefail is set."""
    otherwise: str = ""
    """The text after `||`."""
    tested: bool = False
    """Whether `if`, `while`, `!` or `||` checks its exit code."""
    in_background: bool = False
    captured: bool = False
    """Whether it is in `$(...)`: its output is captured; it is not a step of the job."""
    function: int = 0
    """The function it is part of, as a number; 0 for the script itself."""
    branches: tuple[tuple[int, int], ...] = ()
    """For each enclosing `if` or `case`: which one, and which of its branches."""

    def before(self, other: Command) -> bool:
        """Whether the other one can run after this one: not in another function or branch."""
        mine = dict(self.branches)
        apart = any(mine.get(number, branch) != branch for number, branch in other.branches)
        return self.line <= other.line and self.function == other.function and not apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Shell:
    """All simple commands in their order, and the lines inside here-documents."""

    commands: tuple[Command, ...]
    here: frozenset[int]


def read_shell(text: str) -> Shell:
    """Take shell text apart; nothing in it is an error here."""
    tree = Parser(_BASH).parse(text.encode("utf-8", errors="replace"))
    here: set[int] = set()
    commands = tuple(_walk(tree.root_node, Command(line=0, text=""), here))
    return Shell(commands=commands, here=frozenset(here))


def _walk(node: Node, place: Command, here: set[int]) -> Iterator[Command]:
    """Each simple command below a node; `place` is what is known of where it stands."""
    if node.type == "heredoc_body":
        here.update(range(node.start_point.row + 1, node.end_point.row + 1))
        return
    if node.type in _SIMPLE and node.parent and node.parent.type not in _SIMPLE:
        yield _simple(node, place)
    if node.type == "command_substitution":
        place = replace(place, captured=True)
    elif node.type == "function_definition":
        place = replace(place, function=node.id)
    elif node.type == "negated_command":
        place = replace(place, tested=True)
    branch = 0
    for position, child in enumerate(node.children):
        following = node.children[position + 1 :]
        if child.type in ("then", "elif_clause", "else_clause", "case_item"):
            branch += 1
        yield from _walk(child, _placed(node, child, following, branch, place), here)


def _placed(node: Node, child: Node, following: list[Node], branch: int, place: Command) -> Command:
    """What standing in a node, before some others, says of a child."""
    after = following[0].type if following else ""
    if after == "&":
        place = replace(place, in_background=True)
    if node.type == "pipeline" and after in ("|", "|&"):
        place = replace(place, pipe_to=_text(following[1]) if len(following) > 1 else "?")
    elif node.type == "list" and after == "||":
        right = _text(following[1]) if len(following) > 1 else ""
        place = replace(place, otherwise=right, tested=True)
    in_if = node.type in ("if_statement", "elif_clause") and branch == 0
    if in_if or (node.type == "while_statement" and child.type not in _GROUPS):
        place = replace(place, tested=True)
    if node.type in ("if_statement", "case_statement") and branch:
        place = replace(place, branches=(*place.branches, (node.id, branch)))
    return place


def _simple(node: Node, place: Command) -> Command:
    words: list[str] = []
    assigned: list[tuple[str, str]] = []
    inside = [node] if node.type == "variable_assignment" else node.children
    for child in inside:
        if child.type == "variable_assignment":
            name, _, value = _text(child).partition("=")
            assigned.append((name.rstrip("+"), _unquoted(value)))
        elif not child.type.endswith("_redirect"):
            words.append(_unquoted(_text(child)))
    return replace(
        place,
        line=node.start_point.row + 1,
        text=_text(node),
        words=tuple(words),
        assigned=tuple(assigned),
        expands=frozenset(_expanded(node)),
    )


def _expanded(node: Node) -> Iterator[str]:
    for child in node.children:
        if child.type == "variable_name" and node.type != "variable_assignment":
            yield _text(child)
        elif child.type != "command_substitution":
            yield from _expanded(child)


def _text(node: Node) -> str:
    return re.sub(r"\\\n", " ", (node.text or b"").decode("utf-8", errors="replace"))


def _unquoted(word: str) -> str:
    whole = re.fullmatch(r"""(["'])(.*)\1""", word, re.DOTALL)
    return whole.group(2) if whole else re.sub(r"""(?<!\\)["']""", "", word)


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
    """See through `time`, `env` and similar to what is started; None for an assignment.

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
