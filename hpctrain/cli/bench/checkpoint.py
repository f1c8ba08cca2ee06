"""`hpctrain bench checkpoint`: what `python -m benchmarks.checkpoint` measures, in a checkout."""

from __future__ import annotations

import argparse
import subprocess
import sys

from hpctrain.errors import ConfigError
from hpctrain.scaling.harness.machine import ROOT

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare nothing: all options are the benchmark's own."""
    parser.usage = "hpctrain bench checkpoint [-- OPTIONS of python -m benchmarks.checkpoint]"
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    if not (ROOT / "benchmarks" / "checkpoint.py").exists():
        raise ConfigError(
            "bench checkpoint needs a checkout of hpctrain, which has benchmarks/; an installed "
            "package does not"
        )
    options = args.options[1:] if args.options[:1] == ["--"] else args.options
    return subprocess.call([sys.executable, "-m", "benchmarks.checkpoint", *options], cwd=ROOT)
