"""Public names and command-line flags are frozen: a change here is a change for users."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import subprocess
import sys

import pytest

import hpctrain
from hpctrain.cli import VERBS, main

NAMES = """
AutoGrid Grid Keep Loader Replica Saver Sentinel Shard Store Trainer World __version__ agree
auto_grid connect data distribute errors files gather inference init metrics nn optim precision
reshuffle scatter share split stage
"""
MOVED = """
connection.Connection errors.CheckpointError errors.CollectiveError errors.ConfigError
errors.DataError errors.DriftError errors.HpcTrainError errors.InstallError errors.JobError
errors.LaunchError errors.NonFiniteError errors.StageError errors.TimedOutError
inference.quantize_int8 optim.EMA optim.LAMB optim.LARS optim.Recipe optim.average_batchnorm
optim.checkpoint_activations optim.split_parameters optim.sync_batchnorm precision.LossScaling
"""
FLAGS = {
    "run": ("--env --help --hostfile --hosts --log-dir --quiet --ranks --trace -h -m -n -np -q -x"),
    "bench": "--help -h",
    "report": "--format --help --json --reserve --runs --samples --title -h -o",
    "trace": "--help -h",
    "train": (
        "--dry-run --env --fresh --help --hosts --json --ranks --ranks-per-node --resume --set "
        "-h -n -x"
    ),
    "config": "--help -h",
    "watch": "--every --help --json --once -h",
    "chaos": "--help -h",
    "checkpoint": "--help -h",
    "data": "--help -h",
    "doctor": "--all-nodes --clean --help --json --time-limit -h",
    "horovod": "--help -h",
    "job": "--help -h",
    "sweep": "--help -h",
    "plan": (
        "--accumulate --activation-mib --bucket-mib --cycle-ms --drop-last --efficiency "
        "--engine --epochs --global-batch --help --json --keep --machine --machines "
        "--measure-profile --memory --memory-per-rank --micro-batch --precision --profile --ranks "
        "--ranks-per-node --rehearse --repeats --requeue --samples --save-dir --schedule --site "
        "--state-copies --subject --tensor --tflops --time --topology --train-samples "
        "--warmup-steps --wire --wire-bits -h"
    ),
    "pack": "--help --output --prefix -h -o",
}


def test_public_names():
    assert sorted(NAMES.split()) == sorted(hpctrain.__all__)
    for name in hpctrain.__all__:
        assert getattr(hpctrain, name) is not None
    with pytest.raises(AttributeError, match="nosuch"):
        hpctrain.nosuch  # noqa: B018


@pytest.mark.parametrize("name", MOVED.split())
def test_names_that_have_moved_still_work(name):
    home, _, last = name.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"hpctrain.{last} is now hpctrain.{name}"):
        found = getattr(hpctrain, last)
    assert found is getattr(importlib.import_module(f"hpctrain.{home}"), last)


def test_a_name_that_has_moved_is_warned_of_once_where_it_is_imported():
    with pytest.warns(DeprecationWarning, match="EMA") as told:
        from hpctrain import EMA  # noqa: F401
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("verb", VERBS)
def test_flags(verb):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"hpctrain.cli.{verb}").add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert " ".join(sorted(flags)) == FLAGS[verb]


JOB = """--account --after --after-kind --array --array-limit --constraint --cpus-per-rank
--directive --env --expedite --gpus-per-node --help --image --log-dir --memory --module --mpi --name
--nodes --pack --partition --prologue --qos --queue --ranks-per-node --requeue --requeue-on
--reservation --signal --signal-lead --site --source --stage --template --time --venv -h"""
SWEEP = "--dir --grid --help --list --num --random --seed -h"
SWEPT = """--batch --dir --help --load-limit --repeats --retries --seed --steps --timeout --warmup
-h -m"""
CURVE = "--engines --mode --vary"
OUTPUT = "--compare --json"
HARNESS = """--bind --blocks --help --json --load-limit --quick --ranks --retries --save --seed
--variants --worker -h"""
ACTIONS = {
    ("chaos", "run"): (
        "--help --json --keep --ranks --scenarios --set --steps --timeout-s --tolerance -h -n"
    ),
    ("chaos", "soak"): "--help --json --keep --ranks --rounds --seed -h -n",
    ("checkpoint", "list"): "--help --json -h",
    ("checkpoint", "verify"): "--help --json -h",
    ("checkpoint", "export"): "--all --best --ema --help --key --metric -h",
    ("checkpoint", "import"): "--help --key --step --to -h",
    ("job", "render"): f"{JOB} --output -o",
    ("job", "submit"): f"{JOB} --chain --json --quiet --snapshot -q",
    ("job", "status"): "--help --json -h",
    ("job", "logs"): "--follow --help --lines --task -f -h -n",
    ("job", "cancel"): "--help -h",
    ("job", "efficiency"): "--help --json --run -h",
    ("job", "sites"): "--help --json -h",
    ("job", "lint"): "--help --json --level -h",
    ("trace", "merge"): "--help --json -h",
    ("bench", "scale"): f"{SWEPT} {CURVE} {OUTPUT} --ranks --threads",
    ("bench", "submit"): f"{SWEPT} {CURVE} {JOB} --node-counts",
    ("bench", "collect"): f"{OUTPUT} --help --wait -h",
    ("bench", "layout"): f"{SWEPT} {OUTPUT} --cores --ranks",
    ("bench", "compare"): "--counts --help --json --tolerance --write-counts -h",
    ("bench", "overhead"): f"{HARNESS} --steps --workloads",
    ("bench", "collectives"): f"{HARNESS} --sizes",
    ("bench", "data"): f"{HARNESS} --parts",
    ("bench", "checkpoint"): f"{HARNESS} --cases",
    ("bench", "fit"): "--engines --help --ranks --repeats --title -h",
    ("bench", "measure"): "--help -h",
    ("sweep", "run"): SWEEP,
    ("sweep", "submit"): f"{JOB} {SWEEP} --snapshot",
    ("sweep", "table"): "--dir --help --json --max --metric -h",
}


def test_flags_of_actions():
    for verb in ("bench", "chaos", "checkpoint", "job", "sweep", "trace"):
        parser = argparse.ArgumentParser()
        importlib.import_module(f"hpctrain.cli.{verb}").add_arguments(parser)
        (actions,) = [a.choices for a in parser._actions if isinstance(a.choices, dict)]
        found = {
            (verb, name): {flag for each in child._actions for flag in each.option_strings}
            for name, child in actions.items()
        }
        frozen = {key: set(text.split()) for key, text in ACTIONS.items() if key[0] == verb}
        assert found == frozen


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["horovod", "build", "--help"], "Compile Horovod for exactly the torch, MPI"),
        (["horovod", "check", "--help"], "Check whether the installed Horovod can be imported"),
        (["run", "--logdir", "d", "train.py"], "usage: hpctrain run [options]"),
        (["doctor", "--nosuch"], "usage: hpctrain doctor"),
    ],
)
def test_help_and_mistakes_show_the_verb_itself(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == (0 if "--help" in words else 2)
    shown = capsys.readouterr()
    assert told in shown.out + shown.err
    assert ("unrecognized arguments: --" in shown.err) == (ended.value.code == 2)


@pytest.mark.parametrize(
    ("word", "verb"),
    [("lint", "job lint"), ("submit", "job submit"), ("check", "doctor"), ("dcotor", "doctor")],
)
def test_a_word_that_is_no_verb_is_answered_with_the_verb(word, verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([word, "train.sh"])
    assert ended.value.code == 2
    assert f"did you mean `hpctrain {verb}`?" in capsys.readouterr().err


def test_every_public_module_says_what_is_public():
    for module in pkgutil.walk_packages(hpctrain.__path__, "hpctrain."):
        if module.name.endswith("__main__"):
            continue
        loaded = importlib.import_module(module.name)
        defined = [
            name
            for name, value in vars(loaded).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.name
        ]
        assert hasattr(loaded, "__all__") or not defined, module.name


def test_importing_hpctrain_imports_nothing_heavy():
    code = "import sys, hpctrain; print({'torch', 'mpi4py', 'numpy', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_reader_that_has_seen_enough_ends_the_output_without_a_traceback(options):
    words = [sys.executable, "-m", "hpctrain", "plan", "--machines", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
