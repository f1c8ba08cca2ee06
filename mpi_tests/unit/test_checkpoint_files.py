"""Checkpoints as files: damage, kills, export and the command line, in one process without MPI."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hpctrain.checkpoint import (
    find_checkpoint,
    import_torch,
    load_weights,
    read_checkpoint,
    write_checkpoint,
)
from hpctrain.checkpoint.directory import (
    Keep,
    describe_owner,
    list_checkpoints,
    retain,
    sweep,
    verify,
)
from hpctrain.checkpoint.format import FileSpec
from hpctrain.checkpoint.saving import draft_manifest, prepare
from hpctrain.checkpoint.writing import Background, Record, Records, WriteTask, finish
from hpctrain.cli import main
from hpctrain.errors import CheckpointError, ConfigError
from mpi_tests.checkpoints import bits, damage

STATE = {
    "model": OrderedDict(weight=torch.arange(6.0).reshape(2, 3), bias=torch.zeros(2)),
    "optimizer": {"state": {0: {"m": torch.ones(2, dtype=torch.bfloat16)}}, "lr": 0.1},
    "array": np.arange(3),
}


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path, STATE, step=7, note={"a": 1}, metrics={"loss": 0.25})


def test_parts_are_plain_safetensors(checkpoint):
    (part,) = checkpoint.glob("*.safetensors")
    with safe_open(part, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert bits(found["model/weight"]) == bits(STATE["model"]["weight"])
    assert bits(found["optimizer/state/0/m"]) == bits(torch.ones(2, dtype=torch.bfloat16))
    assert bits(read_checkpoint(checkpoint)) == bits(STATE)


def test_every_byte_counts(checkpoint):
    """Cut off at any byte, or with any byte changed, it is found out."""
    for path in sorted(checkpoint.iterdir()):
        if path.name == "owner.json":
            continue
        data = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            for place, byte in enumerate(data):
                os.pwrite(file.fileno(), bytes([byte ^ (1 << place % 8)]), place)
                assert verify(checkpoint), f"{path.name} changed at byte {place}"
                os.pwrite(file.fileno(), bytes([byte]), place)
            for place in reversed(range(len(data))):
                os.ftruncate(file.fileno(), place)
                assert verify(checkpoint), f"{path.name} cut off at byte {place}"
            os.pwrite(file.fileno(), data, 0)
    assert verify(checkpoint) == []


def save_for_ever(directory, started):
    state = {f"w{i}": torch.full((1000,), float(i)) for i in range(4)}
    for step in range(10**6):
        write_checkpoint(directory, {**state, "step": step}, step=step)
        started.set()


def test_killed_at_any_moment_the_newest_is_complete(tmp_path):
    context = multiprocessing.get_context("fork")
    chance = random.Random(5)
    newest = 0
    for _ in range(8):
        started = context.Event()
        process = context.Process(target=save_for_ever, args=(tmp_path, started))
        process.start()
        assert started.wait(30)
        time.sleep(chance.uniform(0, 0.03))  # the moment is the point
        process.kill()
        process.join()
        entries = list_checkpoints(tmp_path)
        assert all(verify(entry.path) == [] for entry in entries)
        assert entries[-1].number > newest
        newest = entries[-1].number
        assert read_checkpoint(entries[-1].path)["step"] == entries[-1].step
        for left in tmp_path.glob(".partial-*"):
            if not (left / "owner.json").exists() or not (left / "owner.json").read_text():
                os.utime(left, (1, 1))  # killed before it said who it is: needs more patience
                for path in left.iterdir():
                    os.utime(path, (1, 1))
        sweep(tmp_path, describe_owner(None))
        assert sorted(tmp_path.iterdir()) == [entry.path for entry in entries]
        retain(tmp_path, Keep(last=1))


def test_leftovers_of_the_living_stay(tmp_path):
    left = tmp_path / ".partial-checkpoint-000001-step-1.0a"
    left.mkdir()
    other = {**describe_owner(None), "process": os.getppid()}
    other["started"] = psutil.Process(os.getppid()).create_time()
    (left / "owner.json").write_text(json.dumps(other))
    assert sweep(tmp_path, describe_owner(None)) == []
    (left / "owner.json").write_text(json.dumps({**other, "started": 1.0}))
    assert sweep(tmp_path, describe_owner(None)) == [left]


def test_retention_never_counts_damaged_ones(tmp_path):
    paths = [write_checkpoint(tmp_path, {"x": i}, step=i) for i in range(5)]
    damage("truncated", paths[3] / "tree.json")
    damage("missing", paths[0] / "manifest.json")
    assert retain(tmp_path, Keep(last=2)) == [paths[0], paths[1]]
    assert [entry.path for entry in list_checkpoints(tmp_path)] == paths[2:]


def unfinished(tmp_path):
    folder = tmp_path / ".partial-checkpoint-000001-step-1.0a"
    folder.mkdir()
    prepared = prepare({}, step=1, own=None, note=None, metrics=None)
    return draft_manifest(prepared, 1, num_ranks=4), folder


def test_parts_that_never_come_are_named(tmp_path):
    (draft, folder), records = unfinished(tmp_path), Records()
    writers = (0, 2, 3)
    records.add(Record(part=0, file=FileSpec(name="a", num_bytes=0, blocks=()), own={}))
    with pytest.raises(CheckpointError, match="parts of ranks 2-3 were not on disk in time"):
        finish(draft, folder, writers, "{}", records, deadline=time.monotonic() + 0.05)
    (folder / "part-00001.failed").write_text("rank 2 has no room")
    with pytest.raises(CheckpointError, match="rank 2 has no room"):
        finish_again(draft, folder, writers, records)
    assert list_checkpoints(tmp_path) == []


def finish_again(draft, folder, writers, records):
    (folder / "tree.json").unlink()
    finish(draft, folder, writers, "{}", records, deadline=time.monotonic() + 30)


def test_a_disk_that_does_not_answer():
    answer = threading.Event()
    task = WriteTask(lambda: print(answer.wait(30)), "writing x")
    background = Background()
    background.start(task)
    assert task.trouble(30) is None
    assert "writing x has taken" in task.outcome(0.01)
    assert "0 s are allowed" in task.trouble(0)
    answer.set()
    assert task.outcome(30) is None
    failing = WriteTask(lambda: 1 // 0, "writing y")
    background.start(failing)
    assert "writing y failed: ZeroDivisionError" in failing.outcome(30)
    background.close(30)


def test_list_and_verify(checkpoint, capsys):
    assert main(["checkpoint", "list", str(checkpoint.parent), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["step"], found["is_complete"], found["note"]) == (7, True, {"a": 1})
    assert found["metrics"] == {"loss": 0.25}
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0
    damage("flipped", next(checkpoint.glob("*.safetensors")))
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(checkpoint.parent), "--json"]) == 1
    broken = json.loads(capsys.readouterr().out)["broken"]
    assert "part-00000-of-00001.safetensors is damaged: bytes 0 to" in broken[str(checkpoint)][0]
    damage("missing", checkpoint / "tree.json")
    assert main(["checkpoint", "list", str(checkpoint.parent)]) == 0
    assert "tree.json is missing" in capsys.readouterr().out
    assert main(["checkpoint", "list", str(checkpoint.parent / "nothing")]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path):
    """A run directory as a training leaves it: three checkpoints, the second is the best."""
    config = '[train]\nmonitor = "max:accuracy"\n'
    path = tmp_path / "runs" / "one"
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7)):
        weights = torch.full((2,), float(step))
        average = {"num_updates": step, "averages": {"w": weights / 2}}
        write_checkpoint(
            path / "checkpoints",
            {"model": {"w": weights, "count": torch.tensor(step)}, "ema": average},
            step=step,
            note={"num_ranks": 1, "user": {"config": config}},
            metrics={"accuracy": accuracy, "loss": 1.0 - step / 100},
        )
    (path / "logs").mkdir()
    return path


def test_export_looks_into_a_run_and_finds_the_best(run, tmp_path, capsys):
    to = tmp_path / "model.pt"

    def exported(*words):
        assert main(["checkpoint", "export", str(run), str(to), *words]) == 0
        return torch.load(to, weights_only=True)["w"].tolist()

    assert exported() == [30.0, 30.0]
    assert exported("--best") == [20.0, 20.0]
    assert "step-20 (accuracy=0.9 loss=0.8)" in capsys.readouterr().out
    assert exported("--best", "--metric", "min:loss") == [30.0, 30.0]
    assert "--ema" in capsys.readouterr().err
    assert exported("--best", "--ema") == [10.0, 10.0]
    assert torch.load(to, weights_only=True)["count"] == 20  # what is not averaged is the model's
    assert "averaged weights" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert main(["checkpoint", "list", str(run)]) == 0
    summary = {"monitor": {"name": "accuracy", "best": 0.95, "best_step": 15}}
    (run / "summary.json").write_text(json.dumps(summary))
    exported("--best")
    assert "0.95 at step 15, and its checkpoint is not kept" in capsys.readouterr().err


def test_what_best_cannot_mean_is_refused(run, checkpoint, tmp_path, capsys):
    to = str(tmp_path / "model.pt")
    for words, code, told in (
        ([str(run), to, "--metric", "min:loss"], 2, "belongs to --best"),
        ([str(run), to, "--best", "--metric", "loss"], 2, "must be min:METRIC or max:METRIC"),
        ([str(run), to, "--best", "--metric", "max:f1"], 1, "there are accuracy, loss"),
        ([str(run), to, "--ema", "--all"], 2, "leave out --ema"),
        ([str(checkpoint), to, "--best"], 2, "does not say which metric is better"),
        ([str(checkpoint), to, "--ema"], 2, "has no average of the weights"),
        ([str(tmp_path / "runs"), to], 1, "holds no checkpoint"),
    ):
        assert main(["checkpoint", "export", *words]) == code, words
        assert told in capsys.readouterr().err
    shutil.copytree(run / "checkpoints", run / "more")
    assert main(["checkpoint", "export", str(run), to]) == 1
    assert "checkpoints in checkpoints, more; name one" in capsys.readouterr().err


def test_weights_of_a_run_in_python(run):
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2))
    model.register_buffer("count", torch.tensor(0))
    for options, wanted in (
        ({}, 30.0), ({"best": True}, 20.0), ({"best": "min:accuracy"}, 10.0),
        ({"best": True, "ema": True}, 10.0),
    ):  # fmt: skip
        model.load_state_dict(load_weights(run, **options))
        assert model.w.tolist() == [wanted] * 2
    assert find_checkpoint(run, best=True).name.endswith("step-20")
    with pytest.raises(ConfigError, match="models are model"):
        load_weights(run, key="critic.model")


def test_export(checkpoint, tmp_path, capsys):
    one, two, three = tmp_path / "m.safetensors", tmp_path / "m.pt", tmp_path / "all.pt"
    assert main(["checkpoint", "export", str(checkpoint), str(one)]) == 0
    assert bits(load_file(one)) == bits(dict(sorted(STATE["model"].items())))
    assert main(["checkpoint", "export", str(tmp_path), str(two)]) == 0
    assert bits(torch.load(two)) == bits(STATE["model"])
    assert main(["checkpoint", "export", str(checkpoint), str(three), "--all"]) == 0
    assert torch.load(three)["array"].tolist() == [0, 1, 2]
    assert main(["checkpoint", "export", str(checkpoint), str(one), "--key", "optimizer/lr"]) == 0
    assert "left out" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(checkpoint), str(one), "--key", "modle"]) == 2
    assert "there is model, optimizer, array" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(checkpoint), str(tmp_path / "x.bin")]) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_imports_run_no_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Evil()}, "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt cannot be imported"):
        import_torch(Path("evil.pt"))
    assert not Path("evil").exists()
    torch.save(STATE["model"], "good.pt")
    assert main(["checkpoint", "import", "good.pt", "--to", "runs", "--step", "3"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "checkpoint-000001-step-3"
    assert bits(read_checkpoint(path)) == bits({"model": STATE["model"]})


def test_listing_needs_neither_torch_nor_mpi(checkpoint):
    code = (
        "import sys; from hpctrain.cli import main; "
        f"assert main(['checkpoint', 'verify', {str(checkpoint)!r}]) == 0; "
        "assert not {'torch', 'mpi4py'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_disk_that_is_full(tmp_path):
    """A real one, where the machine lets us make it."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)],
        capture_output=True,
        check=False,
        timeout=30,
    )
    if not mounted or mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        first = write_checkpoint(small, {"x": torch.ones(100)}, step=1)
        with pytest.raises(CheckpointError, match=r"No space left on device.*make room"):
            write_checkpoint(small, {"x": torch.ones(100_000)}, step=2)
        assert [entry.path for entry in list_checkpoints(small)] == [first]
        assert verify(first) == []
        assert sorted(small.iterdir()) == [first]
    finally:
        subprocess.run(["umount", str(small)], check=True, timeout=30)
