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
RUN, PYTHON = SRUN.strip(), "python train.py"
TORCHRUN = "srun torchrun --nproc_per_node=4 --rdzv_endpoint=$host:$port train.py"
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


def with_line(line: str, *pairs: tuple[str, str]) -> str:
    """The script of Slurm with a line or two before its last two."""
    return of_slurm(("export SRUN", f"{line}\nexport SRUN"), *pairs)


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
    ("J03", 2, of_slurm(("#SBATCH --nodes", "#SBATCh --nodes")), of_slurm(("=2", "=3"))),
    ("J03", 2, of_slurm(("#SBATCH --nodes", "#BATCH --nodes")), of_slurm(("set", "#A --b\nset"))),
    ("J03", 2, of_slurm(("#SBATCH --nodes", "#SBATCH--nodes")), of_slurm(("--nodes", "\t--nodes"))),
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
    (
        "J12",
        3,
        of_slurm(("ntasks-per-node=4", "ntasks=1")),
        of_slurm(("ntasks-per-node=4", "ntasks=8")),
    ),
    ("J12", 3, of_slurm(("=2\n", "=2\n#SBATCH -n 4\n")), of_slurm(("=2\n", "=2\n#SBATCH -n 8\n"))),
    ("J13", 1, of_slurm(("bash\n", "bash \u2013l\n")), of_slurm(("=2\n", "=2 # a \u2013 b\n"))),
    (
        "J14",
        10,
        of_slurm(("export SRUN", "<<<<<<< HEAD\nexport A=1\n=======\n>>>>>>> b\nexport SRUN")),
        of_slurm((SRUN, "cat <<'END'\n=======\nEND\n" + SRUN)),
    ),
    (
        "J15",
        2,
        of_slurm(("nodes=2", "ntasks=8"), ("#SBATCH --ntasks-per-node=4\n", ""), (RUN, PYTHON)),
        of_slurm(("nodes=2", "ntasks=1"), ("#SBATCH --ntasks-per-node=4\n", ""), (RUN, PYTHON)),
    ),
    ("J15", 3, of_slurm(("nodes=2", "nodes=1"), (RUN, PYTHON)), of_slurm(("nodes=2", "nodes=1"))),
    ("J16", 2, of_slurm(("--nodes=2", "-N=2")), of_slurm(("--nodes=2", "-N2"))),
    ("J16", 2, of_slurm(("--nodes=2", "--nodes = 2")), of_slurm(("--nodes=", "--nodes "))),
    (
        "J16",
        3,
        of_slurm(("ntasks-per", "ntask-per")),
        of_slurm(("=2\n", "=2\n#SBATCH --constrain=a\n")),
    ),
    (
        "J16",
        3,
        of_slurm(("=2\n", "=2\n#SBATCH --workdir=/a\n")),
        of_slurm(("=2\n", "=2\n#SBATCH --image=a\n")),
    ),
    ("J16", 7, of_slurm(("%j.out", "%j.out my log")), of_slurm(("%j.out", "%j.out # my log"))),
    ("J16", 2, of_slurm(("--nodes=2", "-nodes=2")), SLURM),
    ("J16", 5, of_slurm(("task=8", "task=8;")), SLURM),
    (
        "J17",
        2,
        of_slurm(("#SBATCH --nodes", "# SBATCH --nodes")),
        of_slurm(("set", "##SBATCH -a\nset")),
    ),
    (
        "J20",
        11,
        of_slurm(("ntasks-per-node=4", "ntasks-per-node=2")),
        of_slurm(("node=4", "node=a:4")),
    ),
    (
        "J20",
        11,
        of_slurm(("tasks-per-node=4", "tasks-per-node=1"), (RUN, TORCHRUN.replace("4", "8"))),
        of_slurm(("tasks-per-node=4", "tasks-per-node=1"), (RUN, TORCHRUN)),
    ),
    (
        "J20",
        8,
        of_pbs(("mpiprocs=4", "mpiprocs=2"), (" -ppn 4", " -ppn 2")),
        of_pbs((":ngpus=4", "")),
    ),
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
    (
        "J26",
        7,
        of_pbs(("export OMP_NUM_THREADS=8\n", ""), ("mpiexec", "mpirun --bind-to none")),
        of_pbs(("export OMP_NUM_THREADS=8\n", ""), ("mpiexec", "mpirun --bind-to core")),
    ),
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
    (
        "J27",
        11,
        of_slurm((RUN, "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_endpoint=$a:$b train.py")),
        of_slurm(
            (RUN, "deepspeed --hostfile hosts train.py"), ("tasks-per-node=4", "tasks-per-node=1")
        ),
    ),
    (
        "J30",
        11,
        of_slurm((RUN, TORCHRUN)),
        of_slurm((RUN, TORCHRUN.replace("srun", "srun --ntasks-per-node=1"))),
    ),
    (
        "J30",
        11,
        of_slurm((RUN, "srun mpirun python train.py")),
        of_slurm((RUN, "mpirun python train.py")),
    ),
    (
        "J31",
        10,
        with_line("ip=$(srun -n 1 hostname --ip-address)"),
        with_line("ip=$(srun -n 1 hostname -i | awk '{print $1}')"),
    ),
    (
        "J32",
        11,
        with_line("source env/bin/activate\nmodule purge"),
        with_line("module purge\nsource env/bin/activate"),
    ),
    (
        "J33",
        10,
        with_line("export NCCL_SOCKET_IFNAME=lo"),
        with_line("export NCCL_SOCKET_IFNAME=^lo,docker0"),
    ),
    (
        "J34",
        10,
        with_line("export CUDA_VISIBLE_DEVICES=0,1"),
        with_line("export CUDA_VISIBLE_DEVICES=0,1,2,3"),
    ),
    (
        "J34",
        10,
        with_line("export CUDA_VISIBLE_DEVICES=2,3,4,5"),
        of_slurm(
            (
                RUN,
                "".join(f"CUDA_VISIBLE_DEVICES={n} {RUN} &\np{n}=$!\n" for n in range(4))
                + "wait $p0 $p1 $p2 $p3",
            )
        ),
    ),
    (
        "J34",
        10,
        with_line(
            "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID_OF_MINE",
            ("--mpi", "--gpu-bind=closest --mpi"),
        ),
        with_line("export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID_OF_MINE"),
    ),
    ("J35", 10, with_line("export NCCL_P2P_DISABLE=1"), with_line("export NCCL_P2P_DISABLE=0")),
    (
        "J35",
        10,
        with_line("export NCCL_IB_DISABLE=1"),
        with_line("export NCCL_IB_DISABLE=1", ("nodes=2", "nodes=1")),
    ),
    (
        "J36",
        3,
        of_pbs((":mpiprocs=4:ngpus=4", ""), ("-n 8 -ppn 4", "-n 8")),
        of_pbs((":mpiprocs=4:ngpus=4", "")),
    ),
    ("J37", 8, of_lsf((" -g 1", "")), LSF),
    (
        "J38",
        11,
        of_slurm((RUN, "mpirun -n 16 ./a.out")),
        of_slurm((RUN, "mpirun -n 16 --oversubscribe ./a.out")),
    ),
    (
        "J39",
        10,
        with_line("export RANK=$SLURM_PROCID"),
        of_slurm((RUN, "srun --mpi=pmix bash -c 'RANK=$SLURM_PROCID exec python train.py'")),
    ),
    (
        "J39",
        11,
        of_slurm((RUN, f'{RUN} --rank "$SLURM_PROCID"')),
        of_slurm((RUN, f"{RUN} --rank \\$SLURM_PROCID")),
    ),
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
    ("J50", 11, of_slurm((RUN, 'srun "run.sh a"')), of_slurm((RUN, "srun run.sh 'a b'"))),
    (
        "J51",
        10,
        with_line("conda activate a"),
        with_line('eval "$(conda shell.bash hook)"\nconda activate a'),
    ),
    ("J52", 11, of_slurm((RUN, f"{RUN} &")), of_slurm((RUN, f"{RUN} & wait $!"))),
    (
        "J53",
        8,
        of_slurm(
            ("set -e", "#SBATCH --signal=USR2@120\nset -e"),
            ("nodes=2", "nodes=1"),
            ("-per-node=4", "-per-node=1"),
            (RUN, PYTHON),
        ),
        of_slurm(("set -e", "#SBATCH --signal=USR2@120\nset -e")),
    ),
    (
        "J54",
        11,
        of_slurm(("tasks-per-node=4", "tasks-per-node=1"), (RUN, f"{TORCHRUN} --nnodes 4")),
        of_slurm(("tasks-per-node=4", "tasks-per-node=1"), (RUN, f"{TORCHRUN} --nnodes 2")),
    ),
    ("J55", 10, with_line("export WORLD_SIZE=4"), with_line("export WORLD_SIZE=8")),
    (
        "J56",
        10,
        with_line("export N=$SLURM_GPUS_PER_TASK"),
        with_line("export N=${SLURM_GPUS_PER_TASK:-1} M=$SLURM_GPUS_PER_NODE"),
    ),
    (
        "J57",
        10,
        with_line("MASTER_PORT=$RANDOM"),
        with_line("MASTER_PORT=$RANDOM\nexport MASTER_PORT"),
    ),
    ("J18", 2, of_slurm(("--nodes", "--account=<account>\n#SBATCH --nodes")), SLURM),
    ("J18", 10, with_line("cd $HOME/..."), with_line("cd $HOME/.. && ls ...")),
    (
        "J61",
        10,
        with_line("pid=$!\nkill pid").replace("pid=$!\nkill", "pid=$!; kill"),
        with_line("pid=$!; kill $pid"),
    ),
    ("J62", 11, of_slurm((RUN, f"{RUN} --device cpu")), of_slurm((RUN, f"{RUN} --device cuda"))),
    (
        "J63",
        3,
        of_lsf(("-nnodes 2", "-n 4"), ("jsrun -n 12 -r 6 -a 1 -g 1 -c 7 ", "")),
        of_lsf(("-nnodes 2", "-n 4 -R span[hosts=1]"), ("jsrun -n 12 -r 6 -a 1 -g 1 -c 7 ", "")),
    ),
    ("J59", 10, with_line("bash -l"), with_line(". /opt/modules/init/bash\necho a | bash")),
    ("J64", 10, with_line("conda install torch"), with_line("conda install -y torch")),
    ("J58", 10, with_line("python prepare.sh"), with_line("python -m a.sh\nbash a.sh b.py")),
    ("J58", 10, with_line("bash prepare.py"), with_line("bash -c 'python prepare.py'")),
    ("J59", 10, with_line("scl enable devtoolset-9 bash"), with_line("bash prepare.sh")),
    ("J60", 11, of_slurm((RUN, f"{RUN} --num_nodes=1")), of_slurm((RUN, f"{RUN} --num_nodes 2"))),
    (
        "J60",
        11,
        of_slurm((RUN, f"{RUN} --trainer.devices 2")),
        of_slurm((RUN, f"{RUN} --trainer.devices=$SLURM_NTASKS_PER_NODE")),
    ),
]


def found(text: str, level: str = "note") -> list[tuple[str, int]]:
    findings = lint(text, exists=lambda folder: folder in ("logs", "/scratch", "/scratch/here"))
    return [(f.rule, f.line) for f in findings if level in ("note", f.level)]


@pytest.mark.parametrize(("rule", "line", "bad", "good"), CASES)
def test_the_rule_finds_the_mistake_and_nothing_else(rule, line, bad, good):
    assert (rule, line) in found(bad)
    assert rule not in [name for name, _ in found(good)]
    also = {"J40": "J41", "J47": "J49", "J30": "J23"}  # where one mistake is two
    assert {name for name, _ in found(bad)} <= {rule, also.get(rule)}, found(bad)


def test_there_are_many_rules_each_with_its_cases():
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids)) >= 20
    assert {case[0] for case in CASES} == set(ids)
    assert all(rule.why and rule.cure for rule in RULES)
    page = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
    listed = dict(re.findall(r"\| (J\d\d) (n |w/n )?", page))
    assert set(listed) == set(ids)
    levels = {"": ["warning"], "n ": ["note"]}
    for rule in RULES:
        fixed = [rule.level] if isinstance(rule.level, str) else None
        assert fixed == levels.get(listed[rule.id]), rule.id


def test_the_figures_of_the_page_are_those_of_the_corpus():
    root = Path(__file__).parents[2]
    scripts = json.loads((root / "jobs" / "lint-corpus.json").read_text())["scripts"]
    page = (root / "docs" / "jobs.md").read_text()
    assert len({(s["repository"], s["path"]) for s in scripts}) == len(scripts) >= 40
    assert all(re.fullmatch(r"[0-9a-f]{40}", s["commit"]) for s in scripts)
    known = {rule.id for rule in RULES}
    for part in "BCDE":
        chosen = [s for s in scripts if s["part"] == part]
        verdicts = [verdict for s in chosen for rule, verdict in s["unseen"] if rule in known]
        counts = [verdicts.count(name) for name in ("useful", "harmless", "false")]
        mistakes = sum(s["mistakes"] for s in chosen)
        caught = mistakes - sum(len(s["missed_unseen"]) for s in chosen)
        cells = [part, len(chosen), len(verdicts), *counts, f"{caught} of {mistakes}"]
        assert "| " + " | ".join(map(str, cells)) + " |" in page
    assert counts[2] <= 0.05 * len(verdicts)  # the last unseen part
    assert caught >= 0.85 * mistakes


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
    findings = lint(text, exists=lambda folder: True, slurm=version)
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
