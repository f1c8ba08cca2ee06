"""Options that all benchmarks share, and what is done with a result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpctrain import log
from hpctrain.bench.results import ROOT, caption, file_name, tables, validate
from hpctrain.bench.session import Rules
from hpctrain.errors import ConfigError, HpcTrainError

__all__ = [
    "EXIT_NOISY",
    "RESULTS",
    "add_arguments",
    "choose",
    "numbers",
    "parse_size",
    "report",
    "rules_of",
    "run_main",
    "run_program",
]

_UNITS = {"KiB": 2**10, "MiB": 2**20}
RESULTS = ROOT / "benchmarks" / "results"
EXIT_NOISY = 3
"""The result was not saved, because the machine was not quiet."""


def add_arguments(
    parser: argparse.ArgumentParser, *, blocks: int, bind: str = "none", ranks: bool = True
) -> None:
    """Declare what every benchmark understands; without `ranks` all but their number."""
    if ranks:
        parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument(
        "--blocks", type=int, default=blocks, metavar="K", help=f"blocks (default: {blocks})"
    )
    parser.add_argument("--variants", metavar="A,B", help="variants (default: all that are built)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the shuffled orders (default: 0)"
    )
    parser.add_argument(
        "--load-limit",
        type=float,
        default=0.05,
        metavar="X",
        help="share of all cores that other processes may use in a valid block (default: 0.05)",
    )
    parser.add_argument(
        "--retries",
        type=int,
        metavar="R",
        help="how many blocks a case may repeat because of background load (default: --blocks)",
    )
    parser.add_argument(
        "--bind",
        choices=("none", "numa"),
        default=bind,
        help=f"numa: bind each rank to its own cores (default: {bind})",
    )
    parser.add_argument("--quick", action="store_true", help="quick check that it works")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result to a file")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the result to benchmarks/results if the machine was quiet",
    )
    parser.add_argument("--worker", metavar="ADDRESS", help=argparse.SUPPRESS)


def rules_of(args: argparse.Namespace) -> Rules:
    """What the options say about blocks; `--quick` takes two, whatever the load."""
    if args.quick and args.save:
        raise ConfigError("--quick results are not worth saving; use --json")
    if args.save and not RESULTS.is_dir():
        raise ConfigError("--save needs a checkout of hpctrain; use --json OUT")
    retries = args.blocks if args.retries is None else args.retries
    return Rules(
        # If several numbers can be requested, each variant has its own.
        num_ranks=args.ranks if isinstance(args.ranks, int) else 1,
        blocks=2 if args.quick else args.blocks,
        retries=0 if args.quick else retries,
        load_limit=args.load_limit,
        seed=args.seed,
        bind=args.bind,
    )


def numbers(what: str, text: str) -> list[int]:
    """Read a list of whole numbers above 0, each of them once and in order. Pure.

    Raises:
        ConfigError: something else stands there.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{what} {text!r} must be whole numbers of at least 1, such as 2,4")
    return sorted({int(word) for word in words})


def choose(what: str, text: str, known: Sequence[str]) -> list[str]:
    """Read a list of names in the order of `known`. Pure.

    Raises:
        ConfigError: a name is unknown; the valid ones are listed.
    """
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        raise ConfigError(
            f"{what} {', '.join(unknown) or text!r} is unknown; choose from {', '.join(known)}"
        )
    return [name for name in known if name in asked]


def parse_size(text: str) -> int:
    """Bytes of a size such as `4 KiB`. Pure."""
    number, unit = text.split()
    return int(number) * _UNITS[unit]


def report(args: argparse.Namespace, result: dict[str, Any]) -> int:
    """Check a result, print its tables, and write it to the requested place."""
    wrong = validate(result)
    if wrong:
        raise ConfigError("the result does not match the schema: " + "; ".join(wrong))
    print(caption(result), end="\n\n")
    for headers, rows in tables(result):
        print(log.table(headers, rows), end="\n\n")
    text = json.dumps(result, indent=1) + "\n"
    if args.json is not None:
        args.json.write_text(text)
    if result["num_noisy"]:
        log.warn(
            f"{result['num_noisy']} blocks were disturbed by other processes; do not quote this"
        )
    if not args.save:
        return 0
    if result["num_noisy"]:
        log.warn("not saved; try again when the machine is quiet")
        return EXIT_NOISY
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / file_name(result)
    path.write_text(text)
    log.notice(f"saved as benchmarks/results/{path.name}; now run python -m benchmarks.tables")
    return 0


def run_program(
    name: str,
    about: str | None,
    declare: Callable[[argparse.ArgumentParser], None],
    main: Callable[[argparse.Namespace], int],
) -> int:
    """Be `python -m NAME`: read the command line, measure, and say what went wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    declare(parser)
    return run_main(lambda: main(parser.parse_args()))


def run_main(main: Callable[[], int]) -> int:
    """Say what went wrong without a traceback: code 2 for a mistake on the command line, else 1."""
    try:
        return main()
    except HpcTrainError as error:
        log.notice(str(error))
        return 2 if isinstance(error, ConfigError) else 1
