"""Judges torch, its GPUs, NCCL, its math on the CPU, and Horovod. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.doctor.verdict import Check
from hpctrain.install import HorovodCheck
from hpctrain.programs import Answer

__all__ = ["judge_horovod", "judge_math", "judge_nccl", "judge_torch"]

_NO_TORCH = "unknown, because torch does not work"


def judge_torch(answer: Answer, torch: Mapping[str, object], *, has_nvidia_device: bool) -> Check:
    """Does torch work, and does it see the GPUs that the machine has?"""
    name = "torch"
    if not torch:
        return Check(
            name=name,
            status="broken",
            text=f"torch cannot be used: {answer.reason}",
            cure="on a slow file system, raise --time-limit"
            if answer.hung
            else "install it again: `pip install --force-reinstall torch`",
        )
    gpus = list(torch["gpus"]) if isinstance(torch["gpus"], list) else []
    built = (
        f"CUDA {torch['cuda']}"
        if torch["cuda"]
        else f"ROCm {torch['hip']}"
        if torch["hip"]
        else "CPUs only"
    )
    seen = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    text = f"{torch['version']}, built for {built}, sees {seen}"
    if not torch["compute_works"] or torch["gpu_computes"] is False:
        return Check(
            name=name,
            status="broken",
            text=f"{text}; a matrix product gives a wrong result",
            cure="do not train on this node; have its memory or its GPU checked",
            details=torch,
        )
    if has_nvidia_device and not gpus:
        cure = (
            "check CUDA_VISIBLE_DEVICES, the job's GPU request and the driver (`nvidia-smi`)"
            if torch["cuda"]
            else "install a torch built for CUDA"
        )
        return Check(
            name=name,
            status="warning",
            text=f"{text}, although the machine has an NVIDIA driver",
            cure=cure,
            details=torch,
        )
    return Check(name=name, status="ok", text=text, details=torch)


def judge_nccl(torch: Mapping[str, object], *, num_gpus: int) -> Check:
    """Is NCCL there for the GPUs?"""
    name = "NCCL"
    if not torch:
        return Check(name=name, status="ok", text=_NO_TORCH)
    if num_gpus == 0:
        return Check(name=name, status="ok", text="not needed, there is no GPU")
    if torch["nccl"]:
        return Check(
            name=name,
            status="ok",
            text=f"{torch['nccl']}, the one inside torch",
            details={"version": torch["nccl"]},
        )
    return Check(
        name=name,
        status="warning",
        text=f"torch {torch['version']} sees {num_gpus} GPUs but has no NCCL",
        cure="install a torch built with NCCL, or gradients go through host memory",
    )


def judge_math(torch: Mapping[str, object], cpu_flags: frozenset[str]) -> Check:
    """Does torch use the vector units of this CPU and a fast math library?

    Args:
        torch: Torch's facts.
        cpu_flags: The features the kernel reports (`avx2`, `sve`, ...).
    """
    name = "CPU math"
    if not torch:
        return Check(name=name, status="ok", text=_NO_TORCH)
    capability = str(torch["cpu_capability"])
    blas = (
        f"MKL {torch['mkl']}"
        if torch["mkl"]
        else {"open": "OpenBLAS"}.get(str(torch["blas"]), str(torch["blas"] or "no BLAS"))
    )
    onednn = f"oneDNN {torch['onednn']}" if torch["mkldnn"] else "no oneDNN"
    if torch["mkldnn"] and torch["acl"]:
        onednn += " with the Arm Compute Library"
    vectors = sorted({"avx2", "avx512f", "amx_tile", "asimd", "sve", "sve2", "bf16"} & cpu_flags)
    text = f"{blas}, {onednn}; kernels for {capability}, the CPU has {' '.join(vectors) or 'none'}"
    details = {
        "capability": capability,
        "blas": blas,
        "onednn": torch["onednn"] if torch["mkldnn"] else None,
        "cpu_features": vectors,
    }
    if capability.lower() in {"default", "no avx"} and "avx2" in cpu_flags:
        return Check(
            name=name,
            status="warning",
            text=f"{text}: torch leaves the vector units unused",
            cure="unset ATEN_CPU_CAPABILITY, or install a torch that is built for this CPU",
            details=details,
        )
    if not torch["lapack"] or (not torch["blas"] and not torch["mkl"]):
        return Check(
            name=name,
            status="warning",
            text=f"{text}: torch was built without a math library",
            cure="install torch from its wheels, or build it with MKL or OpenBLAS",
            details=details,
        )
    return Check(name=name, status="ok", text=text, details=details)


def judge_horovod(
    found: HorovodCheck, *, num_gpus: int, built_for: str | None, torch: str | None
) -> Check:
    """Is Horovod there, does it fit this torch and MPI, and does it work?

    Args:
        found: What its own check found.
        num_gpus: GPUs that torch sees.
        built_for: The torch that Horovod says it was built for; None when it does not say.
        torch: The torch that is here.
    """
    name = "Horovod"
    details = found.as_dict()
    if found.status == "missing":
        return Check(
            name=name,
            status="warning",
            text="not installed; the other engines work without it",
            cure=found.cure,
            details=details,
        )
    built = ", ".join(part for part, yes in found.built.items() if yes) or "nothing known"
    bound = found.bound.get("torch") or built_for
    mpi = found.bound.get("mpi_family")
    text = f"{found.version}, built with {built}" + (
        f", linked to torch {bound}{f' and {mpi}' if mpi else ''}" if bound else ""
    )
    if found.status != "ok":
        return Check(
            name=name,
            status="broken",
            text=f"{text}: {'; '.join(found.problems)}",
            cure=found.cure,
            details=details,
        )
    if built_for and torch and built_for != torch:
        return Check(
            name=name,
            status="warning",
            text=f"{text}, but torch {torch} is installed: it may crash or give wrong results",
            cure="run `hpctrain horovod build`",
            details=details,
        )
    if num_gpus and not found.built.get("nccl"):
        return Check(
            name=name,
            status="warning",
            text=f"{text}: without NCCL, GPU gradients go through host memory",
            cure="run `hpctrain horovod build --cuda`",
            details=details,
        )
    run = "; two ranks reduced with it" if found.run == "ok" else ""
    return Check(name=name, status="ok", text=text + run, details=details)
