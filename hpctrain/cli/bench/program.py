"""What a sweep measures: a script, a module, or a configuration of `hpctrain train`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.launch import Program

__all__ = ["BenchProgram", "subject_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchProgram:
    """A program, as a sweep starts it and as its user calls it."""

    program: Program
    label: str
    """For people; no path."""
    key: str
    """The key under which its layouts are saved."""
    given: tuple[str, ...]
    """The user's own arguments."""
    batch: int | None = None
    """Samples of one share, if the command line or the configuration gives them."""


def subject_of(args: argparse.Namespace) -> BenchProgram:
    """What is to be measured.

    Raises:
        ConfigError: nothing was named, or it is not there.
    """
    words: Sequence[str] = args.program[1:] if args.program[:1] == ["--"] else args.program
    is_module = args.is_module
    if not is_module and words[:1] == ["-m"]:
        is_module, words = True, words[1:]
    if not words:
        raise ConfigError("no script was given; name it after the options, with its arguments")
    if not is_module and words[0].endswith(".toml"):
        return _configured(args, Path(words[0]), words[1:])
    program = Program(target=words[0], is_module=is_module, arguments=tuple(words[1:]))
    program.check()
    return BenchProgram(
        program=program,
        label=words[0] if is_module else Path(words[0]).name,
        key=words[0] if is_module else str(Path(words[0]).resolve()),
        given=program.arguments,
        batch=args.batch,
    )


def _configured(args: argparse.Namespace, path: Path, words: Sequence[str]) -> BenchProgram:
    """A configuration: the sweep sets its batch, engine and varied keys; nothing is saved."""
    from hpctrain.train import load_config

    sets = [word for word in words if word != "--set"]
    if len(words) != 2 * len(sets) or list(words[::2]) != ["--set"] * len(sets):
        raise ConfigError(
            f"after {path.name} only --set KEY=VALUE may follow, not {' '.join(words)!r}"
        )
    config = load_config(path, sets)
    keys = [axis.partition("=")[0] for axis in getattr(args, "vary", [])]
    plain = [key for key in keys if "." not in key]
    if plain:
        raise ConfigError(
            f"--vary {plain[0]} is not a key of the configuration; name it with its section, as in "
            "precision.kind=fp32,bf16"
        )
    own = [
        "train.global_batch={batch}",
        "engine.name={engine}",
        f"logging.directory={args.dir.absolute() / 'run'}",
        *(f"{key}={{{key}}}" for key in keys),
    ]
    chosen = [*sets, *own]
    program = Program(
        target="hpctrain.train.entry",
        is_module=True,
        arguments=(str(path), *(word for text in chosen for word in ("--set", text))),
    )
    return BenchProgram(
        program=program,
        label=path.name,
        key=str(path.resolve()),
        given=tuple(words),
        batch=args.batch or config.train.global_batch,
    )
