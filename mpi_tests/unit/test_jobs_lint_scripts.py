"""What the linter says of scripts as people write them, its levels, and its verb."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.submit.lint import lint_script
from mpi_tests.unit.lint_kit import (
    ALONE,
    INSIDE,
    LATE,
    LSF,
    MPI,
    PBS,
    PYTHON,
    RUN,
    SLURM,
    SRUN,
    STRICT,
    TORCHRUN,
    TRAP,
    change,
    found,
    of_lsf,
    of_pbs,
    of_slurm,
)


@pytest.mark.parametrize(
    ("rule", "line", "bad"),
    [
        ("J08", 3, of_pbs((":ngpus", ":mem=1.5gb:ngpus"))),
        ("J20", 11, of_slurm(("--ntasks-per-node=4\n", "--ntasks=4\n"))),
        ("J20", 11, of_slurm(("gpus-per-node=4", "gpus=16"))),
        ("J24", 11, of_slurm((SRUN, "srun torchrun --master_port=29500 train.py\n"))),
        ("J24", 11, of_slurm((SRUN, "srun torchrun --rdzv_endpoint $host:29500 train.py\n"))),
        ("J24", 11, of_slurm((SRUN, "export MASTER_PORT=${MASTER_PORT:-29500}\n" + SRUN))),
        ("J28", 11, of_slurm((SRUN, INSIDE.format("")))),
        ("J47", 11, LATE),
        ("J41", 12, of_slurm((SRUN, f"{TRAP}timeout 60m /usr/bin/{SRUN}"))),
        ("J26", 7, of_pbs(("export OMP_NUM_THREADS=8\n", ""), ("mpiexec", "horovodrun"))),
        ("J47", 11, change(ALONE, (SRUN, "python train.py\necho done\n"))),
        ("J47", 13, change(ALONE, (SRUN, f"{SRUN.strip()} &\npid=$!\nwait $pid\necho done\n"))),
    ],
)
def test_mistakes_in_other_words_are_found(rule, line, bad):
    assert (rule, line) in found(bad)


@pytest.mark.parametrize(
    "good",
    [
        of_slurm((STRICT, "set -x -e -o pipefail")),
        of_slurm(("#SBATCH --time", "#SBATCH --mem=500GB\n#SBATCH --time")),
        of_slurm(("=02:00:00", "=UNLIMITED")),
        of_slurm(("ntasks-per-node", "tasks-per-node")),
        of_slurm(("ntasks-per-node=4", "ntasks=8")),
        of_slurm(
            ("ntasks-per-node=4", "ntasks-per-node=1"),
            (SRUN, "srun torchrun --nproc_per_node 4 --rdzv_endpoint $host:$port train.py\n"),
        ),
        of_slurm(("export SRUN_CPUS_PER_TASK=8\n", ""), ("srun ", "srun -c $SLURM_CPUS_PER_TASK ")),
        of_slurm((SRUN, f"export MASTER_ADDR=$(hostname)\n{SRUN}"), (f" {MPI}", "")),
        of_slurm((SRUN, f"{SRUN}srun -n 1 python summarize.py\n")),
        of_slurm((SRUN, INSIDE.format("exec "))),
        of_slurm(
            (
                SRUN,
                f"{TRAP}end() {{\n  wait $pid || true\n}}\n{SRUN.strip()} &\npid=$!\nwait $pid\n",
            )
        ),
        of_slurm((SRUN, "echo \"it's\"  # don't\n" + SRUN)),
        of_slurm(
            ("set -e", "#SBATCH --signal=B:12@120\nset -e"),
            (SRUN, f"{TRAP}{SRUN.strip()} & pid=$!\nwait $pid || wait $pid\n"),
        ),
    ],
)
def test_what_people_write_well_is_no_mistake(good):
    assert found(good) == []


@pytest.mark.parametrize(
    "good",
    [
        of_slurm((RUN, f"srun hostname\n{RUN}"), ("export OMP_NUM_THREADS=8\n", "")),
        of_slurm(
            ("tasks-per-node=4", "tasks-per-node=1"),
            ("export OMP_NUM_THREADS=8\n", ""),
            (RUN, TORCHRUN.replace("torchrun", "torchrun_jsc")),
        ),
        of_slurm(
            ("tasks-per-node=4", "tasks-per-node=1"),
            (RUN, "srun accelerate launch --num_processes 8 --main_process_port $port train.py"),
        ),
        of_slurm(
            ("export SRUN_CPUS_PER_TASK=8\n", ""), ("srun", "srun --cpu-bind=v,mask_cpu=$MASKS")
        ),
        of_slurm(("tasks-per-node=4", "tasks-per-node=1"), (f" {MPI}", f" {MPI} -u")),
        of_slurm((RUN, f"{RUN} --model no-torchrun --strategy deepspeed")),
        of_slurm((RUN, f'name="no torchrun"\n{RUN} --name "$name"')),
        of_slurm(
            (STRICT, "cd /w"),
            (RUN, f"# hpctrain lint: ignore J49\nif x; then\n{RUN}\nelse\n{RUN}\nfi"),
        ),
        of_slurm((RUN, "launcher='srun --mpi=pmix'\n$launcher python train.py")),
        of_slurm((RUN, "mpirun_rsh -np 8 python train.py")),
        change(ALONE, (RUN, "srun ray start &\nsrun -n 1 ./prepare\npython train.py")),
        of_slurm((RUN, f"cat <<END >job.sh\n#SBATCH --nodes=4\n{RUN} | tee log\nEND\n{RUN}")),
    ],
)
def test_what_was_once_a_false_alarm_is_none(good):
    assert found(good, "warning") == []


@pytest.mark.parametrize(
    ("rule", "line", "bad"),
    [
        ("J48", 12, of_slurm((STRICT, "set -e"), (RUN, f"read n <<< x\n{RUN} | tee log"))),
        ("J48", 11, of_slurm((STRICT, "set -e"), (RUN, f"clear; {RUN} 2>&1 | tee log"))),
        ("J48", 11, of_slurm((STRICT, "set -e"), (RUN, f"cd /work && {RUN} |& tee log"))),
        ("J48", 11, change(ALONE, (RUN, f"{PYTHON} | tee log"))),
        (
            "J30",
            13,
            of_slurm((RUN, 'L="torchrun --nproc_per_node 4"\nC="$L train.py"\nsrun bash -c "$C"')),
        ),
        (
            "J20",
            14,
            of_slurm(
                ("tasks-per-node=4", "tasks-per-node=1"),
                (RUN, "N=8\nexport N\n\n" + TORCHRUN.replace("=4", "=$N")),
            ),
        ),
        (
            "J25",
            11,
            of_slurm(
                ("tasks-per-node=4", "tasks-per-node=1"),
                (RUN, TORCHRUN.replace("$host", "localhost")),
            ),
        ),
        ("J03", 7, of_slurm(("#SBATCH --output", "!#SBATCH --output"))),
        ("J02", 7, of_slurm(("logs/%x", "~/%x"))),
        ("J03", 7, of_slurm(("#SBATCH --output", "SBATCH --output"))),
        ("J09", 7, of_slurm(("--output=logs", "--out=nowhere"))),
        ("J48", 11, change(ALONE, (RUN, "snakemake --cores 8 | tee log"))),
        ("J47", 11, change(ALONE, (RUN, "./a.out\necho done"))),
        ("J06", 6, of_slurm(("02:00:00", ""))),
        ("J29", 5, of_pbs(('cd "$PBS_O_WORKDIR"\n', ""), ("mpiexec", "aprun"))),
        ("J47", 9, change(ALONE, ("export OMP", "aprun -n 2 ./a\nexport OMP"), (RUN, "true"))),
        (
            "J24",
            11,
            of_slurm(
                ("nodes=2", "nodes=1"),
                ("per-node=4", "per-node=2"),
                ("tasks-per-node=2", "tasks-per-node=1"),
                (RUN, "srun torchrun --nproc_per_node=2 train.py"),
            ),
        ),
    ],
)
def test_what_was_once_missed_is_found(rule, line, bad):
    assert (rule, line) in found(bad, "warning")


def test_habits_are_notes_and_mistakes_are_warnings():
    shared = of_slurm(
        ("nodes=2", "nodes=1"),
        ("per-node=4", "per-node=1"),
        (RUN, "export MASTER_PORT=29500\n" + RUN),
    )
    assert ("J24", 11) in found(shared, "warning")
    whole = change(shared, ("#SBATCH --time", "#SBATCH --exclusive\n#SBATCH --time"))
    assert ("J24", 12) in found(whole)
    assert "J24" not in [rule for rule, _ in found(whole, "warning")]
    for value, level in (
        ("1:00", "warning"),
        ("24:00", "warning"),
        ("10:00", "note"),
        ("30", "note"),
    ):
        text = of_slurm(("02:00:00", value))
        assert ("J07", 6) in found(text, level)
        assert (found(text, "warning") == []) == (level == "note")
    assert found(of_pbs(("02:00:00", "30")), "warning") == [("J07", 4)]
    assert found(of_lsf(("#!/bin/bash\n", "")), "warning") == []
    assert found(of_lsf(("#!/bin/bash", "#/bin/bash")), "warning") == [("J10", 1)]


@pytest.mark.parametrize(
    ("version", "level"),
    [
        (None, "note"),
        ((22, 5), "warning"),
        ((23, 2), "warning"),
        ((21, 8), ""),
        ((23, 11), ""),
        ((25, 5), ""),
    ],
)
def test_cores_are_lost_in_some_versions_of_slurm_only(version, level):
    text = of_slurm(("export SRUN_CPUS_PER_TASK=8\n", ""))
    findings = lint_script(text, exists=lambda folder: True, slurm=version)
    assert [(f.rule, f.level) for f in findings] == ([("J22", level)] if level else [])


def test_a_script_whose_directives_are_all_switched_off_is_a_mistake():
    text = SLURM.replace("#SBATCH", "# SBATCH")
    assert {rule for rule, _ in found(text, "warning")} == {"J17"}


def test_a_script_for_another_shell_is_read_for_its_directives_alone():
    text = of_slurm(("#!/bin/bash", "#!/bin/tcsh"), (STRICT, "setenv A 1"), ("export ", "setenv "))
    assert found(text) == []
    assert found(change(text, ("02:00:00", "00:61:00"))) == [("J06", 6)]


def test_a_folder_of_another_machine_is_not_looked_for():
    assert found(of_slurm(("logs/%x", "/elsewhere/logs/%x"))) == []
    assert found(of_slurm(("logs/%x", "/scratch/me/%x"))) == []
    assert found(of_slurm(("logs/%x", "/scratch/here/logs/%x"))) == [("J09", 7)]


def test_a_code_kept_by_pipestatus_is_not_lost():
    text = change(ALONE, (SRUN, f"{SRUN.strip()} | tee log\ncode=${{PIPESTATUS[0]}}\nexit $code\n"))
    assert {rule for rule, _ in found(text)} == {"J49"}


def test_a_rule_can_be_left_out_in_the_script():
    bad = of_slurm(("gpus-per-node=4", "gpus-per-task=1"))
    assert found(bad.replace("set -e", "# hpctrain lint: ignore J21 (asked for)\nset -e")) == []


def test_here_documents_and_comments_are_no_commands():
    text = of_slurm((SRUN, f"cat >x <<'END'\nsrun python\nEND\n# srun python\n{SRUN}"))
    assert found(text) == []


def test_the_verb_prints_line_why_and_fix(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "bad.sh").write_text(of_slurm(("02:00:00", "00:61:00"), (STRICT, "cd /work")))
    (tmp_path / "good.sh").write_text(SLURM)
    assert main(["job", "lint", "good.sh"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["job", "lint", "bad.sh", "good.sh"]) == 1
    out = capsys.readouterr().out
    assert "bad.sh:6: warning J06: walltime '00:61:00' is zero, negative or past 59" in out
    assert "fix: Write HH:MM:SS" in out
    assert "J49" not in out
    assert "1 more of level note" in out
    assert main(["job", "lint", "--json", "bad.sh"]) == 1
    assert [f["rule"] for f in json.loads(capsys.readouterr().out)["bad.sh"]] == ["J06"]
    assert main(["job", "lint", "--json", "--level", "note", "bad.sh"]) == 1
    both = json.loads(capsys.readouterr().out)["bad.sh"]
    assert [(f["rule"], f["level"]) for f in both] == [("J06", "warning"), ("J49", "note")]
    assert main(["job", "lint", "nosuch.sh"]) == 2


def test_notes_alone_count_only_when_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.sh").write_text(of_slurm((STRICT, "cd /work"), ("logs/", "")))
    assert main(["job", "lint", "notes.sh"]) == 0
    assert main(["job", "lint", "--level", "note", "notes.sh"]) == 1
    assert "notes.sh:8: note J49: there is no set -e" in capsys.readouterr().out


def test_the_verb_asks_bash_for_the_syntax(tmp_path, capsys):
    script = tmp_path / "open.sh"
    script.write_text(of_slurm((SRUN, f"if true; then\n{SRUN}"), ("logs/", "")))
    assert main(["job", "lint", "--json", str(script)]) == 1
    (finding,) = json.loads(capsys.readouterr().out)[str(script)]
    assert finding["rule"] == "J14"
    assert finding["line"] in (12, 13)
    assert "syntax error" in finding["what"]
    script.write_text(
        of_slurm(("#!/bin/bash", "#!/bin/tcsh"), (SRUN, "if (1) then\nendif\n"), ("logs/", ""))
    )
    assert main(["job", "lint", "--json", str(script)]) == 0


def test_the_verb_asks_srun_for_its_version(tmp_path, capsys, monkeypatch):
    script, srun = tmp_path / "job.sh", tmp_path / "bin" / "srun"
    script.write_text(of_slurm(("export SRUN_CPUS_PER_TASK=8\n", ""), ("logs/", "")))
    srun.parent.mkdir()
    monkeypatch.setenv("PATH", str(srun.parent), prepend=":")
    for said, rules in (("slurm-wlm 22.05.8", ["J22"]), ("slurm 24.05.1", []), ("", [])):
        srun.write_text(f"#!/bin/sh\necho '{said}'\n")
        srun.chmod(0o755)
        assert main(["job", "lint", "--json", str(script)]) == (1 if rules else 0)
        assert [f["rule"] for f in json.loads(capsys.readouterr().out)[str(script)]] == rules


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            [
                *SLURM.splitlines(),
                *PBS.splitlines(),
                *LSF.splitlines(),
                "'",
                '"',
                "\\",
                "#SBATCH",
                "#SBATCH -",
                "#PBS -l",
                "<<E",
                "wait &",
                "trap '' USR2",
                "\x00",
                "#SBATCH --time",
                "#SBATCH --signal=B:@",
            ]
        )
        | st.text(max_size=20)
    )
)
def test_whatever_it_reads_it_answers(lines):
    for rule, line in found("\n".join(lines)):
        assert rule.startswith("J")
        assert 1 <= line <= max(1, len(lines) * 25)
