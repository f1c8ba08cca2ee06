"""`hpctrain train` as a user calls it: alone, on ranks, under mpirun; and the examples."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

from hpctrain.train.journal import read_lines
from mpi_tests.launch.commands import HPCTRAIN, ROOT, run
from mpi_tests.launch.test_readme import tools

EXAMPLES = ROOT / "examples" / "train"


def last(directory, kind):
    return [line for line in read_lines(directory / "metrics.jsonl") if line["kind"] == kind][-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the examples, where runs may be written."""
    pytest.importorskip("sklearn", reason="scikit-learn has the digits")
    path = tmp_path_factory.mktemp("train")
    shutil.copytree(EXAMPLES, path, dirs_exist_ok=True)
    return path


def test_one_file_alone_then_on_two_ranks(folder):
    words = ["digits_mlp.toml", "--set", "schedule.name=none", "--set", "schedule.warmup_steps=0"]
    words += ["--set", "checkpoint.every_steps=10"]
    alone = run(*HPCTRAIN, "train", *words, "--set", "train.epochs=1", cwd=folder, timeout_s=120)
    assert alone.code == 0, alone.text
    directory = folder / "runs" / "digits_mlp"
    assert json.loads((directory / "summary.json").read_text())["steps"] == 23
    both = run(*HPCTRAIN, "train", *words, "--set", "train.epochs=3", "-n", "2", cwd=folder,
               timeout_s=120)  # fmt: skip
    assert both.code == 0, both.text
    assert "resuming from step 23" in both.text
    assert re.search(r"finished after 69 steps in \w+, of which 46 in this job's ", both.text)
    assert not re.search(r"\x1b\[", both.out)  # a batch log has no colours
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["ranks"]) == ("finished", 69, 2)
    assert summary["metrics"]["accuracy"] > 0.85
    lines = list(read_lines(directory / "metrics.jsonl"))
    assert [x["step"] for x in lines if x["kind"] == "eval"] == [23, 46, 69]
    names = {path.name for path in directory.iterdir()}
    assert {"config.toml", "environment.json", "logs", "checkpoints"} <= names
    assert "evaluation at step 69" in (directory / "logs" / "rank-00000.log").read_text()
    assert (directory / "logs" / "rank-00001.log").exists()
    seen = run(*HPCTRAIN, "watch", directory, cwd=folder)
    assert seen.code == 0, seen.text
    assert "finished: epoch 3" in seen.out
    again = run(*HPCTRAIN, "train", *words, "--set", "train.epochs=3", cwd=folder, timeout_s=120)
    assert again.code == 0, again.text
    assert again.text.count("nothing is left to do: 3 of 3 epochs are done") == 1


def test_mistakes_that_only_ranks_can_see_leave_with_code_2(folder):
    wrong = run(
        *HPCTRAIN, "train", "digits_mlp.toml", "--fresh", "-n", "2",
        "--set", "optimizer.name=AdmW", "--set", "logging.directory=runs/wrong",
        cwd=folder, timeout_s=120,
    )  # fmt: skip
    assert wrong.code == 2, wrong.text
    assert wrong.text.count("did you mean AdamW?") == 1
    assert "Traceback" not in wrong.text
    none = run(*HPCTRAIN, "train", "digits_mlp.toml", "--resume",
               "--set", "logging.directory=runs/none", cwd=folder)  # fmt: skip
    assert none.code == 2, none.text
    assert "no checkpoint to resume from" in none.text


def test_another_model_is_refused_with_a_message_alone(folder):
    words = ["digits_mlp.toml", "-n", "2", "--set", "logging.directory=runs/other"]
    words += ["--set", "train.epochs=1", "--set", "checkpoint.every_steps=10"]
    assert run(*HPCTRAIN, "train", *words, cwd=folder, timeout_s=120).code == 0
    other = run(*HPCTRAIN, "train", *words, "--set", "model.args.hidden=64", cwd=folder,
                timeout_s=120)  # fmt: skip
    assert other.code == 2, other.text
    assert "Traceback" not in other.text
    assert other.text.count("0.weight is 128x64 in it and 64x64 here") == 1
    assert "--fresh moves the old run aside" in other.text
    directory = folder / "runs" / "other"
    assert "hidden = 128" in (directory / "config.toml").read_text()  # the old run is untouched
    assert json.loads((directory / "summary.json").read_text())["state"] == "finished"
    again = run(*HPCTRAIN, "train", *words, cwd=folder, timeout_s=120)
    assert again.code == 0, again.text


BATCHNORM = """
import torch


def build():
    layers = torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 10))
"""


def test_statistics_that_are_averaged_anyway_are_no_news(folder):
    (folder / "batchnorm.py").write_text(BATCHNORM)
    text = (folder / "digits_mlp.toml").read_text()
    text = text.replace('"digits:mlp"', '"batchnorm:build"').replace("args = { hidden = 128 }", "")
    (folder / "batchnorm.toml").write_text(text)
    words = ["train", "batchnorm.toml", "-n", "2", "--set", "train.epochs=1"]
    done = run(*HPCTRAIN, *words, cwd=folder, timeout_s=120)
    assert done.code == 0, done.text
    assert "each rank's own" not in done.text.replace("each rank's own besides", "")
    (folder / "plain.toml").write_text(
        text.partition("[checkpoint]")[0].replace('evaluation = "digits:held_out"', "")
        .replace('metrics = ["accuracy"]', "").replace("patience = 5", "")
    )  # fmt: skip
    words[1] = "plain.toml"  # nobody evaluates, so nobody averages
    told = run(*HPCTRAIN, *words, cwd=folder, timeout_s=120)
    assert told.code == 0, told.text
    assert "running statistics of 1 are each rank's own" in told.text


@pytest.mark.parametrize(
    ("name", "metric", "low", "high"),
    [("digits_cnn", "accuracy", 0.9, 1.0), ("text", "loss", 1.0, 3.0)],
)
def test_examples_train_on_two_ranks(folder, name, metric, low, high):
    done = run(*HPCTRAIN, "train", f"{name}.toml", "-n", "2", cwd=folder, timeout_s=120)
    assert done.code == 0, done.text
    assert low < last(folder / "runs" / name, "eval")[metric] <= high, done.text


def test_regression_on_an_hdf5_file_under_mpirun(folder):
    pytest.importorskip("h5py", reason="the file is HDF5")
    assert run(sys.executable, "energy.py", ".", cwd=folder).code == 0
    done = run("mpirun", "-n", "2", *HPCTRAIN, "train", "energy.toml", cwd=folder, env=tools(),
               timeout_s=120)  # fmt: skip
    assert done.code == 0, done.text
    assert last(folder / "runs" / "energy", "eval")["mae"] < 0.35


def test_a_script_of_plain_horovod_runs_unchanged():
    if run(sys.executable, "-c", "import horovod.torch").code != 0:
        pytest.skip("Horovod is not built here")
    script = ROOT / "examples" / "horovod_digits.py"
    assert "hpctrain" not in script.read_text().partition('"""\n\nfrom')[2]
    done = run(*HPCTRAIN, "run", "-n", "2", script, timeout_s=120)
    assert done.code == 0, done.text
    found = re.search(r"accuracy ([\d.]+) on 2 ranks", done.out)
    assert found, done.text
    assert float(found.group(1)) > 0.95
