"""Finding the CUDA toolkit and NCCL that fit a torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import InstallError

__all__ = ["CudaFacts", "NcclFacts", "find", "nccl_version"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclFacts:
    """NCCL's header folder, its library and the version the header states."""

    include: Path
    library: Path
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaFacts:
    """A CUDA toolkit with its version, and NCCL."""

    home: Path
    version: str
    nccl: NcclFacts


def find(
    torch_cuda: str | None,
    *,
    packages: Iterable[Path],
    environ: Mapping[str, str],
    wanted: bool | None,
) -> tuple[CudaFacts | None, str]:
    """Find a toolkit and an NCCL for a torch built for CUDA `torch_cuda`.

    Args:
        torch_cuda: `torch.version.cuda`, None for a CPU build.
        packages: site-packages folders, where pip puts NCCL.
        environ: CUDA_HOME, NCCL_HOME (also with HOROVOD_ before them) and PATH come first.
        wanted: True raises if something is missing, False skips the search.

    Returns:
        What was found, or None with the reason.

    Raises:
        InstallError: `wanted` is True and CUDA cannot be used.
    """
    if wanted is False:
        return None, "CUDA was disabled"
    found, why = _find(torch_cuda, packages, environ)
    if found is None and wanted:
        raise InstallError(
            f"--cuda was asked for, but {why}. Set CUDA_HOME and NCCL_HOME to where they are "
            "(module load cuda nccl), install a CUDA build of torch, or build with --no-cuda"
        )
    return found, why


def _find(
    torch_cuda: str | None, packages: Iterable[Path], environ: Mapping[str, str]
) -> tuple[CudaFacts | None, str]:
    if torch_cuda is None:
        return None, "torch is a CPU build"
    home = _toolkit(environ)
    if home is None:
        return None, f"torch is built for CUDA {torch_cuda} and no nvcc was found"
    version = _nvcc_version(home / "bin" / "nvcc")
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        return None, f"torch is built for CUDA {torch_cuda} and {home} is CUDA {version or '?'}"
    nccl = _nccl([*packages], home, environ)
    if nccl is None:
        return None, "no NCCL with header and library was found"
    return CudaFacts(home=home, version=version, nccl=nccl), ""


def _toolkit(environ: Mapping[str, str]) -> Path | None:
    named = [environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    homes = [Path(home) for home in named if home]
    if on_path:
        homes += [Path(on_path).resolve().parents[1]]
    homes.append(Path("/usr/local/cuda"))
    return next((home for home in homes if (home / "bin" / "nvcc").is_file()), None)


def _nvcc_version(nvcc: Path) -> str:
    try:
        done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"\bV(\d+\.\d+(?:\.\d+)?)", done.stdout)
    return match.group(1) if match else ""


def _nccl(packages: list[Path], cuda_home: Path, environ: Mapping[str, str]) -> NcclFacts | None:
    named = [environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT")]
    # pip's NCCL before the system's: it is the one this torch loads.
    homes = [Path(home) for home in named if home]
    homes += [folder / "nvidia" / "nccl" for folder in packages]
    homes += [cuda_home, Path("/usr")]
    for home in homes:
        header = home / "include" / "nccl.h"
        library = _nccl_library(home)
        if header.is_file() and library is not None:
            version = nccl_version(header.read_text(encoding="utf-8", errors="replace"))
            return NcclFacts(include=header.parent, library=library, version=version)
    return None


def _nccl_library(home: Path) -> Path | None:
    for folder in ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"):
        for name in ("libnccl.so", "libnccl.so.2"):
            if (home / folder / name).exists():
                return home / folder / name
    return None


def nccl_version(header: str) -> str:
    """Pure: the version that the text of nccl.h states, as `2.28.9`."""
    parts = []
    for name in ("MAJOR", "MINOR", "PATCH"):
        match = re.search(rf"#\s*define\s+NCCL_{name}\s+(\d+)", header)
        parts.append(match.group(1) if match else "?")
    return ".".join(parts)
