"""`hpctrain config explain|schema|template|show`: what a configuration may say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

__all__ = ["add_arguments", "main"]

_MORE = """\
examples:
  hpctrain config template > train.toml
  hpctrain config explain optimizer.lr
  hpctrain config show train.toml --set train.epochs=3
  hpctrain config schema > hpctrain.schema.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's actions."""
    parser.epilog = _MORE
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="explain|schema|template|show"
    )
    explain = actions.add_parser("explain", help="what a key means, its kind, default and range")
    explain.add_argument("key", nargs="?", metavar="KEY", help="a key or a section (default: all)")
    explain.add_argument("--markdown", action="store_true", help="tables of all keys")
    actions.add_parser("schema", help="the JSON schema, for editors")
    actions.add_parser("template", help="a file with every key, explained")
    show = actions.add_parser("show", help="check a file and print it with all defaults")
    show.add_argument("path", type=Path, metavar="CONFIG.toml", help="the file")
    show.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a key, as in train.epochs=3",
    )


def main(args: argparse.Namespace) -> int:
    """Print the requested text."""
    from hpctrain.train import (
        explain,
        json_schema,
        list_keys,
        load_config,
        markdown,
        template,
        to_toml,
    )

    if args.action == "schema":
        print(json.dumps(json_schema(), indent=2))
    elif args.action == "template":
        print(template(), end="")
    elif args.action == "show":
        print(to_toml(load_config(args.path, args.settings)), end="")
    elif args.markdown:
        print(markdown(), end="")
    else:
        print(explain(args.key) if args.key else list_keys())
    return 0
