"""Shell text as simple commands, read by tree-sitter's grammar of bash.

The grammar goes on after an error, which matters here: scripts with a leftover conflict marker or
an unclosed quote still have directives and launch lines worth looking at. `bash -n` judges the
syntax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

__all__ = ["Command", "Shell", "read_shell"]

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
    """The text after `|`: what decides the exit code of the pipeline unless pipefail is set."""
    otherwise: str = ""
    """The text after `||`."""
    tested: bool = False
    """Whether `if`, `while`, `!` or `||` looks at its exit code."""
    in_background: bool = False
    captured: bool = False
    """Whether it stands in `$(...)`: its output is taken, it is no step of the job."""
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
