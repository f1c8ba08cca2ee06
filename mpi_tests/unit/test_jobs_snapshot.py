"""A copy of the code at submission: what is in it, and that the job runs it and nothing newer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.batch_systems import find_system
from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.programs import Answer
from hpctrain.submit.snapshot import run_snapshot, take_snapshot
from mpi_tests.unit.jobs_kit import ask as make_request

SCRIPT = "import helper, pathlib\nprint(helper.NAME, pathlib.Path('data.txt').read_text())\n"


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A folder of code, and where one is."""
    folder = tmp_path / "code"
    (folder / "sub").mkdir(parents=True)
    for name in ("train.py", "sub/train.py"):
        (folder / name).write_text(SCRIPT)
    for name in ("helper.py", "sub/helper.py"):
        (folder / name).write_text("NAME = 'submitted'\n")
    (folder / "conf.toml").write_text("a = 1\n")
    (folder / "data.txt").write_text("old data")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def edit(folder: Path) -> None:
    """What goes on in the folder while the job waits."""
    for name in ("helper.py", "sub/helper.py"):
        (folder / name).write_text("NAME = 'edited'\n")
    (folder / "data.txt").write_text("new data")


def run(request) -> str:
    (command,) = request.commands
    words = [sys.executable, *command[1:]] if command[0] == "python" else list(command)
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env=kept | dict(request.environment)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "command", [("python", "train.py"), ("python", "sub/train.py"), ("python", "-m", "train")]
)
def test_the_job_runs_what_was_submitted_where_it_was_submitted(code, tmp_path, command):
    request = make_request(commands=(command,))
    snapshot = take_snapshot(code, tmp_path / "logs" / "x.code")
    made = run_snapshot(request, snapshot, {}, prefix=tmp_path)
    edit(code)
    assert run(made) == "submitted new data"
    assert run(request) == "edited new data"


def test_python_paths_and_editable_installs_lead_into_the_copy(code, tmp_path):
    (code / "src").mkdir()
    (code / "src" / "mine.py").write_text("NAME = 'submitted'\n")
    (code / "main.py").write_text("import mine\nprint(mine.NAME)\n")
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    snapshot = take_snapshot(code, tmp_path / "x.code")
    (code / "src" / "mine.py").write_text("NAME = 'edited'\n")
    request = make_request(commands=(("python", "main.py"),))
    for environ, prefix in (
        ({"PYTHONPATH": "/elsewhere:src"}, tmp_path),
        ({"PYTHONPATH": str(code / "src")}, tmp_path),
        ({}, tmp_path / "venv"),
    ):
        (packages / "mine.pth").write_text(f"{code / 'src'}\n")
        made = run_snapshot(request, snapshot, environ, prefix=prefix)
        assert run(made) == "submitted"
    given = run_snapshot(request, snapshot, {"PYTHONPATH": "/elsewhere:src"}, prefix=tmp_path)
    assert given.environment["PYTHONPATH"] == f"/elsewhere:{snapshot.folder / 'src'}"


def test_words_that_name_files_of_the_copy_are_moved_and_others_stay(code, tmp_path):
    snapshot = take_snapshot(code, tmp_path / "x.code")
    words = ("hpctrain", "train", "conf.toml", "--set=conf.toml", "--out", "runs/one", "other.toml")
    words += (str(code / "train.py"), "../code/train.py", "conf", "")
    made = run_snapshot(make_request(commands=(words,)), snapshot, {}, prefix=tmp_path)
    there = snapshot.folder
    assert made.commands[0] == (
        *("hpctrain", "train", str(there / "conf.toml"), f"--set={there / 'conf.toml'}"),
        *("--out", "runs/one", "other.toml", str(there / "train.py"), str(there / "train.py")),
        *("conf", ""),
    )
    assert made.environment["PYTHONSAFEPATH"] == "1"
    assert str(there) in made.snapshot
    with pytest.raises(ConfigError, match="no word of the command names a file"):
        run_snapshot(make_request(commands=(("srun", "x"),)), snapshot, {}, prefix=tmp_path)


def test_in_a_work_tree_it_is_what_git_tracks_and_small_new_files(code, tmp_path):
    (code / ".gitignore").write_text("ignored.py\nlogs/\n")
    (code / "tracked.bin").write_bytes(bytes(2 << 20))
    git(code, "init")
    git(code, "add", ".")
    git(code, "commit", "-m", "first")
    (code / "ignored.py").write_text("x")
    (code / "new.py").write_text("x")
    (code / "large.npy").write_bytes(bytes(2 << 20))
    (code / "helper.py").unlink()
    snapshot = take_snapshot(code, code / "runs" / "x.code")
    assert snapshot.files >= {"train.py", "sub/train.py", "tracked.bin", "new.py", ".gitignore"}
    assert not snapshot.files & {"ignored.py", "large.npy", "helper.py"}
    assert "with changes" in snapshot.title
    again = take_snapshot(code, code / "runs" / "y.code")  # not the copies themselves
    assert not any(name.startswith("runs/") for name in again.files)
    assert snapshot.files == {
        str(path.relative_to(snapshot.folder))
        for path in snapshot.folder.rglob("*")
        if path.is_file()
    }


def test_elsewhere_it_is_small_files_without_environments(code, tmp_path):
    (code / "env").mkdir()
    (code / "env" / "pyvenv.cfg").write_text("x")
    (code / ".hidden").mkdir()
    (code / ".hidden" / "x.py").write_text("x")
    (code / "large.npy").write_bytes(bytes(2 << 20))
    snapshot = take_snapshot(code, tmp_path / "x.code")
    assert snapshot.files == {
        *("train.py", "sub/train.py", "helper.py", "sub/helper.py", "conf.toml", "data.txt")
    }
    assert "no git work tree" in snapshot.title
    take_snapshot(code, code / "a.code")  # logs in the folder itself
    assert take_snapshot(code, code / "b.code").files == snapshot.files
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="submit from the folder of the code"):
        take_snapshot(tmp_path / "empty", tmp_path / "z.code")


def test_submission_makes_one_copy_for_a_chain_and_none_where_it_is_refused(
    code, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    words = ["job", "submit", "--quiet", "--mpi", "pmix", "--time", "1h", "--snapshot"]
    words += ["--chain", "2", "--", "python", "train.py"]
    assert main(words) == 1
    assert not (code / "logs").exists()
    sbatch.write_text("#!/bin/sh\necho 4711\n")
    assert main(words) == 0
    (copy,) = (code / "logs").glob("*.code")
    scripts = list((code / "logs").glob("*.sh"))
    assert len(scripts) == 2
    for script in scripts:
        text = script.read_text()
        assert f"hpc_command=(python {copy}/train.py)" in text
        assert f"code: {copy}" in text
    assert "runs a copy of the code" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "config", "why"),
    [
        ("slurm 25.11.1", "SlurmctldParameters = enable_expedited_requeue", None),
        ("slurm 26.05.0", "SlurmctldParameters = x,enable_expedited_requeue", None),
        ("slurm 25.11.0", "SlurmctldParameters = (null)", "has not enabled it"),
        ("slurm-wlm 22.05.8", "", "needs Slurm 25.11"),
        ("", "", "needs Slurm 25.11"),
    ],
)
def test_expedited_restarts_are_asked_of_a_slurm_that_has_them(version, config, why):
    said = {"sbatch": version, "scontrol": config}
    found = find_system("slurm").why_no_expedite(
        lambda words, _: Answer(code=0, out=said[words[0]], err="")
    )
    assert found is None if why is None else why in found
    assert find_system("slurm").why_no_expedite(lambda *_: None) is None


def test_an_old_slurm_gets_the_usual_restart_and_that_is_said(tmp_path, monkeypatch, capsys):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho slurm 24.05.1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["job", "render", "--mpi", "pmix", "--time", "1h", "--requeue", "2", "--expedite"]
    assert main([*words, "--", "x"]) == 0
    out, err = capsys.readouterr()
    assert "#SBATCH --requeue\n" in out
    assert "restarts are not expedited" in err
    sbatch.write_text("#!/bin/sh\necho slurm 25.11.1\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho enable_expedited_requeue\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert main([*words, "--", "x"]) == 0
    assert "#SBATCH --requeue=expedite\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--requeue N"):
        make_request(expedite=True)
    assert main(["job", "render", "--site", "lsf", "--account", "p", *words[4:], "--", "x"]) == 2
