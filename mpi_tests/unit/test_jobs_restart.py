"""Restarts after failures: which exit codes, how often, on which nodes, and when no more.

The batch systems only record how they are called; `mpi_tests/launch` has them on a real Slurm.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from hpctrain.batch_systems import templates
from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.exit_codes import DIED, REQUEUE, TIMED_OUT
from hpctrain.submit import render
from hpctrain.world.launcher import detect
from hpctrain.world.notes import note_checkpoint, note_exit, note_failed_hosts
from mpi_tests.unit.jobs_kit import Recorder, ask, site

# What ranks would say: the notes of hpctrain.world.notes.
TEMPLATES = {name: each for name, each in templates().items() if each.suffix == ".sh"}
LAUNCHER = """#!/bin/bash
printf '%s\\0' "$#" "${0##*/}" "$@" >>"$RECORD"
case " $* " in
    *' train.py '*)
        [ -z "${SAVED-}" ] || echo "$SAVED" >"$HPCTRAIN_NOTES/checkpoint-1"
        [ -z "${TOLD-}" ] || echo "$TOLD" >"$HPCTRAIN_NOTES/code"
        [ -z "${FAILED-}" ] || printf '%s\\n' $FAILED >"$HPCTRAIN_NOTES/failed"
        exit "$FAKE_CODE" ;;
    *' getattr '*) echo "$FLUX_ID" ;;
    *' batch '*) echo f4712 ;;
esac
"""
SCONTROL = """#!/bin/bash
printf '%s\\0' "$#" "${0##*/}" "$@" >>"$RECORD"
case "$*" in
    'show hostnames '*) tr , '\\n' <<<"$3" ;;
    *'show job'*) echo "JobId=7 JobState=RUNNING ExcNodeList=${EXCLUDED:-(null)} NodeList=n1,n2" ;;
esac
"""
FIRST = "7.server"
SINFO = "#!/bin/bash\nprintf '%s\\n' $PARTITION_NODES\n"


@pytest.fixture
def recorder(tmp_path):
    made = Recorder(tmp_path)
    for launcher in ("srun", "mpirun", "mpiexec", "jsrun", "flux"):
        (made.bin / launcher).write_text(LAUNCHER)
    (made.bin / "scontrol").write_text(SCONTROL)
    (made.bin / "sinfo").write_text(SINFO)
    return made


def script_for(template: str, **more: object) -> str:
    batch = TEMPLATES[template].batch
    fields = {"template": template, "num_nodes": 2, "ranks_per_node": 1, "max_requeues": 5}
    fields["gpus_per_node"] = 0
    fields |= {"account": "p", "script": "/scripts/job.sh"}
    if TEMPLATES[template].needs_image:
        fields["image"] = "x.sif"
    return render(ask(**fields | {"commands": (("python", "train.py"),)} | more), site(batch))


def run(recorder: Recorder, script: str, code: int, restart: int = 0, **more: str):
    """One run of the job, which the batch system has started so often before."""
    nodes = {"SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_PARTITION": "p"}
    nodes |= {"PARTITION_NODES": "n1 n2 n3 n4", "FLUX_ID": f"f{restart}" if restart else FIRST}
    counts = {"SLURM_RESTART_COUNT": str(restart), "HPCTRAIN_RESTARTS": str(restart)}
    first = {"HPCTRAIN_FIRST_JOB": FIRST} if restart else {}
    return recorder.run(script, FAKE_CODE=str(code), **{**nodes, **counts, **first, **more})


def again(recorder: Recorder, done: subprocess.CompletedProcess[str], template: str) -> bool:
    """Whether the batch system was asked for another run."""
    calls = [" ".join(call) for call in recorder.calls()]
    batch = TEMPLATES[template].batch
    if batch == "lsf":
        return done.returncode in (REQUEUE, TIMED_OUT, DIED)
    asked = {"slurm": "scontrol requeue", "pbs": "qsub", "flux": "flux --parent batch"}[batch]
    return any(call.startswith(asked) for call in calls)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("code", [DIED, TIMED_OUT])
def test_a_job_that_advances_is_run_again(recorder, template, code):
    script = script_for(template)
    for restart in range(3):
        done = run(recorder, script, code, restart, SAVED=f"{10 * restart} runs/one")
        assert again(recorder, done, template), done.stdout + done.stderr
    done = run(recorder, script, code, 5, SAVED="50 runs/one")
    if template != "lsf-jsrun":  # which counts by itself
        assert not again(recorder, done, template)
        assert "not run again: 5 restarts were allowed" in done.stdout


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("code", [DIED, REQUEUE])
def test_a_job_whose_checkpoints_do_not_advance_is_stopped(recorder, template, code):
    script = script_for(template)
    assert again(recorder, run(recorder, script, code, 0, SAVED="10 runs/one"), template)
    done = run(recorder, script, code, 1, SAVED="10 runs/one")
    assert not again(recorder, done, template), done.stdout
    assert "no new checkpoint since the last restart (10 runs/one)" in done.stdout
    by_code = code == REQUEUE or template == "lsf-jsrun"  # such a code would be requeued for ever
    assert done.returncode == (1 if by_code else code)
    left = [path.name for path in (recorder.work / "logs").iterdir()]
    assert left == []  # nothing is to come any more


@pytest.mark.parametrize("template", TEMPLATES)
def test_without_checkpoints_only_the_promise_of_75_is_believed_more_than_once(recorder, template):
    script = script_for(template)
    for restart in range(3):
        assert again(recorder, run(recorder, script, REQUEUE, restart), template)


def test_a_crash_before_any_checkpoint_is_tried_twice(recorder):
    script = script_for("slurm-srun")
    assert again(recorder, run(recorder, script, DIED, 0), "slurm-srun")
    done = run(recorder, script, DIED, 1)
    assert not again(recorder, done, "slurm-srun")
    assert "none was ever reported" in done.stdout
    assert done.returncode == DIED


@pytest.mark.parametrize("code", [1, 2, 134, 143])
def test_other_exit_codes_are_not_restarted(recorder, code):
    done = run(recorder, script_for("slurm-srun"), code)
    assert done.returncode == code
    assert not again(recorder, done, "slurm-srun")


def test_the_codes_can_be_chosen(recorder, capsys):
    script = script_for("slurm-srun", restart_on=(134,))
    assert again(recorder, run(recorder, script, 134), "slurm-srun")
    recorder.record.unlink()
    assert not again(recorder, run(recorder, script, DIED), "slurm-srun")
    assert again(recorder, run(recorder, script, REQUEUE), "slurm-srun")
    assert '#BSUB -Q "75 134"' in script_for("lsf-jsrun", restart_on=(134,))
    words = ["job", "render", "--mpi", "pmix", "--time", "1h", "--requeue", "2"]
    assert main([*words, "--requeue-on", "none", "--", "x"]) == 0
    assert "\n    75)\n" in capsys.readouterr().out
    for wrong in ("0", "256", "a", "1,,2", "-1"):
        assert main([*words, f"--requeue-on={wrong}", "--", "x"]) == 2
    with pytest.raises(ConfigError, match="1 to 255"):
        ask(restart_on=(300,))


def test_the_code_of_the_rank_that_ended_first_counts(recorder):
    """Hydra answers 255, 9 or 7 for a killed rank, and others for an exception."""
    script = script_for("slurm-mpirun", mpi="mpich")
    done = run(recorder, script, 255, TOLD=str(DIED))
    assert "exit code 137 after" in done.stdout
    assert again(recorder, done, "slurm-mpirun")
    done = run(recorder, script, DIED, 1, TOLD="1", SAVED="5 x")
    assert done.returncode == 1
    assert not again(recorder, done, "slurm-mpirun")
    assert run(recorder, script, 0, 1, TOLD="1").returncode == 0  # all went well in the end


HYDRA = """#!/bin/bash
cat >&2 <<'END'
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 24842 RUNNING AT n2
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
END
exit 255
"""


def test_a_rank_that_hydra_saw_killed_is_restarted_elsewhere(recorder):
    (recorder.bin / "mpirun").write_text(HYDRA)
    script = script_for("slurm-mpirun", mpi="mpich", log_dir=str(recorder.work / "logs"))
    log = recorder.work / "log"
    script = script.replace("\nset -euo pipefail\n", f"\nset -euo pipefail\nexec >>{log} 2>&1\n", 1)
    done = run(recorder, script, 0)
    assert "exit code 137 after" in log.read_text(), log.read_text()
    assert again(recorder, done, "slurm-mpirun")
    assert updates(recorder) == ["ExcNodeList=n2"]
    (recorder.bin / "mpiexec").write_text("#!/bin/sh\nexit 9\n")
    done = run(recorder, script_for("pbs-mpiexec", mpi="mpich"), 0)
    assert again(recorder, done, "pbs-mpiexec")


@pytest.mark.parametrize(
    ("lines", "told", "left_out"),
    [
        (["n2: task 1: Killed", "n1: task 0: Killed"], "", ["n2"]),
        (["n2: tasks 1-3: Killed", "n1: task 0: Exited with exit code 137"], "", ["n2"]),
        (["n2: task 1: Killed"], "n1", ["n1"]),  # what a rank has said is more than the order
        (["n2: task 1: Exited with exit code 1", "n1: task 0: Killed"], "", None),
        (["n1: task 0: Killed", "n2: task 1: Exited with exit code 1"], "", None),
        (["n2: task 1: Exited with exit code 124", "n1: task 0: Killed"], "", []),
    ],
)
def test_the_host_of_a_rank_that_srun_saw_killed_first_is_left_out(recorder, lines, told, left_out):
    """The ranks that would have named it may be killed before they have."""
    say = "\n".join(f"echo 'srun: error: {line}' >&2" for line in lines)
    note = f'echo {told} >"$HPCTRAIN_NOTES/failed"\n' if told else ""
    end = "case $* in *train.py*) ;; *) exit 0 ;; esac"  # nodes are swept by srun as well
    (recorder.bin / "srun").write_text(f"#!/bin/bash\n{end}\n{note}{say}\nexit 137\n")
    script = script_for("slurm-srun", log_dir=str(recorder.work / "logs"))
    log = recorder.work / "log"
    script = script.replace("\nset -euo pipefail\n", f"\nset -euo pipefail\nexec >>{log} 2>&1\n", 1)
    done = run(recorder, script, 0)
    assert again(recorder, done, "slurm-srun") is (left_out is not None), log.read_text()
    assert updates(recorder) == [f"ExcNodeList={host}" for host in left_out or []], log.read_text()


def updates(recorder: Recorder) -> list[str]:
    return [call[3] for call in recorder.calls() if call[:2] == ["scontrol", "update"]]


def test_slurm_keeps_away_from_the_node_that_failed(recorder):
    script = script_for("slurm-srun")
    done = run(recorder, script, DIED, FAILED="n2.some.where")
    assert updates(recorder) == ["ExcNodeList=n2"], done.stdout + done.stderr
    assert "keeps away from n2" in done.stdout
    kinds = [call[1] for call in recorder.calls() if call[0] == "scontrol"]
    assert kinds.index("requeue") < kinds.index("update")  # refused while the job runs
    run(recorder, script, DIED, 1, FAILED="n2", SAVED="5 x", EXCLUDED="n3")
    assert updates(recorder) == ["ExcNodeList=n2,n3"]
    done = run(recorder, script, DIED, 2, FAILED="n9", SAVED="6 x")  # not a node of this job
    assert updates(recorder) == []
    done = run(recorder, script, DIED, 3, FAILED="n1", SAVED="7 x", PARTITION_NODES="n1 n2")
    assert updates(recorder) == []
    assert "n1 is not left out: the partition has 1 other nodes, and the job needs 2" in done.stdout
    assert again(recorder, done, "slurm-srun")


def test_flux_keeps_away_and_pbs_and_lsf_say_that_they_cannot(recorder):
    run(recorder, script_for("flux-run", constraint="gpu"), DIED, FAILED="n1 n2")
    (call,) = [call for call in recorder.calls() if call[:3] == ["flux", "--parent", "batch"]]
    assert "--requires=gpu and -host:n1,n2" in call
    assert "--env=HPCTRAIN_AVOID=n1 n2" in call
    for template in ("pbs-mpiexec", "lsf-jsrun"):
        done = run(recorder, script_for(template), DIED, FAILED="n1", SAVED=template)
        assert "failed: n1; " in done.stdout, done.stdout + done.stderr
        assert "may use it again" in done.stdout


def test_a_job_without_restarts_keeps_no_notes(recorder):
    done = run(recorder, script_for("slurm-srun", max_requeues=0), 1)
    assert done.returncode == 1
    assert list((recorder.work / "logs").iterdir()) == []


def test_ranks_leave_notes_only_for_a_script_that_listens(tmp_path):
    note_checkpoint(detect({}), tmp_path, 3)
    launch = detect({"HPCTRAIN_NOTES": str(tmp_path)})
    note_checkpoint(launch, Path("runs/one"), 3)
    note_checkpoint(launch, Path("runs/two"), 4)
    note_checkpoint(launch, Path("runs/one"), 5)
    note_failed_hosts(launch, ["n1", "n1"])
    note_failed_hosts(launch, ["n2"])  # its victim
    for code in (0, 1, 137):
        note_exit(launch, code)
    assert (tmp_path / "code").read_text() == "1\n"
    (tmp_path / "code").unlink()
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found.pop("failed") == "n1\n"
    assert sorted(found.values()) == ["4 runs/two\n", "5 runs/one\n"]
    assert all(name.startswith("checkpoint-") for name in found)
    note_checkpoint(detect({"HPCTRAIN_NOTES": "/no/such"}), tmp_path, 3)  # nobody is disturbed


def test_shared_memory_of_killed_ranks_is_removed_and_nothing_else(recorder):
    """The real /dev/shm: what this job left goes; what is older, in use or not MPI's stays."""
    token = f"{os.getpid()}-{time.time_ns()}"
    names = ("left", "old", "open", "mapped")
    files = {name: Path("/dev/shm") / f"mpich_shm_{token}-{name}" for name in names}
    files["mine"] = Path("/dev/shm") / f"my_shm_{token}"
    make = "".join(f"head -c 4096 /dev/zero >{path}\n" for path in files.values())
    make += f"touch -d '1 hour ago' {files['old']}\nexit 9\n"
    hold = (
        "import mmap, sys\n"
        f"file = open({str(files['open'])!r}, 'rb')\n"
        f"with open({str(files['mapped'])!r}, 'r+b') as other:\n"
        "    memory = mmap.mmap(other.fileno(), 4096)\n"
        "print('held', flush=True)\nsys.stdin.read()\n"
    )
    (recorder.bin / "hold.py").write_text(hold)
    # The launcher's ranks: one that outlives them holds two of the files.
    (recorder.bin / "srun").write_text(
        f"#!/bin/bash\ncase \" $* \" in *' train.py '*) ;; *) exit 0 ;; esac\n{make}"
    )
    script = script_for("slurm-srun", num_nodes=1, max_requeues=0)
    for path in files.values():
        path.write_bytes(bytes(4096))
    holder = subprocess.Popen(
        ["python3", recorder.bin / "hold.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        done = run(recorder, script, 0)
        assert done.returncode == 9, done.stdout + done.stderr
        left = {name for name, path in files.items() if path.exists()}
        assert left == {"old", "open", "mapped", "mine"}, done.stdout
        assert f"removed {files['left']}, left by killed ranks on" in done.stdout
    finally:
        holder.communicate("")
        for path in files.values():
            path.unlink(missing_ok=True)
