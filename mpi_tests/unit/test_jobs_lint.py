"""Every rule of the linter has a script that breaks it, and one like it that does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.submit.lint import RULES
from mpi_tests.unit.lint_kit import (
    END,
    LOOP,
    LSF,
    MPI,
    PBS,
    PYTHON,
    RUN,
    SIGNAL,
    SLURM,
    SRUN,
    STRICT,
    TORCHRUN,
    TRAP,
    found,
    of_lsf,
    of_pbs,
    of_slurm,
    with_line,
)

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
    for part in ("B to E", "B", "C", "D", "E"):
        chosen = [s for s in scripts if s["part"] in part.replace("to", "CD")]
        verdicts = [verdict for s in chosen for rule, verdict in s["unseen"] if rule in known]
        counts = [verdicts.count(name) for name in ("useful", "harmless", "false")]
        mistakes = sum(s["mistakes"] for s in chosen)
        caught = mistakes - sum(len(s["missed_unseen"]) for s in chosen)
        cells = [part, len(chosen), len(verdicts), *counts, f"{caught} of {mistakes}"]
        assert "| " + " | ".join(map(str, cells)) + " |" in page


@pytest.mark.parametrize("good", [SLURM, PBS, LSF, of_slurm((SRUN, LOOP))])
def test_good_scripts_are_left_alone(good):
    assert found(good) == []


def test_a_python_file_is_not_linted_as_a_job_script(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import torch\n\nprint('hello')\n")
    assert main(["job", "lint", str(path)]) == 2
    assert "is a Python file and not a job script" in capsys.readouterr().err
    path.write_text("#!/usr/bin/env python3\n#SBATCH --nodes=2\nprint('hello')\n")
    assert main(["job", "lint", str(path)]) != 2
