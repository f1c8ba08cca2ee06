"""What is allowed in a job script: whitelists, quoting, and nothing unprintable."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from hpctrain.batch_systems import all_systems
from hpctrain.errors import ConfigError

__all__ = [
    "check_directive_value",
    "check_identifier",
    "check_name",
    "check_path",
    "check_printable",
    "check_variable",
    "quote",
    "quote_all",
]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+&|*-]{0,127}")
_PATH = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+=@,-]{0,1023}")
_VALUE = re.compile(r"[A-Za-z0-9_.,:/=+@*&|()\[\]<>!-]{1,512}")
# Stricter than the shell: a word like `a=b` or `==` is literal, but does not look so.
_PLAIN = re.compile(r"-[A-Za-z0-9_@%+=:,./-]*|[A-Za-z0-9_@%+:,./][A-Za-z0-9_@%+:,./-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Line and paragraph separators, surrogates (not text at all), controls; and the marks that reorder
# what a reader sees.
_REFUSED_KINDS = {"Cc", "Cs", "Zl", "Zp"}
_REORDERING = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# Assigning to these stops a strict bash, or turns the script into another one.
_BASH_OWN = {
    *("BASHOPTS", "BASHPID", "BASH_ENV", "BASH_VERSINFO", "ENV", "EUID", "IFS", "PATH"),
    *("POSIXLY_CORRECT", "PPID", "SHELLOPTS", "UID", "_"),
}
_OWN_PREFIXES = ("HPCTRAIN_", "hpc_", "BASH_")


def check_printable(text: str, what: str) -> str:
    """Refuse newlines, control characters, NUL and whatever else a reader would not see."""
    for character in text:
        if unicodedata.category(character) in _REFUSED_KINDS or character in _REORDERING:
            raise ConfigError(
                f"{what} has the character {character!r} (U+{ord(character):04X}), which is "
                "not allowed in a job script; remove it"
            )
    return text


def check_name(text: str, what: str) -> str:
    """A name: a letter, then letters, digits, `_`, `.` and `-`, at most 63 in all."""
    return _check(_NAME, text, what, "a letter, then letters, digits, _ . -, at most 63")


def check_identifier(text: str, what: str) -> str:
    """What sites name accounts, partitions, qualities of service and constraints with."""
    return _check(_IDENTIFIER, text, what, "letters, digits and _ . , : @ + & | * -")


def check_directive_value(text: str, what: str) -> str:
    """The value of an extra directive: no blanks, quotes, `$`, `#`, `%` or backslash."""
    return _check(_VALUE, text, what, "letters, digits and _ . , : / = + @ * & | ( ) [ ] < > ! -")


def check_path(text: str, what: str) -> str:
    """A path that stands in a directive, where no batch system agrees with another on quoting."""
    return _check(_PATH, text, what, "letters, digits and _ . / + = @ , -")


def check_variable(name: str) -> str:
    """An environment variable that a job may set."""
    _check(_VARIABLE, name, "environment variable", "letters, digits and _")
    own = (*_OWN_PREFIXES, *(word for each in all_systems() for word in each.variable_prefixes))
    if name in _BASH_OWN or name.startswith(own):
        raise ConfigError(
            f"environment variable {name} belongs to the shell, the batch system or hpctrain; "
            "set it in a file of your own and name that with --source"
        )
    return name


def quote(word: object) -> str:
    """One word of bash that means exactly this text."""
    text = check_printable(str(word), "a word of the script")
    if _PLAIN.fullmatch(text):
        return text
    return "'" + text.replace("'", "'\"'\"'") + "'"


def quote_all(words: Sequence[object]) -> str:
    """Words of bash, separated by blanks."""
    return " ".join(quote(word) for word in words)


def _check(pattern: re.Pattern[str], text: str, what: str, allowed: str) -> str:
    check_printable(text, what)
    if not pattern.fullmatch(text):
        raise ConfigError(f"{what} {text!r} is not valid; use {allowed}")
    return text
