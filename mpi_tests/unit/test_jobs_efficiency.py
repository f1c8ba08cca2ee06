"""What jobs used of what they asked for: sacct in every form, summaries, and the advice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.batch_systems import JobUse, find_system
from hpctrain.batch_systems.slurm import ACCOUNTING_FIELDS, read_accounting, read_memory
from hpctrain.batch_systems.units import read_clock
from hpctrain.cli import main
from hpctrain.programs import Answer
from hpctrain.submit.efficiency import advise_request, find_summaries, read_used
from hpctrain.submit.ledger import Ledger, SubmittedJob
from hpctrain.train.figures import RankUse, add_up, cpu_seconds, memory_limit

SLURM = find_system("slurm")
GIB = 1 << 30


def line(**fields):
    return "|".join(str(fields.get(name, "")) for name in ACCOUNTING_FIELDS)


def job(**more):
    """The allocation: 2 nodes, 16 cores, 64 GiB, one hour of two."""
    return line(
        **{
            "JobID": "4711",
            "State": "COMPLETED",
            "Elapsed": "01:00:00",
            "Timelimit": "02:00:00",
            "AllocCPUS": "16",
            "NNodes": "2",
            "TotalCPU": "12:00:00",
            "ReqMem": "64G",
            "AllocTRES": "billing=16,cpu=16,mem=64G,node=2",
            **more,
        }
    )


def steps(**more):
    """The batch script, Slurm's own step, and the ranks."""
    ranks = {"JobID": "4711.0", "NTasks": "8", "MaxRSS": "4G", "TotalCPU": "12:00:00", **more}
    return "\n".join(
        [
            line(JobID="4711.batch", NTasks="1", MaxRSS="9012K"),
            line(JobID="4711.extern", NTasks="2", MaxRSS="0"),
            line(**ranks),
        ]
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00.123", 0.123),
        ("12:34.567", 754.567),
        ("01:02:03", 3723),
        ("2-01:02:03", 176523),
        ("00:00:00", 0),
        ("", None),
        ("INVALID", None),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
    ],
)
def test_times_of_sacct(text, seconds):
    assert read_clock(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("836", 836),
        ("9012K", 9012 << 10),
        ("1.50M", 3 << 19),
        ("4G", 4 * GIB),
        ("1T", 1024 * GIB),
        ("16Gn", 2 * 16 * GIB),
        ("4000Mc", 16 * 4000 << 20),
        ("", None),
        ("16?", None),
        ("x", None),
    ],
)
def test_sizes_of_sacct(text, size):
    assert read_memory(text, num_nodes=2, num_cores=16) == size


@given(st.text(max_size=20))
def test_whatever_stands_in_a_field_is_no_crash(text):
    assert isinstance(read_clock(text), float | None)
    assert isinstance(read_memory(text), int | None)
    read_accounting(job(AllocTRES=text, TotalCPU=text, NTasks=text) + "\n" + steps(MaxRSS=text))


def test_a_job_is_put_together_from_its_lines():
    (use,) = read_accounting(f"{job()}\n{steps()}\n")
    assert (use.job, use.state, use.num_nodes, use.cores) == ("4711", "COMPLETED", 2, 16)
    assert use.busy_cores == pytest.approx(12)
    assert (use.memory_bytes, use.used_memory_bytes) == (64 * GIB, 32 * GIB)  # 8 ranks of 4 GiB
    assert use.shares() == pytest.approx({"cores": 0.75, "memory": 0.5, "time": 0.5})
    assert advise_request(use) == []
    # Slurm's own sum over tasks is better than the largest for each.
    (use,) = read_accounting(f"{job()}\n{steps(TRESUsageInTot='cpu=12:00:00,mem=20G')}")
    assert use.used_memory_bytes == 20 * GIB


def test_memory_that_was_asked_by_node_or_core_by_an_older_slurm():
    for text, size in (("32Gn", 64), ("4Gc", 64), ("64G", 64)):
        (use,) = read_accounting(job(ReqMem=text, AllocTRES="cpu=16,node=2"))
        assert use.memory_bytes == size * GIB


def test_gpus_are_counted_once_and_busy_where_slurm_says():
    plain = "cpu=16,gres/gpu=4,mem=64G,node=2"
    typed = "cpu=16,gres/gpu:a100=4,mem=64G,node=2"
    both = "cpu=16,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=2"
    for given_ in (plain, typed, both):
        (use,) = read_accounting(job(AllocTRES=given_))
        assert (use.gpus, use.busy_gpus) == (4, None)
    busy = steps(
        NTasks="4",
        TRESUsageInAve="cpu=01:00:00,gres/gpumem=10G,gres/gpuutil=30",
        TRESUsageInMax="gres/gpumem=38000M,gres/gpuutil=95",
    )
    (use,) = read_accounting(f"{job(AllocTRES=plain)}\n{busy}")
    assert use.busy_gpus == pytest.approx(1.2)
    assert use.used_gpu_memory_bytes == 38000 << 20
    assert any("busy 30 % of the time" in text for text in advise_request(use))


def test_tasks_of_an_array_are_jobs_and_what_has_not_begun_is_none():
    said = "\n".join(
        [
            job(JobID="11_0"),
            line(JobID="11_0.batch", NTasks="1", MaxRSS="2G"),
            job(JobID="11_1", State="CANCELLED by 1000"),
            job(JobID="11_[2-9]", State="PENDING", Elapsed="00:00:00"),
            "half a line|",
        ]
    )
    first, second = read_accounting(said)
    assert (first.job, first.used_memory_bytes) == ("11_0", 2 * GIB)
    assert (second.job, second.state, second.used_memory_bytes) == ("11_1", "CANCELLED", None)


USE = JobUse(
    job="1",
    state="COMPLETED",
    source="sacct",
    elapsed_s=3600,
    limit_s=4000,
    num_nodes=2,
    cores=16,
    busy_cores=15,
    memory_bytes=64 * GIB,
    used_memory_bytes=48 * GIB,
)


def test_advice():
    assert advise_request(USE) == []
    (said,) = advise_request(replace(USE, busy_cores=3.2))
    assert "3.2 of 16 cores were busy: 4 are enough" in said
    (said,) = advise_request(replace(USE, busy_cores=3.2, gpus=2, busy_gpus=1.9))
    assert "as is usual beside GPUs" in said
    (said,) = advise_request(replace(USE, used_memory_bytes=10 * GIB))
    assert said == "16 % of the memory was used: --memory 7G a node is enough."
    (said,) = advise_request(replace(USE, used_memory_bytes=63 * GIB))
    assert "98 % full: request more" in said
    (said,) = advise_request(replace(USE, state="OUT_OF_MEMORY", used_memory_bytes=10 * GIB))
    assert "ran out of memory" in said
    (said,) = advise_request(replace(USE, limit_s=86400))
    assert said == "It took 01:00:00 of 24:00:00: with --time 01:15:00 it starts sooner."
    (said,) = advise_request(replace(USE, state="TIMEOUT", elapsed_s=4000))
    assert "time limit" in said


@given(
    cores=st.integers(1, 4096),
    busy=st.none() | st.floats(0, 5000),
    memory=st.none() | st.integers(1, 1 << 44),
    used=st.none() | st.integers(0, 1 << 45),
    nodes=st.integers(1, 64),
    elapsed=st.floats(0.1, 1e6),
    limit=st.none() | st.floats(1, 1e6),
)
def test_advice_never_asks_for_less_than_was_used(cores, busy, memory, used, nodes, elapsed, limit):
    use = replace(
        USE,
        cores=cores,
        busy_cores=busy,
        memory_bytes=memory,
        used_memory_bytes=used,
        num_nodes=nodes,
        elapsed_s=elapsed,
        limit_s=limit,
    )
    for said in advise_request(use):
        words = said.replace(":", " ").split()
        if "enough" in said and "cores" in said:
            number = int(words[words.index("are") - 1])
            assert busy <= number < cores
        elif "--memory" in said and "enough" in said:
            gib = int(words[words.index("--memory") + 1].removesuffix("G"))
            assert used <= (gib << 30) * nodes < memory
    assert all(len(row) == 4 for row in use.rows())


def test_why_accounting_knows_nothing_is_said():
    def answer(code, out, err):
        return lambda *_: Answer(code=code, out=out, err=err)

    assert SLURM.ask_use("1", lambda *_: None) == ([], "sacct is not on PATH")
    uses, why = SLURM.ask_use("1", answer(1, "", "Slurm accounting storage is disabled\n"))
    assert (uses, why) == ([], "sacct failed: Slurm accounting storage is disabled")
    assert SLURM.ask_use("1", answer(0, "", ""))[1] == "sacct has no record of job 1 starting"
    asked = []

    def record(words, stdin):
        asked.append(words)
        return Answer(code=0, out=f"{job()}\n{steps()}\n", err="")

    uses, why = SLURM.ask_use("4711", record)
    assert (len(uses), why) == (1, "")
    assert asked == [
        [
            "sacct",
            "--parsable2",
            "--noheader",
            "--jobs=4711",
            f"--format={','.join(ACCOUNTING_FIELDS)}",
        ]
    ]


def test_ranks_are_added_up_by_node():
    ranks = [
        RankUse(
            node_rank=node,
            cpus=frozenset(range(4 * local, 4 * local + 4)),
            cpu_s=30.0,
            memory_bytes=2 * GIB,
            memory_limit=16 * GIB,
            gpu=f"gpu{local}",
            gpu_memory_bytes=(1 + local) * GIB,
            gpu_memory_limit=40 * GIB,
        )
        for node in range(2)
        for local in range(2)
    ]
    assert add_up(ranks, seconds=10.0) == {
        "cores": 16,
        "busy_cores": pytest.approx(12.0),
        "memory_bytes": 32 * GIB,
        "used_memory_bytes": 8 * GIB,
        "gpus": 4,
        "gpu_memory_bytes": 40 * GIB,
        "used_gpu_memory_bytes": 2 * GIB,
    }
    shared = [replace(rank, cpus=frozenset(range(8)), gpu=None) for rank in ranks]
    assert add_up(shared, seconds=10.0)["cores"] == 16  # the same cores are counted once
    assert "gpus" not in add_up(shared, seconds=10.0)


def test_processor_time_grows_and_control_groups_limit_memory(tmp_path):
    before = cpu_seconds()
    sum(range(5_000_000))
    assert cpu_seconds() > before
    whole = memory_limit(tmp_path)
    for text, name in (
        ("0::/slurm/job_1/step_0\n", "memory.max"),
        ("3:memory:/slurm/job_1/step_0\n0::/\n", "memory.limit_in_bytes"),
    ):
        root = tmp_path / name
        group = (
            root / "sys/fs/cgroup" / ("memory" if "limit" in name else "") / "slurm/job_1/step_0"
        )
        group.mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(text)
        assert memory_limit(root) == whole
        (group / name).write_text("max\n")
        (group.parent / name).write_text("1048576\n")
        assert memory_limit(root) == 1 << 20


def write_summary(path, **more):
    path.mkdir(parents=True)
    used = {"cores": 8, "busy_cores": 2.0, "memory_bytes": 16 * GIB, "used_memory_bytes": 12 * GIB}
    facts = {"state": "finished", "job_id": "77", "job_seconds": 600.0, "nodes": 1, "used": used}
    (path / "summary.json").write_text(json.dumps({**facts, **more}))


def test_a_run_that_says_what_it_used_is_shown_where_there_is_no_accounting(tmp_path, capsys):
    write_summary(tmp_path / "runs" / "one")
    write_summary(tmp_path / "other", job_id="78")
    (tmp_path / "summary.json").write_text("{")
    (path,) = find_summaries(tmp_path, "77")
    use = read_used(path)
    assert (use.job, use.state, use.busy_cores, use.elapsed_s) == ("77", "COMPLETED", 2.0, 600)
    assert main(["job", "efficiency", "--run", str(tmp_path / "runs" / "one")]) == 0
    said = capsys.readouterr().out
    assert "2.0 of 8 cores were busy: 3 are enough" in said
    assert "75 %" in said
    assert main(["job", "efficiency", "--run", str(tmp_path / "runs" / "one"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["shares"] == {"cores": 0.25, "memory": 0.75}
    assert len(row["advice"]) == 1
    write_summary(tmp_path / "old", used=None)
    assert read_used(tmp_path / "old" / "summary.json") is None
    assert main(["job", "efficiency", "--run", str(tmp_path / "old")]) != 0
    assert "does not record what the run used" in capsys.readouterr().err


def test_accounting_is_asked_first_for_any_job(tmp_path, capsys, monkeypatch):
    sacct = tmp_path / "bin" / "sacct"
    sacct.parent.mkdir()
    sacct.write_text(f"#!/bin/sh\ncat <<'END'\n{job(TotalCPU='02:00:00')}\n{steps()}\nEND\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sacct.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(["job", "efficiency", "4711"]) == 0  # hpctrain did not submit it
    said = capsys.readouterr().out
    assert "job 4711, COMPLETED, 2 nodes (by sacct)" in said
    assert "2.0 of 16 cores were busy: 3 are enough" in said
    sacct.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    assert main(["job", "efficiency", "77"]) != 0
    said = capsys.readouterr().err
    assert "no record of what job 77 used: sacct failed: Slurm accounting storage" in said
    made = {"batch": "slurm", "name": "a", "site": "slurm", "script": "s", "log_dir": "logs"}
    entry = SubmittedJob(
        job="77", directory=str(tmp_path), submitted="2026-11-15T06:30:00Z", **made
    )
    Ledger(tmp_path / "state" / "hpctrain").add(entry)
    write_summary(tmp_path / "runs" / "one")
    assert main(["job", "efficiency"]) == 0  # the last one that was submitted
    assert "runs/one/summary.json" in capsys.readouterr().out
