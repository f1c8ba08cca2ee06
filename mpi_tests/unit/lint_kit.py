"""Good job scripts, ways to spoil them, and what the linter finds in them."""

from __future__ import annotations

from hpctrain.submit.lint import lint_script

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
ALONE = of_slurm(("nodes=2", "nodes=1"), ("node=4", "node=1"), (STRICT, "cd /work"))
LATE = of_slurm((SRUN, f"{SRUN.strip()} || true\n"))
INSIDE = "srun --mpi=pmix bash -c '\n  export RANK=$SLURM_PROCID\n  {}python train.py\n'\n"


def found(text: str, level: str = "note") -> list[tuple[str, int]]:
    findings = lint_script(
        text, exists=lambda folder: folder in ("logs", "/scratch", "/scratch/here")
    )
    return [(f.rule, f.line) for f in findings if level in ("note", f.level)]
