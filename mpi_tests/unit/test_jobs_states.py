"""How jobs are doing when the batch system says little: logs, restarts under new ids, sweeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.programs import Answer
from hpctrain.submit import render
from hpctrain.submit.ledger import Ledger, SubmittedJob
from hpctrain.submit.status import LogEnd, ask_states, read_end, runs_of
from mpi_tests.unit.jobs_kit import ask as make_request
from mpi_tests.unit.jobs_kit import site

START = "hpctrain job: 12, restart {} of at most 3\nsome output\n"
END = "hpctrain job: exit code {} after 61 s\n"


def silence(words, stdin):
    return None


def entry(folder: Path, job: str = "12", **more: object) -> SubmittedJob:
    fields = {"batch": "slurm", "name": "n", "site": "s", "directory": "/d", "script": "/d/s.sh"}
    fields |= {"log_dir": str(folder), "submitted": "2026-11-15T00:00:00Z"}
    return SubmittedJob(**{"job": job, **fields, **more})  # type: ignore[arg-type]


@pytest.fixture
def remember(tmp_path, monkeypatch):
    """Adds an entry to the ledger of the command line; no batch system is on PATH."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return Ledger(tmp_path / "state" / "hpctrain").add


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", LogEnd()),
        (START.format(0), LogEnd()),
        (START.format(0) + END.format(0), LogEnd(exit_code=0, elapsed_s=61)),
        (START.format(0) + END.format(3), LogEnd(exit_code=3, elapsed_s=61)),
        (START.format(0) + END.format(3) + START.format(1), LogEnd()),
        (
            START.format(0) + END.format(75) + "hpctrain job: requeued for restart 1 of 3\n",
            LogEnd(),
        ),
        (
            START.format(1) + END.format(75) + "hpctrain job: not run again: 1 restarts\n",
            LogEnd(exit_code=1, elapsed_s=61),
        ),
        (
            START.format(0) + END.format(137) + "hpctrain job: restart 1 of 3 is 13.server\n",
            LogEnd(exit_code=137, elapsed_s=61, next_job="13.server"),
        ),
        (START.format(0) + END.format(75) + "hpctrain job: restart 1 of 3 is -x\n", None),
    ],
)
def test_the_end_of_a_log_is_read(text, told):
    found = read_end(text)
    assert found == (told or LogEnd(exit_code=75, elapsed_s=61))


def test_a_job_that_slurm_has_forgotten_is_told_by_its_log(tmp_path, remember, capsys):
    (tmp_path / "n-12.out").write_text(START.format(0) + END.format(5))
    remember(entry(tmp_path))
    assert main(["job", "status", "--json", "12"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["exit_code"], row["elapsed"]) == ("FAILED", 5, "61 s")
    (tmp_path / "n-20_0.out").write_text(START.format(0) + END.format(0))
    remember(entry(tmp_path, "20", array_size=2))
    assert main(["job", "status", "--json", "20"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["job"], row["state"]) for row in rows] == [
        ("20_0", "COMPLETED"),
        ("20_1", "UNKNOWN"),
    ]
    (row,) = ask_states(entry(tmp_path, "20", array_size=2), silence, job="20_0")
    assert (row.job, row.state) == ("20_0", "COMPLETED")


def test_cancelling_what_has_ended_says_so(tmp_path, remember, capsys):
    (tmp_path / "n-12.out").write_text(START.format(0) + END.format(0))
    remember(entry(tmp_path))
    assert main(["job", "cancel", "12"]) == 0
    assert capsys.readouterr().out == "12 has ended already (COMPLETED); nothing was cancelled\n"
    remember(entry(tmp_path, "13"))
    for name in ("scancel", "scontrol"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho JobId=13 JobState=RUNNING\n")
        (tmp_path / "bin" / name).chmod(0o755)
    assert main(["job", "cancel", "13"]) == 0
    assert capsys.readouterr().out == "13 cancelled\n"


@pytest.mark.parametrize(
    ("batch", "ids", "logs"),
    [
        ("pbs", ["1.s", "2.s", "3.s"], ["1.s.OU", "2.s.OU", "3.s.OU"]),
        ("flux", ["f1", "ƒ2", "f3"], ["n-f1.out", "n-ƒ2.out", "n-f3.out"]),
    ],
)
def test_a_restart_under_a_new_id_is_followed(tmp_path, remember, capsys, batch, ids, logs):
    for restart, name in enumerate(logs):
        text = START.format(restart) + f"this is run {restart}\n"
        if restart < 2:
            text += END.format(75)
            text += f"hpctrain job: restart {restart + 1} of 3 is {ids[restart + 1]}\n"
        (tmp_path / name).write_text(text)
    made = entry(tmp_path, ids[0], batch=batch)
    assert [run.job for run in runs_of(made)] == ids
    asked = []

    def ask(words, stdin):
        asked.append(words[-1])
        job = json.dumps({"Jobs": {words[-1]: {"job_state": "R"}}})
        return Answer(code=0, out=job if batch == "pbs" else "RUN||5s|n\n", err="")

    (state,) = ask_states(made, ask)
    assert (state.job, state.state, state.restarts) == (ids[2], "RUNNING", 2)
    assert asked == [ids[2]]
    remember(made)
    assert main(["job", "logs", ids[0]]) == 0
    out = capsys.readouterr().out
    assert [out.index(f"this is run {restart}") for restart in range(3)] == sorted(
        out.index(f"this is run {restart}") for restart in range(3)
    )
    for name in ("qdel", "flux"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/cancelled\n')
        (tmp_path / "bin" / name).chmod(0o755)
    assert main(["job", "cancel", ids[0]]) == 0
    assert capsys.readouterr().out == f"{ids[2]}, its restart, cancelled\n"
    assert (tmp_path / "cancelled").read_text().split()[-1] == ids[2]


def test_the_table_of_a_sweep_tells_failed_nan_and_unfinished_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = (
        "import json, sys\n"
        "x, out = sys.argv[1:]\n"
        "if x == 'fails': sys.exit(3)\n"
        "if x == 'nothing': sys.exit(0)\n"
        "json.dump({'loss': float(x)}, open(out + '/result.json', 'w'))\n"
    )
    command = ["--", sys.executable, "-c", code, "{x}", "{run_dir}"]
    assert main(["sweep", "run", "--grid", "x=2,nan,fails,nothing,1,3,4", *command]) == 1
    for index in (5, 6):  # as if nobody had come to the last, and the one before was killed
        for path in (tmp_path / "sweep" / f"000{index}").iterdir():
            if index == 6 or path.name != "log.txt":
                path.unlink()
    capsys.readouterr()
    assert main(["sweep", "table", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    states = {row["x"]: row["state"] for row in rows}
    assert states == {
        "1": "finished",
        "2": "finished",
        "nan": "NaN",
        "fails": "failed (exit code 3)",
        "nothing": "no loss",
        "3": "unfinished",
        "4": "not started",
    }
    assert [row["x"] for row in rows][:2] == ["1", "2"]
    assert main(["sweep", "table"]) == 0
    assert capsys.readouterr().out.split()[:4] == ["index", "x", "loss", "state"]
    assert main(["sweep", "run", "--grid", "state=1,2", "--", "echo", "{state}"]) == 2


def test_points_without_a_word_of_their_own_are_told_by_their_jobs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "bin").mkdir()
    rows = [("0", "FAILED", "1:0"), ("1", "RUNNING", "0:0"), ("2", "COMPLETED", "0:0")]
    rows += [("3", "TIMEOUT", "0:0"), ("[4-5]", "PENDING", "0:0")]
    shown = "\n".join(
        f"JobId=9 ArrayJobId=7 ArrayTaskId={task} JobState={state} ExitCode={code}"
        for task, state, code in rows
    )
    for name, text in {"sbatch": "echo 7", "scontrol": f"echo '{shown}'"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    words = ["--time", "1h", "--mpi", "pmix", "--", "python", "{x}", "{run_dir}"]
    assert main(["sweep", "submit", "--grid", "x=a,b,c,d,e,f", *words]) == 0
    assert capsys.readouterr().out == "7\n"
    assert main(["sweep", "table", "--json"]) == 0
    states = {row["x"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert states == {
        "a": "failed (FAILED, exit code 1)",
        "b": "running",
        "c": "no loss",
        "d": "failed (TIMEOUT, exit code 0)",
        "e": "pending",
        "f": "pending",
    }


@pytest.mark.parametrize("expression", ["[a|b]", "(intel&gpu)|amd", "[rack1*2&rack2*4]", "a&!b"])
def test_constraints_are_expressions(expression):
    text = render(make_request(constraint=expression), site())
    assert f"\n#SBATCH --constraint={expression}\n" in text


@pytest.mark.parametrize("wrong", ["a b", "$x", "a;b", "`x`", "a#b", ""])
def test_what_is_no_constraint_is_refused(wrong):
    with pytest.raises(ConfigError, match="constraint"):
        make_request(constraint=wrong)
