"""The launch line of each launcher, for the ranks and for one process on every node. Pure."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.submit.plan import Plan

__all__ = ["each_node_words", "launch_words", "local_rank_variable", "passed_signals"]


def launch_words(plan: Plan) -> list[str]:
    """The words that start all ranks; the command follows."""
    engine = [f"--environment={_edf(plan)}"] if plan.template_name == "slurm-edf" else []
    return [*_RANKS[plan.template.launcher](plan), *plan.site.launch_options, *engine]


def each_node_words(plan: Plan) -> list[str]:
    """The words that start one process on every node, without MPI."""
    nodes = str(plan.request.num_nodes)
    if plan.template.batch == "slurm":
        return [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
            "--mpi=none",
        ]
    if plan.template.launcher == "mpiexec":
        return ["mpiexec", "-n", nodes, *_per_node(plan.mpi, 1)]
    if plan.template.launcher == "jsrun":
        return ["jsrun", "-n", nodes, "-r", "1", "-a", "1", "-c", "1"]
    return ["flux", "run", "-N", nodes, "-n", nodes]


def local_rank_variable(plan: Plan) -> str:
    """The variable in which the launcher tells a rank its place on the node."""
    by_mpi = {
        "pals": "PALS_LOCAL_RANKID",
        "mpich": "MPI_LOCALRANKID",
        "openmpi": "OMPI_COMM_WORLD_LOCAL_RANK",
    }
    by_launcher = {
        "srun": "SLURM_LOCALID",
        "jsrun": "JSM_NAMESPACE_LOCAL_RANK",
        "flux": "FLUX_TASK_LOCAL_ID",
    }
    return by_launcher.get(plan.template.launcher) or by_mpi[plan.mpi]


def passed_signals(plan: Plan) -> dict[str, str]:
    """What the batch shell hands to the launcher for each signal it gets; "" only makes it wait.

    Seen: srun passes USR2 on to its ranks, but kills them on TERM, which Slurm itself sends them
    where a job is cancelled. MPICH's mpirun passes TERM on, and dies of USR2.
    """
    signal = plan.request.signal
    if plan.template.launcher == "srun":
        return {"TERM": "", signal: signal}
    passed = "TERM" if plan.mpi == "mpich" and signal in ("USR2", "HUP") else signal
    return {"TERM": "TERM", signal: passed}


def _edf(plan: Plan) -> str:
    """The environment definition file: a name in the engine's search path, or a path."""
    image = plan.request.image or ""
    is_name = not image.endswith(".toml") or image.startswith(("/", "./", "../"))
    return image if is_name else f"./{image}"


def _srun(plan: Plan) -> list[str]:
    words = ["srun", f"--nodes={plan.request.num_nodes}", f"--ntasks={plan.num_ranks}"]
    words += [f"--ntasks-per-node={plan.ranks_per_node}", f"--mpi={plan.mpi}"]
    # A rank that dies without MPI noticing would leave the others waiting until the walltime.
    words.append("--kill-on-bad-exit=1")
    if plan.site.cpu_masks:
        words.append(f"--cpu-bind=mask_cpu:{','.join(plan.site.cpu_masks[: plan.ranks_per_node])}")
    return words


def _mpirun(plan: Plan) -> list[str]:
    return ["mpirun", "-n", str(plan.num_ranks), *_per_node(plan.mpi, plan.ranks_per_node)]


def _mpiexec(plan: Plan) -> list[str]:
    words = ["mpiexec", "-n", str(plan.num_ranks), *_per_node(plan.mpi, plan.ranks_per_node)]
    if plan.mpi == "pals":
        if plan.site.cpu_masks:
            lists = ":".join(plan.site.cpu_masks[: plan.ranks_per_node])
            words += ["--cpu-bind", f"list:{lists}"]
        elif plan.cpus_per_rank:
            words += ["--depth", str(plan.cpus_per_rank), "--cpu-bind", "depth"]
    return words


def _per_node(mpi: str, count: int) -> list[str]:
    if mpi == "openmpi":  # which binds small jobs to one core a rank unless told otherwise
        return ["--map-by", f"ppr:{count}:node", "--bind-to", "none"]
    return ["--ppn" if mpi == "pals" else "-ppn", str(count)]


def _jsrun(plan: Plan) -> list[str]:
    # One resource set per rank: its core block and its GPU stay together.
    words = ["jsrun", "-n", str(plan.num_ranks), "-r", str(plan.ranks_per_node), "-a", "1"]
    words += ["-g", "1" if plan.gpus_per_node else "0"]
    return [*words, "-c", str(plan.cpus_per_rank or 1), "-b", f"packed:{plan.cpus_per_rank or 1}"]


def _flux(plan: Plan) -> list[str]:
    words = ["flux", "run", "-N", str(plan.request.num_nodes), "-n", str(plan.num_ranks)]
    if plan.cpus_per_rank:
        words += ["-c", str(plan.cpus_per_rank)]
    if plan.gpus_per_node and plan.gpus_per_node == plan.ranks_per_node:
        words += ["-g", "1"]
    return words


_RANKS: dict[str, Callable[[Plan], list[str]]] = {
    "srun": _srun,
    "mpirun": _mpirun,
    "mpiexec": _mpiexec,
    "jsrun": _jsrun,
    "flux": _flux,
}
