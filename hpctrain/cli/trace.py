"""`hpctrain trace`: one timeline of all ranks, from what each of them recorded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

__all__ = ["add_arguments", "main"]

_MORE = """\
`hpctrain run --trace DIR` (or HPCTRAIN_TRACE=DIR under any launcher) records; the files are merged
when the run succeeds. After a killed run, or with very many events, merge them with this command.
Open DIR/trace.json.gz at https://ui.perfetto.dev: nothing is uploaded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.epilog = _MORE
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    merge = actions.add_parser("merge", help="merge DIR/rank-*.jsonl into DIR/trace.json.gz")
    merge.add_argument("folder", type=Path, metavar="DIR", help="the folder given to --trace")
    merge.add_argument("--json", action="store_true", help="print the summary as JSON")


def main(args: argparse.Namespace) -> int:
    """Merge, and say what is in the trace."""
    from hpctrain.timeline import merge_folder

    merged = merge_folder(args.folder)
    if args.json:
        print(json.dumps({**asdict(merged), "path": str(merged.path)}, indent=1))
    else:
        print(f"{merged.path}: {merged.sentence}")
    return 0
