"""Submission, status and logs: argument vectors, answers, and what is remembered.

For PBS, LSF and Flux the programs only record how they are called: that proves the rendering and
the arguments, not those batch systems.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.batch_systems import JobState, ask_program, find_system
from hpctrain.batch_systems.slurm import read_sacct, read_scontrol
from hpctrain.cli import main
from hpctrain.errors import ConfigError, JobError
from hpctrain.programs import Answer
from hpctrain.submit.ledger import Ledger, SubmittedJob
from hpctrain.submit.status import follow, last_lines, log_paths
from mpi_tests.unit.jobs_kit import Recorder

ROOT = Path(__file__).parents[2]


def entry(job: str = "12", **more: object) -> SubmittedJob:
    fields = {"batch": "slurm", "name": "n", "site": "s", "directory": "/d", "script": "/d/s.sh"}
    fields |= {"log_dir": "/d/logs", "submitted": "2026-11-15T00:00:00Z"}
    return SubmittedJob(**{"job": job, **fields, **more})  # type: ignore[arg-type]


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path)


def hpctrain(recorder: Recorder, *words: str) -> subprocess.CompletedProcess[str]:
    env = recorder.environment(
        XDG_STATE_HOME=str(recorder.work / "state"), PYTHONPATH=str(ROOT), HOME=str(recorder.work)
    )
    return subprocess.run(
        [sys.executable, "-m", "hpctrain", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=recorder.work,
        env=env,
    )


@pytest.mark.parametrize(
    ("site", "more", "job", "called"),
    [
        ("slurm", ["--mpi", "pmix"], "4711", ["sbatch", "--parsable", "SCRIPT"]),
        ("pbs", ["--requeue", "2"], "4711.server", ["qsub", "SCRIPT"]),
        ("lsf", ["--account", "p"], "4711", ["bsub"]),
        ("flux", ["--requeue", "2"], "f4711", ["flux", "batch", "SCRIPT"]),
    ],
)
def test_submission_hands_over_an_argument_list(recorder, site, more, job, called):
    words = ["--site", site, "--time", "2h", "--name", "try", *more, "--", "python", "a b.py"]
    done = hpctrain(recorder, "job", "submit", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{job}\n"
    (script,) = (recorder.work / "logs").glob("try-*.sh")
    assert recorder.calls() == [[word.replace("SCRIPT", str(script)) for word in called]]
    text = script.read_text()
    assert text in done.stderr  # it is shown
    assert "python 'a b.py'" in text
    assert script.stat().st_mode & 0o111
    if site == "lsf":
        assert Path(f"{recorder.record}.stdin").read_text() == text
    table = json.loads((recorder.work / "state" / "hpctrain" / "jobs.json").read_text())
    (row,) = table["jobs"]
    assert (row["job"], row["batch"], row["script"]) == (job, site, str(script))
    for action, expected in (
        ("cancel", {"slurm": "scancel", "pbs": "qdel", "lsf": "bkill", "flux": "flux"}[site]),
        ("status", {"slurm": "scontrol", "pbs": "qstat", "lsf": "bjobs", "flux": "flux"}[site]),
    ):
        recorder.record.unlink()
        done = hpctrain(recorder, "job", action, job)
        assert done.returncode == 0, done.stderr
        # What has ended is not cancelled, so that is asked first.
        call = recorder.calls()[-1 if action == "cancel" else 0]
        assert (call[0], call[-1]) == (expected, job)
    assert "UNKNOWN" in done.stdout


def test_flux_gets_a_job_for_each_task(recorder):
    words = ["--site", "flux", "--time", "2h", "--array", "3", "--json", "-q", "--", "python", "x"]
    done = hpctrain(recorder, "job", "submit", *words)
    assert json.loads(done.stdout) == {"jobs": ["f4711"] * 3}
    assert done.stderr == ""
    given = [call[2] for call in recorder.calls()]
    assert given == [f"--env=HPCTRAIN_ARRAY_INDEX={index}" for index in range(3)]


def test_a_chain_names_the_job_before(recorder):
    words = ["--site", "slurm", "--mpi", "pmix", "--time", "2h", "--chain", "3"]
    words += ["--", "python", "x.py"]
    assert hpctrain(recorder, "job", "submit", *words).stdout.split() == ["4711"] * 3
    scripts = [Path(call[-1]).read_text() for call in recorder.calls()]
    assert ["afterok:4711" in script for script in scripts] == [False, True, True]
    recorder.record.unlink()
    words = ["--site", "pbs", "--time", "2h", "--chain", "2", "--requeue", "1", "--", "python", "x"]
    assert "use either those or --requeue" in hpctrain(recorder, "job", "submit", *words).stderr
    assert recorder.calls() == []  # not even the first was handed over


def test_what_the_batch_system_refuses_is_told(recorder):
    (recorder.bin / "sbatch").write_text("#!/bin/sh\necho invalid account >&2\nexit 1\n")
    words = ["job", "submit", "--time", "2h", "--", "python", "x.py"]
    done = hpctrain(recorder, *words)
    assert done.returncode == 1
    assert "sbatch refused" in done.stderr
    assert "invalid account" in done.stderr
    (recorder.bin / "sbatch").write_text("#!/bin/sh\necho hello\n")
    assert "no job id" in hpctrain(recorder, *words).stderr
    (recorder.bin / "sbatch").unlink()
    missing = ask_program(["/no/such/sbatch"])
    assert missing is None
    assert not (recorder.work / "state" / "hpctrain" / "jobs.json").exists()


SCONTROL = (
    "JobId=12 ArrayJobId=11 ArrayTaskId=3 JobName=a b UserId=u(1) JobState=FAILED Reason=NonZero "
    "Requeue=1 Restarts=2 ExitCode=5:0 RunTime=00:01:02 StdOut=/logs/a-11_3.out Power=\n"
)


def test_slurm_is_asked_with_and_without_accounting():
    asked: list[str] = []

    def answer(scontrol: Answer | None, sacct: Answer | None):
        def ask(words, stdin):
            asked.append(words[0])
            return {"scontrol": scontrol, "sacct": sacct}[words[0]]

        return find_system("slurm").ask_state("12", ask)

    no = Answer(code=1, out="", err="Slurm accounting storage is disabled")
    known = Answer(code=0, out=SCONTROL, err="")
    past = Answer(code=0, out="12|job|CANCELLED by 0|0:15|00:00:03\n", err="")
    (state,) = answer(known, no)
    assert state == JobState(
        job="11_3",
        name="a",
        state="FAILED",
        exit_code=5,
        elapsed="00:01:02",
        restarts=2,
        reason="NonZero",
        log="/logs/a-11_3.out",
    )
    (state,) = answer(no, past)
    assert (state.state, state.exit_code, state.is_final) == ("CANCELLED", 143, True)
    assert answer(None, None) == []
    assert asked == ["scontrol", "scontrol", "sacct", "scontrol", "sacct"]
    assert read_sacct("") == read_scontrol("No jobs\n") == []


@pytest.mark.parametrize(
    ("batch", "said", "state", "code"),
    [
        ("pbs", '{"Jobs": {"1.s": {"job_state": "F", "Exit_status": 3}}}', "FAILED", 3),
        ("pbs", '{"Jobs": {"1.s": {"job_state": "F", "Exit_status": 271}}}', "CANCELLED", 271),
        ("pbs", '{"Jobs": {"1.s": {"job_state": "R"}}}', "RUNNING", None),
        ("lsf", '{"RECORDS": [{"JOBID": "1", "STAT": "DONE"}]}', "COMPLETED", 0),
        ("lsf", '{"RECORDS": [{"JOBID": "1", "STAT": "EXIT", "EXIT_CODE": "5"}]}', "FAILED", 5),
        ("flux", "CANCELED|-128|1.5s|n\n", "CANCELLED", -128),
        ("flux", "RUN||0.5s|n\n", "RUNNING", None),
    ],
)
def test_the_others_tell_the_same_words(batch, said, state, code):
    (found,) = find_system(batch).ask_state("1", lambda *_: Answer(code=0, out=said, err=""))
    assert (found.state, found.exit_code) == (state, code)
    assert find_system(batch).ask_state("1", lambda *_: None) == []
    if batch != "flux":
        broken = Answer(code=0, out="{", err="")
        assert find_system(batch).ask_state("1", lambda *_: broken) == []


@pytest.mark.parametrize(
    ("batch", "said"),
    [("slurm", ""), ("slurm", "12;c;d"), ("pbs", "no"), ("lsf", "Job"), ("flux", "")],
)
def test_an_answer_without_an_id_is_an_error(batch, said):
    with pytest.raises(JobError, match="no job id"):
        find_system(batch).read_id(said)
    assert find_system("slurm").read_id("welcome\n12;cluster\n") == "12"


def add_some(home: Path, start: int) -> None:
    for number in range(start, start + 5):
        Ledger(home).add(entry(str(number)))


def test_jobs_are_remembered_by_many_at_once(tmp_path):
    workers = [
        multiprocessing.get_context("spawn").Process(target=add_some, args=(tmp_path, 5 * n))
        for n in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    ledger = Ledger(tmp_path)
    assert sorted(int(row.job) for row in ledger.entries()) == list(range(15))
    ledger.add(entry("77", array_size=4))
    assert ledger.find(None) == ledger.find("77_3") == ledger.find("77")
    for job, task, batch in (("88[].server", "88[3].server", "pbs"), ("99", "99[3]", "lsf")):
        ledger.add(entry(job, array_size=4, batch=batch))
        assert ledger.find(task) == ledger.find(job)
    assert ledger.find("5000") is None
    ledger.path.write_text("{")
    with pytest.raises(JobError, match="move it away"):
        ledger.entries()


def test_a_log_is_followed_to_the_end_of_its_job(tmp_path):
    made = entry(log_dir=str(tmp_path))
    (path,) = log_paths(made)
    with pytest.raises(JobError, match="may not have started"):
        last_lines(path, 3)
    states = iter(["RUNNING", "", "RUNNING", "COMPLETED"])  # once the controller is away
    pieces: list[str] = []

    def ask(words, stdin):
        if words[0] == "sacct":
            return None
        state = next(states)
        with path.open("a") as log:
            log.write("é more\n")
        return Answer(code=0 if state else 1, out=f"JobId=12 JobState={state}\n", err="")

    import hpctrain.submit.status as following

    before = following._ASK_EVERY_S, following._POLL_S
    following._ASK_EVERY_S, following._POLL_S = 0.01, 0.01
    try:
        follow(made, path, pieces.append, ask)
    finally:
        following._ASK_EVERY_S, following._POLL_S = before
    assert "".join(pieces) == "é more\n" * 4
    assert last_lines(path, 1) == "é more\n"
    assert last_lines(path, 0) == ""
    tasks = log_paths(entry("5", array_size=2))
    assert [task.name for task in tasks] == ["n-5_0.out", "n-5_1.out"]
    assert log_paths(entry("5[].s", batch="pbs", array_size=2))[1].name == "5[1].s.OU"
    assert log_paths(entry("5", batch="lsf", array_size=2))[0].name == "n-5_1.out"
    (one,) = log_paths(entry("5", batch="lsf", array_size=2), job="5[2]")
    assert one.name == "n-5_2.out"
    assert [p.name for p in log_paths(entry("5", array_size=2), job="5_1")] == ["n-5_1.out"]
    with pytest.raises(ConfigError, match="has tasks 0 to 1"):
        log_paths(entry("5", array_size=2), job="5_2")
    with pytest.raises(ConfigError, match="is not an array"):
        log_paths(entry("5"), 0)


def test_the_logs_of_an_array_are_shown_as_far_as_they_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    Ledger(tmp_path / "hpctrain").add(entry("5", log_dir=str(tmp_path), array_size=3))
    (tmp_path / "n-5_1.out").write_text("here\n")
    assert main(["job", "logs", "5"]) == 0
    assert capsys.readouterr().out.count("(there is no log yet)") == 2
    assert main(["job", "logs", "5_1"]) == 0
    assert capsys.readouterr().out == "here\n"
    assert main(["job", "logs", "5_0"]) == 1
    assert main(["job", "logs", "5_7"]) == 2
