"""`hpctrain checkpoint list|verify|export|import`: what is in a directory of checkpoints."""

from __future__ import annotations

import argparse
import datetime
import json
import math
from pathlib import Path

from hpctrain import log
from hpctrain.checkpoint import Entry, checkpoints_of, find_checkpoint, verify
from hpctrain.errors import ConfigError

__all__ = ["add_arguments", "main"]

_PATH = "a run, a directory of checkpoints, or one checkpoint"
_MORE = """\
PATH is a run directory, a directory of checkpoints, or one checkpoint. Everything runs in one
process, on a login node as well; no MPI is needed.

examples:
  hpctrain checkpoint list runs/one
  hpctrain checkpoint verify runs/one
  hpctrain checkpoint export runs/one model.safetensors
  hpctrain checkpoint export runs/one best.safetensors --best
  hpctrain checkpoint export runs/one best.pt --best --metric max:accuracy --ema
  hpctrain checkpoint export runs/one/checkpoints/checkpoint-000012-step-1200 all.pt --all
  hpctrain checkpoint import somebody.pt --to runs/two/checkpoints

exit codes: 0 success; 1 a checkpoint is damaged or missing (it is named); 2 usage error
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's actions."""
    parser.epilog = _MORE
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="list|verify|export|import"
    )
    listing = actions.add_parser("list", help="list the checkpoints")
    listing.add_argument("path", type=Path, metavar="PATH", help=_PATH)
    listing.add_argument("--json", action="store_true", help="as JSON")
    verify = actions.add_parser("verify", help="read all files and compare the checksums")
    verify.add_argument("path", type=Path, metavar="PATH", help=_PATH)
    verify.add_argument("--json", action="store_true", help="as JSON")
    export = actions.add_parser("export", help="write the model as one file for other tools")
    export.add_argument(
        "path", type=Path, metavar="PATH", help="one checkpoint, or a run or directory: its newest"
    )
    export.add_argument("to", type=Path, metavar="FILE", help=".safetensors, .pt or .pth")
    what = export.add_mutually_exclusive_group()
    what.add_argument(
        "--key",
        default="model",
        metavar="K",
        help="which part of the state, as a/b (default: model)",
    )
    what.add_argument("--all", action="store_true", help="the whole state")
    export.add_argument(
        "--best", action="store_true", help="the best kept one instead of the newest"
    )
    export.add_argument(
        "--metric",
        metavar="min:NAME",
        help="what --best means, as min:loss or max:accuracy (default: what the run says)",
    )
    export.add_argument(
        "--ema", action="store_true", help="the averaged weights instead of the last ones"
    )
    importing = actions.add_parser("import", help="make a checkpoint from a torch file")
    importing.add_argument("file", type=Path, metavar="FILE", help="made by torch.save")
    importing.add_argument(
        "--to", type=Path, required=True, metavar="PATH", help="a directory of checkpoints"
    )
    importing.add_argument(
        "--key", default="model", metavar="K", help="where in the state (default: model)"
    )
    importing.add_argument("--step", type=int, default=0, metavar="N", help="its step (default: 0)")


def main(args: argparse.Namespace) -> int:
    """Run the requested action and return its exit code."""
    actions = {"list": _list, "verify": _verify, "export": _export, "import": _import}
    return actions[args.action](args)


def _list(args: argparse.Namespace) -> int:
    entries = checkpoints_of(args.path)
    if args.json:
        print(json.dumps([_describe(entry) for entry in entries], indent=1))
        return 0
    rows = []
    for entry in entries:
        manifest = entry.manifest
        rows.append(
            (
                entry.path.name,
                entry.step,
                "-" if manifest is None else _when(manifest.saved_at),
                "-" if manifest is None else manifest.num_ranks,
                "-" if manifest is None else f"{manifest.num_bytes / 2**20:.1f}",
                _metrics(entry),
                entry.trouble or "complete",
            )
        )
    headers = ("checkpoint", "step", "saved", "ranks", "MiB", "metrics", "state")
    print(log.table(headers, rows, title=str(args.path)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    found = {str(entry.path): verify(entry.path) for entry in checkpoints_of(args.path)}
    broken = {path: texts for path, texts in found.items() if texts}
    if args.json:
        print(json.dumps({"num_checkpoints": len(found), "broken": broken}, indent=1))
    else:
        for texts in broken.values():
            for text in texts:
                print(text)
        print(f"{args.path}: {len(found)} checkpoints, {len(broken)} damaged")
    return 1 if broken else 0


def _export(args: argparse.Namespace) -> int:
    from hpctrain.checkpoint import export

    if args.metric is not None and not args.best:
        raise ConfigError(f"--metric {args.metric} belongs to --best")
    if args.ema and args.all:
        raise ConfigError("--all includes the averages; leave out --ema")
    path = find_checkpoint(args.path, best=(args.metric or True) if args.best else False)
    if args.best:
        _remark_on_better(args.path, path, args.metric)
    count = export(path, args.to, key=None if args.all else args.key, ema=args.ema)
    what = "averaged weights, " if args.ema else ""
    print(f"{args.to}: {what}{count} tensors of {path}{_measured(path)}")
    return 0


def _remark_on_better(run: Path, path: Path, metric: str | None) -> None:
    """Say that an evaluation was better than all checkpoints that are kept, where that is known."""
    from hpctrain.train import read_summary

    monitor = (read_summary(run) or {}).get("monitor", {})
    (entry,) = checkpoints_of(path)
    found = entry.metrics.get(monitor.get("name", ""))
    other = metric is not None and metric.partition(":")[2] != monitor.get("name")
    if found is not None and monitor["best"] not in (None, found) and not other:
        log.notice(
            f"the best {monitor['name']} was {monitor['best']:.6g} at step {monitor['best_step']}, "
            "and its checkpoint is not kept: checkpoint.keep_best keeps it"
        )


def _measured(path: Path) -> str:
    """What was measured of a checkpoint, in brackets; empty where that is nothing."""
    (entry,) = checkpoints_of(path)
    metrics = _metrics(entry)
    return f" ({metrics})" if metrics else ""


def _import(args: argparse.Namespace) -> int:
    from hpctrain.checkpoint import import_torch, write_checkpoint

    state = {args.key: import_torch(args.file)}
    note = {"imported_from": args.file.name}
    print(write_checkpoint(args.to, state, step=args.step, note=note))
    return 0


def _describe(entry: Entry) -> dict[str, object]:
    manifest = entry.manifest
    described: dict[str, object] = {
        "path": str(entry.path),
        "number": entry.number,
        "step": entry.step,
        "is_complete": entry.trouble is None,
        "trouble": entry.trouble,
    }
    if manifest is not None:
        described |= {
            "saved_at": _when(manifest.saved_at),
            "num_ranks": manifest.num_ranks,
            "num_bytes": manifest.num_bytes,
            "num_parts": len(manifest.parts),
            # JSON has no infinite numbers and no nan.
            "metrics": {n: v if math.isfinite(v) else str(v) for n, v in manifest.metrics.items()},
            "note": manifest.note,
            "versions": manifest.versions,
        }
    return described


def _metrics(entry: Entry) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in entry.metrics.items())


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
