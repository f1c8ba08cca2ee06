"""All checks in one place, and how they are run: a check never crashes or stalls doctor."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpctrain.doctor import frameworks, machine, mpi
from hpctrain.doctor.facts import Facts
from hpctrain.doctor.verdict import Check
from hpctrain.install import check_horovod, launchers_on
from hpctrain.world import read_affinity, read_core_map

__all__ = ["CHECKS", "examine"]

# A check runs a few programs, each within its own limit.
_STEPS = 5


def _launcher(facts: Facts) -> Check:
    trouble = facts.mpi4py_trouble
    return mpi.judge_launcher(facts.loaded, trouble, facts.match, facts.launchers)


def _abi(facts: Facts) -> Check:
    compiler = facts.which("mpicc")
    others = list(facts.launchers)
    if compiler:
        known = {path.resolve() for path, _ in others}
        beside = launchers_on([compiler.parent])
        others += [(path, version) for path, version in beside if path.resolve() not in known]
    return mpi.judge_abi(facts.loaded, facts.environ, facts.prefix, others)


def _allreduce(facts: Facts) -> Check:
    return mpi.judge_allreduce(facts.probe, facts.match)


def _threads(facts: Facts) -> Check:
    return mpi.judge_threads(facts.probe)


def _gpu_aware(facts: Facts) -> Check:
    return mpi.judge_gpu_aware(
        facts.probe,
        facts.loaded,
        facts.environ,
        num_gpus=facts.num_gpus,
        built_with_cuda=_ask_ompi_info(facts),
    )


def _ask_ompi_info(facts: Facts) -> bool | None:
    """Query Open MPI's own tool, the one next to its launcher."""
    if facts.loaded is None or facts.loaded.mpi.family != "openmpi" or facts.match.mpirun is None:
        return None
    tool = facts.match.mpirun.parent / "ompi_info"
    if not tool.exists():
        return None
    answer = facts.ask(str(tool), "--parsable", "--all", limit_s=30)
    key = "mpi_built_with_cuda_support:value:"
    lines = [line for line in answer.out.splitlines() if key in line]
    return lines[0].endswith("true") if lines else None


def _torch(facts: Facts) -> Check:
    return frameworks.judge_torch(
        facts.torch_answer,
        facts.torch,
        has_nvidia_device=Path("/dev/nvidiactl").exists(),
    )


def _nccl(facts: Facts) -> Check:
    return frameworks.judge_nccl(facts.torch, num_gpus=facts.num_gpus)


def _math(facts: Facts) -> Check:
    return frameworks.judge_math(facts.torch, machine.read_cpu_flags())


def _horovod(facts: Facts) -> Check:
    found = check_horovod(
        facts.python, environ=facts.child_environ, run=facts.probe_works, timeout_s=facts.limit_s
    )
    version = facts.torch.get("version")
    return frameworks.judge_horovod(
        found,
        num_gpus=facts.num_gpus,
        built_for=_read_horovods_torch(),
        torch=str(version) if version else None,
    )


def _read_horovods_torch() -> str | None:
    """Read which torch Horovod was built for, without importing it: it may crash."""
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            value = json.loads((Path(folder) / "metadata.json").read_text())
            return str(value["pytorch"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _cores(facts: Facts) -> Check:
    return machine.judge_cores(
        read_affinity(),
        read_core_map(),
        quota=machine.read_quota(),
        omp_num_threads=facts.environ.get("OMP_NUM_THREADS"),
    )


def _shm(facts: Facts) -> Check:
    return machine.judge_shm(machine.read_shm())


def _memlock(facts: Facts) -> Check:
    return machine.judge_memlock(machine.read_memlock(), machine.read_infiniband())


def _clock(facts: Facts) -> Check:
    return machine.judge_clock(machine.read_clock(facts.which, facts.ask))


def _batch(facts: Facts) -> Check:
    names = [tool for tools in machine.known_tools().values() for tool in tools]
    tools = {tool: path for tool in names if (path := facts.which(tool))}
    srun = tools.get("srun")
    plugins = facts.ask(str(srun), "--mpi=list", limit_s=15) if srun else None
    loaded = facts.loaded
    return machine.judge_batch(tools, plugins, loaded.mpi if loaded else None)


CHECKS: tuple[tuple[str, Callable[[Facts], Check]], ...] = (
    ("MPI and launcher", _launcher),
    ("mpi4py ABI", _abi),
    ("two-rank allreduce", _allreduce),
    ("MPI threads", _threads),
    ("torch", _torch),
    ("Horovod", _horovod),
    ("GPU-aware MPI", _gpu_aware),
    ("NCCL", _nccl),
    ("cores and threads", _cores),
    ("CPU math", _math),
    ("/dev/shm", _shm),
    ("locked memory", _memlock),
    ("clock", _clock),
    ("batch system", _batch),
)


def examine(
    facts: Facts, checks: Sequence[tuple[str, Callable[[Facts], Check]]] = CHECKS
) -> Iterator[Check]:
    """Run all checks, one after the other; each yields a verdict, whatever happens in it."""
    for name, check in checks:
        yield _run(name, check, facts)


def _run(name: str, check: Callable[[Facts], Check], facts: Facts) -> Check:
    """Run a check in another thread, so that even one that never returns is bounded."""
    verdict = Check(
        name=name,
        status="broken",
        text=f"the check did not end within {_STEPS * facts.limit_s:g} s",
        cure="something it checks hangs (a file system, a driver); look for processes in state D",
    )

    def work() -> None:
        nonlocal verdict
        try:
            verdict = check(facts)
        except Exception as error:  # whatever it is, it is a finding
            verdict = Check(
                name=name,
                status="broken",
                text=f"the check failed: {type(error).__name__}: {error}",
                cure="report this as an hpctrain bug, with the output of `doctor --json`",
            )

    worker = threading.Thread(target=work, daemon=True, name=f"doctor: {name}")
    worker.start()
    worker.join(_STEPS * facts.limit_s)
    return verdict
