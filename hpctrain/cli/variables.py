"""The option `-x NAME[=VALUE]` of verbs that start ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

__all__ = ["add_variables", "set_variables"]


def add_variables(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for all ranks, also on other hosts, which get few others",
    )


def set_variables(words: Sequence[str]) -> list[str]:
    """Put the variables into this process's environment; their names.

    Where this process is a rank already, its script reads them there.

    Raises:
        ConfigError: one is no variable, or has no value here.
    """
    from hpctrain.launch import parse_variable

    found = dict(parse_variable(word, os.environ) for word in words)
    os.environ.update(found)
    return list(found)
