"""What verbs that start ranks share: `-n auto`, `-x NAME=VALUE`, and ranks that share GPUs."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence

from hpctrain import log
from hpctrain.errors import ConfigError

__all__ = [
    "AUTO",
    "add_variables",
    "choose_layout",
    "ranks_or_auto",
    "set_variables",
    "warn_of_shared_gpus",
]

AUTO = "auto"


def ranks_or_auto(word: str) -> int | str:
    """What `-n` is given: a whole number, or `auto`."""
    return AUTO if word == AUTO else int(word)


def choose_layout(
    key: str, arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[int, dict[str, str]]:
    """How many ranks to start, and an environment that has their threads; says what and why.

    Args:
        key: The whole path of a script or configuration, or a module's name.
        arguments: The user's own.
        environ: The environment.

    Raises:
        ConfigError: nothing was measured here, or the number of threads is fixed.
    """
    from hpctrain.bench import LayoutBook, digest_script, find_layout, this_machine
    from hpctrain.submit import state_home

    if environ.get("OMP_NUM_THREADS"):
        raise ConfigError(
            f"-n auto chooses threads as well as ranks, and OMP_NUM_THREADS is set to "
            f"{environ['OMP_NUM_THREADS']}; unset it, or give -n a number"
        )
    layout, differences = find_layout(
        LayoutBook(state_home(environ)).read(),
        target=key,
        arguments=arguments,
        machine=this_machine(),
        digest=digest_script(key),
    )
    log.notice(
        f"-n auto: {layout.num_ranks} x {layout.num_threads} (ranks x threads), {layout.why}; "
        f"measured on {layout.date}"
    )
    for difference in differences:
        log.warn(f"-n auto: {difference}; run `hpctrain bench layout` to measure again")
    return layout.num_ranks, {**environ, "OMP_NUM_THREADS": str(layout.num_threads)}


def add_variables(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for all ranks, also on other hosts, which inherit few others",
    )


def set_variables(words: Sequence[str]) -> list[str]:
    """Put the variables into this process's environment; their names.

    Where this process is a rank already, its script reads them there.

    Raises:
        ConfigError: one is not a variable, or has no value here.
    """
    from hpctrain.launch import parse_variable

    found = dict(parse_variable(word, os.environ) for word in words)
    os.environ.update(found)
    return list(found)


def warn_of_shared_gpus(
    num_ranks: int, environ: Mapping[str, str], before: Sequence[str], after: Sequence[str]
) -> None:
    """Say so where this machine has fewer GPUs than ranks.

    A notice and no refusal: whether the script computes on GPUs, and lets ranks share them, only it
    knows.

    Args:
        num_ranks: How many are to be started here.
        environ: The environment that they get.
        before: The words of the command before `-n N`.
        after: The words after it.
    """
    from hpctrain.launch import count_gpus, explain_sharing

    if num_ranks == 1:
        return
    num_gpus = count_gpus(num_ranks, environ)

    def write(*words: str) -> str:
        return shlex.join([*before, *words, *after])

    text = explain_sharing(
        num_ranks,
        num_gpus,
        alone=write("-n", str(num_gpus)),
        on_cpu=write("-n", str(num_ranks), "-x", "CUDA_VISIBLE_DEVICES="),
    )
    if text is not None:
        log.warn(text)
