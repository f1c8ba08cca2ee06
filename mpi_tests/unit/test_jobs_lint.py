"""Every rule of the linter has a script that breaks it, and one like it that does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.submit.lint import RULES, lint

SLURM = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --output=logs/%x-%j.out
set -euo pipefail
export OMP_NUM_THREADS=8
export SRUN_CPUS_PER_TASK=8
srun --mpi=pmix python train.py
"""
PBS = """#!/bin/bash
#PBS -N train
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l walltime=02:00:00
set -euo pipefail
cd "$PBS_O_WORKDIR"
export OMP_NUM_THREADS=8
mpiexec -n 8 -ppn 4 python train.py
"""
LSF = """#!/bin/bash
#BSUB -J train
#BSUB -nnodes 2
#BSUB -W 02:00
#BSUB -wa USR2 -wt 5
set -euo pipefail
export OMP_NUM_THREADS=7
jsrun -n 12 -r 6 -a 1 -g 1 -c 7 python train.py
"""
SRUN = "srun --mpi=pmix python train.py\n"
SIGNAL = "#SBATCH --signal=B:USR2@120\nset -e"
TRAP = "trap 'kill -USR2 $pid' USR2\n"
LOOP = f"{TRAP}{SRUN.strip()} &\npid=$!\nwhile ! wait $pid; do :; done\n"


def change(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def of_slurm(*pairs: tuple[str, str]) -> str:
    return change(SLURM, *pairs)


def of_pbs(*pairs: tuple[str, str]) -> str:
    return change(PBS, *pairs)


def of_lsf(*pairs: tuple[str, str]) -> str:
    return change(LSF, *pairs)


MPI, STRICT, END = "--mpi=pmix", "set -euo pipefail", SRUN
CASES = [
    # rule, line of the mistake, a script that has it, one that has not
    ("J01", 12, SLURM + "#SBATCH --mem=4G\n", of_slurm((STRICT, f"#SBATCH --mem=4G\n{STRICT}"))),
    ("J01", 9, PBS + "#PBS -q prod\n", of_pbs(("#PBS -N", "#PBS -q prod\n#PBS -N"))),
    ("J02", 7, of_slurm(("logs/%x", "$HOME/%x")), of_slurm(("logs/%x", "/scratch/%x"))),
    ("J03", 2, of_slurm(("#SBATCH --nodes", "# SBATCH --nodes")), of_slurm(("=2", "=3"))),
    ("J03", 2, of_pbs(("#PBS -N", "#pbs -N")), of_pbs(("#PBS -N train", "# PBS wants this"))),
    ("J04", 3, of_slurm(("=2\n", "=2\n#SBATCH -N 3\n")), of_slurm(("=2\n", "=2\n#SBATCH -N 2\n"))),
    ("J05", 1, of_slurm(("#SBATCH --time=02:00:00\n", "")), of_slurm(("--time=", "-t "))),
    ("J05", 1, of_lsf(("#BSUB -W 02:00\n", "")), LSF),
    ("J06", 6, of_slurm(("02:00:00", "00:61:00")), of_slurm(("02:00:00", "1-02:00:00"))),
    ("J06", 6, of_slurm(("=02:00:00", "=-5")), of_slurm(("=02:00:00", "=00:00:30"))),
    ("J06", 4, of_pbs(("02:00:00", "00:00:00")), of_pbs(("02:00:00", "00:30:00"))),
    ("J07", 6, of_slurm(("02:00:00", "30")), of_slurm(("02:00:00", "00:30:00"))),
    ("J07", 4, of_lsf(("02:00", "30")), of_lsf(("02:00", "0:30"))),
    ("J08", 2, of_slurm(("#SBATCH --nodes", "#SBATCH --mem=1.5G\n#SBATCH --nodes")), SLURM),
    ("J08", 2, of_slurm(("#SBATCH -", "#SBATCH --mem=5GiB\n#SBATCH -")), of_slurm(("=2", "=4"))),
    ("J09", 7, of_slurm(("logs/", "nowhere/")), of_slurm(("logs/", ""))),
    ("J10", 1, of_slurm(("#!/bin/bash\n", "")), of_slurm(("#!/bin/bash", "#!/bin/sh -l"))),
    ("J11", 1, SLURM.replace("\n", "\r\n"), SLURM),
    ("J12", 3, of_slurm(("=2\n", "=2\n#SBATCH -n 4\n")), of_slurm(("=2\n", "=2\n#SBATCH -n 8\n"))),
    (
        "J20",
        4,
        of_slurm(("ntasks-per-node=4", "ntasks-per-node=1")),
        of_slurm(("node=4", "node=a:4")),
    ),
    ("J20", 3, of_pbs(("mpiprocs=4", "mpiprocs=1")), of_pbs((":ngpus=4", ""))),
    (
        "J21",
        4,
        of_slurm(("gpus-per-node=4", "gpus-per-task=1")),
        of_slurm(("gpus-per-node=4", "gres=gpu:4")),
    ),
    (
        "J22",
        10,
        of_slurm(("export SRUN_CPUS_PER_TASK=8\n", "")),
        of_slurm(("export SRUN_CPUS_PER_TASK=8\n", ""), ("srun ", "srun -c 8 ")),
    ),
    ("J23", 11, of_slurm((f" {MPI}", "")), of_slurm((f"srun {MPI}", "SLURM_MPI_TYPE=pmix srun"))),
    (
        "J24",
        10,
        of_slurm(("export SRUN", "export MASTER_PORT=29500\nexport SRUN")),
        of_slurm(
            ("export SRUN", "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000))\nexport SRUN")
        ),
    ),
    (
        "J25",
        10,
        of_slurm(("export SRUN", "export MASTER_ADDR=localhost\nexport SRUN")),
        of_slurm(
            ("export SRUN", "export MASTER_ADDR=localhost\nexport SRUN"), ("nodes=2", "nodes=1")
        ),
    ),
    ("J26", 10, of_slurm(("export OMP_NUM_THREADS=8\n", "")), SLURM),
    (
        "J27",
        11,
        of_slurm((f"srun {MPI} ", "")),
        of_slurm((f"srun {MPI} ", ""), ("--nodes=2", "--nodes=1")),
    ),
    (
        "J27",
        8,
        of_pbs(("mpiexec -n 8 -ppn 4 ", "")),
        of_pbs(("mpiexec -n 8 -ppn 4 ", "hpctrain run ")),
    ),
    (
        "J28",
        11,
        of_slurm(("python train.py", 'bash -c "hostname; python train.py"')),
        of_slurm(("python train.py", 'bash -c "hostname; exec python train.py"')),
    ),
    ("J29", 5, of_pbs(('cd "$PBS_O_WORKDIR"\n', "")), of_pbs(('cd "$PBS_O_WORKDIR"', "cd /work"))),
    ("J40", 8, of_slurm(("set -e", SIGNAL)), of_slurm(("set -e", SIGNAL), (END, LOOP))),
    ("J41", 12, of_slurm((SRUN, TRAP + SRUN)), of_slurm((SRUN, LOOP))),
    (
        "J42",
        14,
        of_slurm((SRUN, f"{TRAP}{SRUN.strip()} &\npid=$!\nwait $pid\n")),
        of_slurm((SRUN, LOOP)),
    ),
    (
        "J43",
        12,
        of_slurm((SRUN, f"{SRUN.strip()} &\nwait\n")),
        of_slurm((SRUN, f"{SRUN.strip()} &\npid=$!\nwait $pid\n")),
    ),
    (
        "J44",
        8,
        of_slurm(("set -e", "#SBATCH --signal=USR1@120\nset -e")),
        of_slurm(("set -e", "#SBATCH --signal=USR2@120\nset -e")),
    ),
    ("J44", 5, of_lsf(("USR2", "USR1"), ("export", "export NCCL_DEBUG=INFO\nexport")), LSF),
    (
        "J45",
        8,
        of_slurm(("set -e", "#SBATCH --signal=USR2@7200\nset -e")),
        of_slurm(("set -e", "#SBATCH --signal=USR2@7199\nset -e")),
    ),
    ("J45", 5, of_lsf(("-W 02:00", "-W 00:05")), of_lsf(("-W 02:00", "-W 00:06"))),
    (
        "J46",
        8,
        of_slurm(("set -e", "#SBATCH --requeue\nset -e")),
        of_slurm(("set -e", "#SBATCH --requeue\n#SBATCH --open-mode=append\nset -e")),
    ),
    (
        "J47",
        11,
        of_slurm((STRICT, "cd /work"), (SRUN, f"{SRUN}echo done\n")),
        of_slurm((STRICT, "cd /work"), (SRUN, f"{SRUN}code=$?\necho done\nexit $code\n")),
    ),
    (
        "J48",
        11,
        of_slurm((STRICT, "set -eu"), ("train.py", "train.py | tee log")),
        of_slurm(("train.py", "train.py | tee log")),
    ),
    ("J49", 8, of_slurm((STRICT, "cd /work")), of_slurm((STRICT, "set -o errexit"))),
]


def found(text: str) -> list[tuple[str, int]]:
    return [
        (f.rule, f.line) for f in lint(text, exists=lambda folder: folder in ("logs", "/scratch"))
    ]


@pytest.mark.parametrize(("rule", "line", "bad", "good"), CASES)
def test_the_rule_finds_the_mistake_and_nothing_else(rule, line, bad, good):
    assert (rule, line) in found(bad)
    assert rule not in [name for name, _ in found(good)]
    also = {"J40": "J41", "J47": "J49"}  # where one mistake is two
    assert {name for name, _ in found(bad)} <= {rule, also.get(rule)}, found(bad)


def test_there_are_many_rules_each_with_its_cases():
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids)) >= 20
    assert {case[0] for case in CASES} == set(ids)
    assert all(rule.why and rule.cure for rule in RULES)
    page = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
    assert set(re.findall(r"\| (J\d\d) ", page)) == set(ids)


@pytest.mark.parametrize("good", [SLURM, PBS, LSF, of_slurm((SRUN, LOOP))])
def test_good_scripts_are_left_alone(good):
    assert found(good) == []


ALONE = of_slurm(("nodes=2", "nodes=1"), ("node=4", "node=1"), (STRICT, "cd /work"))
LATE = of_slurm((SRUN, f"{SRUN.strip()} || true\n"))
INSIDE = "srun --mpi=pmix bash -c '\n  export RANK=$SLURM_PROCID\n  {}python train.py\n'\n"


@pytest.mark.parametrize(
    ("rule", "line", "bad"),
    [
        ("J08", 3, of_pbs((":ngpus", ":mem=1.5gb:ngpus"))),
        ("J20", 4, of_slurm(("--ntasks-per-node=4\n", "--ntasks=2\n"))),
        ("J20", 3, of_slurm(("#SBATCH --ntasks-per-node=4\n", ""))),
        ("J20", 4, of_slurm(("gpus-per-node=4", "gpus=16"))),
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


def test_a_code_kept_by_pipestatus_is_not_lost():
    text = change(ALONE, (SRUN, f"{SRUN.strip()} | tee log\ncode=${{PIPESTATUS[0]}}\nexit $code\n"))
    assert {rule for rule, _ in found(text)} == {"J49"}


def test_a_rule_can_be_left_out_in_the_script():
    bad = of_slurm(("gpus-per-node=4", "gpus-per-task=1"))
    assert found(bad.replace("set -e", "# hpctrain lint: ignore J21 (asked for)\nset -e")) == []


def test_here_documents_and_comments_are_no_commands():
    text = of_slurm((SRUN, f"cat >x <<'END'\nsrun python\nEND\n# srun python\n{SRUN}"))
    assert found(text) == []


def test_the_verb_prints_line_why_and_cure(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "bad.sh").write_text(of_slurm((STRICT, "cd /work")))
    (tmp_path / "good.sh").write_text(SLURM)
    assert main(["job", "lint", "good.sh"]) == 0
    assert main(["job", "lint", "bad.sh", "good.sh"]) == 1
    out = capsys.readouterr().out
    assert "bad.sh:8: J49: there is no set -e" in out
    assert "to mend it: set -euo pipefail" in out
    assert main(["job", "lint", "--json", "bad.sh"]) == 1
    assert json.loads(capsys.readouterr().out)["bad.sh"][0]["rule"] == "J49"
    assert main(["job", "lint", "nosuch.sh"]) == 2


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
