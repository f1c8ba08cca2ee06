"""What a submission leaves behind: its own script, its id, and nothing where it was refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.errors import JobError
from hpctrain.submit.ledger import Ledger, SubmittedJob
from mpi_tests.unit.jobs_kit import Recorder

ROOT = Path(__file__).parents[2]
# Keeps what it was given, as Slurm does, and gives every job another id.
SBATCH = '#!/bin/bash\ncp "${@: -1}" "$RECORD.$$"\necho "$$"\n'
SUBMIT = ("job", "submit", "--quiet", "--time", "1h", "--mpi", "pmix", "--", "python")


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path)


def start(recorder: Recorder, *words: str) -> subprocess.Popen[str]:
    env = recorder.environment(
        XDG_STATE_HOME=str(recorder.work / "state"), PYTHONPATH=str(ROOT), HOME=str(recorder.work)
    )
    return subprocess.Popen(
        [sys.executable, "-m", "hpctrain", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=recorder.work,
        env=env,
    )


def hpctrain(recorder: Recorder, *words: str) -> tuple[int, str, str]:
    process = start(recorder, *words)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def remembered(recorder: Recorder) -> list[SubmittedJob]:
    return Ledger(recorder.work / "state" / "hpctrain").entries()


def test_of_32_submissions_at_once_each_job_runs_its_own_command(recorder):
    (recorder.bin / "sbatch").write_text(SBATCH)
    started = [start(recorder, *SUBMIT, f"point-{index}.py") for index in range(32)]
    ids = {}
    for index, process in enumerate(started):
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        ids[out.strip()] = f"hpc_command=(python point-{index}.py)\n"
    assert len(ids) == 32
    for job, command in ids.items():
        assert command in Path(f"{recorder.record}.{job}").read_text()
    rows = {entry.job: entry for entry in remembered(recorder)}
    assert rows.keys() == ids.keys()
    assert len({entry.script for entry in rows.values()}) == 32
    for job, entry in rows.items():  # what is kept beside the logs is what was handed over
        assert Path(entry.script).read_text() == Path(f"{recorder.record}.{job}").read_text()


def test_a_refused_submission_leaves_nothing(recorder):
    (recorder.work / "logs").rmdir()
    before = sorted(recorder.work.iterdir())
    (recorder.bin / "sbatch").write_text("#!/bin/sh\necho invalid account >&2\nexit 1\n")
    for more in ([], ["--log-dir", "deep/er/logs"]):
        code, out, err = hpctrain(recorder, *SUBMIT[:-2], *more, *SUBMIT[-2:], "x.py")
        assert (code, out) == (1, "")
        assert "invalid account" in err
        assert sorted(recorder.work.iterdir()) == before
    sweep = ["sweep", "submit", "--grid", "x=1,2", "--time", "1h", "--", "python", "{x}"]
    assert hpctrain(recorder, *sweep)[0] == 1
    assert sorted(recorder.work.iterdir()) == before
    (recorder.bin / "sbatch").write_text("#!/bin/sh\necho 4711\n")
    assert hpctrain(recorder, *sweep)[0] == 0
    (recorder.bin / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    assert hpctrain(recorder, *sweep)[0] == 1
    assert (recorder.work / "sweep" / "0001").is_dir()  # the job that waits needs it


def test_a_folder_of_others_stays_when_a_submission_is_refused(recorder):
    (recorder.work / "logs" / "mine.out").write_text("kept")
    (recorder.bin / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    assert hpctrain(recorder, *SUBMIT, "x.py")[0] == 1
    assert [path.name for path in (recorder.work / "logs").iterdir()] == ["mine.out"]


def test_an_answer_without_an_id_keeps_the_script_of_a_job_that_may_be_queued(recorder):
    (recorder.bin / "sbatch").write_text("#!/bin/sh\necho hello\n")
    code, _, err = hpctrain(recorder, *SUBMIT, "x.py")
    assert code == 1
    assert "no job id" in err
    assert len(list((recorder.work / "logs").glob("*.sh"))) == 1


@pytest.mark.parametrize("damage", ["text", "folder"])
def test_an_unreadable_list_of_jobs_loses_no_id(recorder, damage):
    home = recorder.work / "state" / "hpctrain"
    home.mkdir(parents=True)
    if damage == "text":
        (home / "jobs.json").write_text("{")
    else:
        (home / "jobs.json").mkdir()
    code, out, err = hpctrain(recorder, *SUBMIT, "x.py")
    assert (code, out) == (0, "4711\n"), err
    assert "job 4711 was submitted; it is recorded in" in err
    assert [entry.job for entry in remembered(recorder)] == ["4711"]
    code, out, err = hpctrain(recorder, "job", "status", "4711")
    assert code == 0
    assert "4711" in out
    assert "cannot be read" in err
    if damage == "text":
        assert (home / "jobs.json").read_text() == "{"  # somebody may mend it


def test_without_any_place_to_remember_it_the_id_is_beside_the_script(recorder):
    (recorder.work / "state").write_text("no folder")
    code, out, err = hpctrain(recorder, *SUBMIT, "x.py")
    assert (code, out) == (0, "4711\n"), err
    (kept,) = (recorder.work / "logs").glob("*.json")
    assert json.loads(kept.read_text())["job"] == "4711"


def test_ids_of_a_chain_are_printed_although_its_second_job_is_refused(recorder):
    once = '#!/bin/bash\n[ -e "$RECORD.once" ] && exit 1\n: >"$RECORD.once"\necho 4711\n'
    (recorder.bin / "sbatch").write_text(once)
    code, out, err = hpctrain(recorder, *SUBMIT[:-2], "--chain", "3", *SUBMIT[-2:], "x.py")
    assert (code, out) == (1, "4711\n"), err
    assert [entry.job for entry in remembered(recorder)] == ["4711"]
    assert len(list((recorder.work / "logs").glob("*.sh"))) == 1


def test_what_was_put_aside_is_listed_in_its_place(tmp_path):
    ledger = Ledger(tmp_path)
    fields = {"batch": "slurm", "name": "n", "site": "s", "directory": "/d", "script": "/d/s.sh"}
    for hour in (1, 2, 3):
        made = SubmittedJob(
            job=str(hour), log_dir="/d", submitted=f"2026-11-15T0{hour}:00:00Z", **fields
        )
        if hour == 2:
            ledger.aside.mkdir()
            kept = {name: getattr(made, name) for name in SubmittedJob.__dataclass_fields__}
            (ledger.aside / "1.json").write_text(json.dumps(kept))
        else:
            ledger.add(made)
    assert [entry.job for entry in ledger.entries()] == ["1", "2", "3"]
    (ledger.aside / "1.json").unlink()
    ledger.path.write_text("{")
    with pytest.raises(JobError, match="move it away"):
        ledger.entries()
