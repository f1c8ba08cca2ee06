"""`hpctrain data shard|inspect|verify`: data sets in files, written, described and checked."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import log
from hpctrain.errors import ConfigError, HpcTrainError

if TYPE_CHECKING:
    from hpctrain.data import Source
    from hpctrain.world import World

__all__ = ["add_arguments", "main"]

_MORE = """\
`shard` and `verify` use all ranks of the job, each for a part of the shards:

examples:
  hpctrain data shard train.npz --to shards --samples-per-shard 10000
  hpctrain data shard x.npy y.npy --join columns --to shards
  mpirun -n 8 hpctrain data shard raw.h5 --columns x,y --to shards --map prepare:clean
  hpctrain data inspect shards
  srun -n 64 hpctrain data verify shards

exit codes: 0 success; 1 a file is missing or broken (it is named); 2 usage error
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's three actions."""
    parser.epilog = _MORE
    actions = parser.add_subparsers(dest="action", required=True, metavar="shard|inspect|verify")
    shard = actions.add_parser("shard", help="write a data set as shards with checksums")
    shard.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="a file or folder, or several files"
    )
    shard.add_argument(
        "--join",
        choices=("rows", "columns"),
        help="of several files: their rows follow each other, or each is one column",
    )
    shard.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where to")
    shard.add_argument(
        "--samples-per-shard", type=int, metavar="N", help="default: as many as make 256 MiB"
    )
    shard.add_argument("--columns", metavar="A,B", help="which arrays (default: all)")
    shard.add_argument(
        "--map",
        dest="change",
        metavar="MODULE:FUNCTION",
        help="applied to each batch of samples before it is written",
    )
    shard.add_argument("--overwrite", action="store_true", help="replace existing shards")
    inspect = actions.add_parser("inspect", help="describe a data set")
    inspect.add_argument("path", type=Path, metavar="PATH", help="a file, or a folder of shards")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    verify = actions.add_parser("verify", help="read all shards and compare the checksums")
    verify.add_argument("path", type=Path, metavar="FOLDER", help="a folder of shards")
    verify.add_argument("--json", action="store_true", help="as JSON")


def main(args: argparse.Namespace) -> int:
    """Run the requested action and return its exit code."""
    if args.action == "inspect":
        return _inspect(args)
    from hpctrain.connection import init

    action = _shard if args.action == "shard" else _verify
    with init(device="cpu") as world:
        try:
            return action(world, args)
        except HpcTrainError as error:  # on all ranks: they exit together
            if world.rank == 0:
                print(f"hpctrain data {args.action}: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1


def _shard(world: World, args: argparse.Namespace) -> int:
    from hpctrain.data import write_shards
    from hpctrain.world import agree

    columns = args.columns.split(",") if args.columns else None
    change, trouble = _load(args.change)
    agree(world.comm, trouble, error=ConfigError)
    source = _open(world, args.paths, args.join, columns)
    number = args.samples_per_shard
    manifest = write_shards(
        world,
        source,
        args.to.absolute(),
        samples_per_shard=_default_samples(source) if number is None else number,
        change=change,
        overwrite=args.overwrite,
    )
    if world.rank == 0:
        print(
            f"{args.to}: {manifest.num_samples} samples in {len(manifest.shards)} shards, "
            f"{manifest.num_bytes} bytes, written by {world.size} ranks"
        )
    return 0


def _open(world: World, paths: list[Path], join: str | None, columns: list[str] | None) -> Source:
    """Collective: the data set that the words name; they must match."""
    from hpctrain.data import files

    if join == "columns" and columns is not None:
        raise ConfigError(
            "--columns chooses arrays of a file, and --join columns makes each file one; leave one "
            "of them out"
        )
    if join == "columns":
        return files(world, columns=paths)
    if join == "rows":
        return files(world, rows=paths, columns=columns)
    if len(paths) > 1:
        raise ConfigError(
            f"{len(paths)} files: say --join rows where their rows follow each other, or --join "
            "columns where row i of each file belongs to sample i"
        )
    return files(world, paths[0], columns=columns)


def _verify(world: World, args: argparse.Namespace) -> int:
    from hpctrain.data import check_shard, read_manifest
    from hpctrain.errors import DataError
    from hpctrain.world import agree

    manifest, trouble = None, None
    try:
        manifest = read_manifest(args.path)
    except DataError as error:
        trouble = str(error)
    agree(world.comm, trouble, error=DataError)
    wrong: list[str] = []
    num_shards = len(manifest.shards) if manifest else 0
    if manifest is not None:
        for number in range(world.rank, num_shards, world.size):
            wrong += check_shard(args.path, manifest, number)
    everything = sorted(text for told in world.comm.allgather(wrong) for text in told)
    if world.rank == 0 and args.json:
        print(json.dumps({"num_shards": num_shards, "broken": everything}, indent=1))
    elif world.rank == 0:
        for text in everything:
            print(text)
        print(f"{args.path}: {num_shards} shards, {len(everything)} broken files")
    return 1 if everything else 0


def _inspect(args: argparse.Namespace) -> int:
    from hpctrain.data import inspect

    found = inspect(args.path)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    rows = [
        (c["name"], c["dtype"], "x".join(map(str, c["shape"])) or "-") for c in found["columns"]
    ]
    title = f"{args.path}: {found['kind']}, {found['num_samples']} samples"
    if found["num_shards"] is not None:
        title += f" in {found['num_shards']} shards, {found['num_bytes']} bytes"
    print(log.table(("column", "dtype", "shape of a sample"), rows, title=title))
    return 0


def _default_samples(source: Source) -> int:
    """How many samples make a shard of about 256 MiB."""
    import numpy as np

    from hpctrain.data import leaves

    if len(source) == 0:
        return 1
    row_bytes = sum(int(leaf.nbytes) for _, leaf in leaves(source.take(np.arange(1))))
    return max(1, (256 << 20) // max(1, row_bytes))


def _load(text: str | None) -> tuple[Callable[[Any], Any] | None, str | None]:
    """The user's function, found as `python -m` finds modules; or why it cannot be had."""
    if text is None:
        return None, None
    module, _, name = text.partition(":")
    if not module or not name:
        return None, f"--map {text!r} is not MODULE:FUNCTION"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's module may raise anything while it is read
        return None, f"--map {text}: {type(error).__name__}: {error}"
    if not callable(function):
        return None, f"--map {text} is not a function"
    return function, None
