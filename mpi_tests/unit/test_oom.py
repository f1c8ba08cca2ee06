"""Where the kernel counts what it killed for memory."""

from __future__ import annotations

from pathlib import Path

from hpctrain.faults.diagnosis import describe_oom_kills
from hpctrain.world.oom import count_oom_kills, event_files


def test_both_versions_of_control_groups():
    root = Path("/r")
    assert event_files("0::/user.slice/job_7\n", root) == [
        root / "user.slice/job_7/memory.events",
        root / "memory.events",
    ]
    text = "4:memory:/slurm/uid_0/job_7\n3:cpu,cpuacct:/x\n0::/y\n"
    assert event_files(text, root)[0] == root / "memory/slurm/uid_0/job_7/memory.oom_control"


def test_the_first_file_that_is_there_counts(tmp_path):
    events = tmp_path / "memory.events"
    events.write_text("low 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert count_oom_kills([tmp_path / "nothing", events]) == 2
    assert count_oom_kills([tmp_path / "nothing"]) == 0
    assert count_oom_kills() >= 0
    assert describe_oom_kills(0) == ""
    assert describe_oom_kills(1) == "the OOM killer has killed 1 process here"
    assert describe_oom_kills(2) == "the OOM killer has killed 2 processes here"
