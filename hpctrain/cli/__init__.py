"""Floor 8: the command line, one verb per file.

A verb is a module with `HELP`, `add_arguments(parser)` and `main(args) -> int`; it is imported only
when it is called, so that `hpctrain --help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module

from hpctrain import __version__
from hpctrain.cli.job import ACTIONS as JOB_ACTIONS
from hpctrain.errors import ConfigError, HpcTrainError

__all__ = ["VERBS", "main"]

_NO_READER = 141
"""What shells report for a process killed by SIGPIPE."""

VERBS = {
    # verb: its line in the overview; the module hpctrain.cli.VERB has the rest
    "run": "run a script on all ranks, starting mpirun outside a launcher",
    "train": "train from a TOML file: evaluation, checkpoints, logs, a run directory",
    "config": "explain, check and list the keys of such a file",
    "watch": "follow a run from its directory, on a login node too",
    "data": "write a data set as shards, describe or check one",
    "checkpoint": "list checkpoints, check them, export the model, or import a torch file",
    "chaos": "kill, stop and damage a training, fill its disk, and check that no run is lost",
    "doctor": "check MPI, torch, Horovod and the machine, with fixes for what is broken",
    "bench": "measure how a script scales, the best layout of a node, collectives, data",
    "job": "write, submit, watch and lint job scripts",
    "sweep": "run a command over many settings, here or as a job array, and rank the results",
    "report": "make a page, pictures and tables of benchmark results and run directories",
    "trace": "merge what the ranks of a traced run recorded into one timeline",
    "plan": "predict a training step at N ranks, and what to request; all simulated",
    "pack": "pack an environment into an archive that jobs unpack on every node's local disk",
    "horovod": "build Horovod against this torch and this MPI, or check the installed one",
}

_OTHER_WORDS = {
    "check": "doctor",
    "explain": "config explain",
    "predict": "plan",
    "export": "checkpoint export",
    **{action: f"job {action}" for action in JOB_ACTIONS},
}
"""What people call instead of a verb, and the verb they want."""

_EPILOG = """\
exit codes: 0 success; 1 something is broken; 2 the command line or a setting is wrong;
otherwise the code of the rank that failed. `hpctrain VERB --help` explains a verb.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="hpctrain",
        description="Train a PyTorch script on a whole supercomputer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hpctrain {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    called = next((word for word in words if not word.startswith("-")), None)
    if called is not None and called not in VERBS:
        wanted = _suggest(called)
        if wanted is not None:
            parser.error(f"{called!r} is not a verb; did you mean `hpctrain {wanted}`?")
    children = {}
    for verb, line in VERBS.items():
        children[verb] = child = verbs.add_parser(
            verb,
            help=line,
            description=line,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if verb == called:
            import_module(f"hpctrain.cli.{verb}").add_arguments(child)
    args, unknown = parser.parse_known_args(words)
    if unknown:  # argparse itself would show the usage of all verbs
        children[args.verb].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = import_module(f"hpctrain.cli.{args.verb}").main(args)
        sys.stdout.flush()
    except HpcTrainError as error:
        print(f"hpctrain {args.verb}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        if not _output_is_gone():
            raise
        return _NO_READER
    return code


def _suggest(word: str) -> str | None:
    """The verb that somebody may have meant, or None. Pure."""
    if word in _OTHER_WORDS:
        return _OTHER_WORDS[word]
    near = difflib.get_close_matches(word, VERBS, n=1)
    return near[0] if near else None


def _output_is_gone() -> bool:
    """Whether the output pipe is closed, as after `| head`; then nothing more is written."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
