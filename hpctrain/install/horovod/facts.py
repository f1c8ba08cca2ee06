"""What an interpreter and its machine offer for a Horovod build: inspected, never guessed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import InstallError, LaunchError
from hpctrain.install.horovod import cuda
from hpctrain.install.mpi import LoadedMpi, matching_mpirun, probe_mpi4py
from hpctrain.mpi_version import MpiVersion

__all__ = [
    "BUILD_NEEDS",
    "RUNTIME_NEEDS",
    "BuildFacts",
    "MpiFacts",
    "PythonFacts",
    "TorchFacts",
    "collect",
    "probe_interpreter",
]

# What Horovod imports when it runs, and what its build needs besides.
RUNTIME_NEEDS = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml")
BUILD_NEEDS = ("cmake", "setuptools", "wheel")

_PROBE = """
import json, os, platform, sys, sysconfig
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
include = sysconfig.get_path("include")
facts = {
    "executable": sys.executable,
    "prefix": os.path.realpath(sys.prefix),
    "private": sys.prefix != sys.base_prefix or os.path.isdir(sys.prefix + "/conda-meta"),
    "site_packages": os.path.realpath(sysconfig.get_path("platlib")),
    "paths": [os.path.realpath(p) for p in sys.path if p.endswith("-packages")],
    "soabi": sysconfig.get_config_var("SOABI"),
    "tag": "cp%d%d%s" % (sys.version_info[0], sys.version_info[1], getattr(sys, "abiflags", "")),
    "include": include,
    "machine": platform.machine(),
    "libc": " ".join(platform.libc_ver()),
    "packages": {name: version(name) for name in sys.argv[1:]},
    "torch": None,
}
if "--no-torch" not in sys.argv:
    try:
        import torch
    except Exception as error:
        facts["torch_error"] = "%s: %s" % (type(error).__name__, error)
    else:
        facts["torch"] = {
            "version": str(torch.__version__),
            "build": str(torch.version.git_version),
            "cxx11_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI),
            "cuda": torch.version.cuda,
            "hip": getattr(torch.version, "hip", None),
        }
print(json.dumps(facts))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchFacts:
    """The torch that the extension is compiled against."""

    version: str
    build: str
    cxx11_abi: bool
    cuda: str | None
    hip: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonFacts:
    """The interpreter that Horovod is built for and installed into.

    `private` is true in a venv or conda environment, whose inner paths may be made relative.
    """

    executable: Path
    prefix: Path
    private: bool
    site_packages: Path
    paths: tuple[Path, ...]
    soabi: str
    tag: str
    include: Path
    machine: str
    libc: str
    packages: Mapping[str, str | None]
    torch: TorchFacts | None
    torch_error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiFacts:
    """The MPI that mpi4py loads in that interpreter, and the compiler wrapper of that MPI."""

    version: MpiVersion
    library: Path
    mpicxx: Path | None
    mpirun: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildFacts:
    """Everything a build depends on. `cuda` is None for a build without GPUs."""

    python: PythonFacts
    torch: TorchFacts
    mpi: MpiFacts
    cuda: cuda.CudaFacts | None
    why_no_cuda: str
    compiler: Path | None
    compiler_version: str


def probe_interpreter(
    python: Path, *, with_torch: bool = True, environ: Mapping[str, str], timeout_s: float = 180.0
) -> PythonFacts:
    """Run `python` once and query it about itself and its torch.

    Raises:
        InstallError: the interpreter does not run.
    """
    names = [
        *RUNTIME_NEEDS,
        *BUILD_NEEDS,
        "horovod",
        "pip",
        *([] if with_torch else ["--no-torch"]),
    ]
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE, *names],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{python} failed to run: {error}; give a working Python") from error
    if done.returncode != 0 or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InstallError(
            f"{python} cannot be queried for its packages: {last}. If importing torch crashes "
            "there, fix torch first: `python -c 'import torch'` must work"
        )
    facts = json.loads(done.stdout.splitlines()[-1])
    for name in ("executable", "prefix", "site_packages", "include"):
        facts[name] = Path(facts[name])
    facts["paths"] = tuple(Path(path) for path in facts["paths"])
    facts["torch"] = TorchFacts(**facts["torch"]) if facts["torch"] else None
    return PythonFacts(**facts)


def collect(python: Path, *, environ: Mapping[str, str], want_cuda: bool | None) -> BuildFacts:
    """Inspect everything a Horovod build for `python` depends on.

    Args:
        python: The interpreter to build for.
        environ: The user's environment: PATH, CXX, CUDA_HOME, NCCL_HOME.
        want_cuda: True insists on CUDA and NCCL, False does without, None takes them if usable.

    Raises:
        InstallError: torch or mpi4py is missing, torch is a ROCm build, or CUDA was insisted on
            and is not usable.
    """
    interpreter = probe_interpreter(python, environ=environ)
    torch = interpreter.torch
    if torch is None:
        raise InstallError(
            f"Horovod is compiled against torch, and {python} cannot import it "
            f"({interpreter.torch_error}); install torch there first, then build again"
        )
    if torch.hip:
        raise InstallError(
            f"torch {torch.version} is a ROCm build (HIP {torch.hip}); building Horovod for "
            "ROCm is not supported. Use the `torch` or `mpi` engine, which need no build"
        )
    gpu, why_no_cuda = cuda.find(
        torch.cuda, packages=interpreter.paths, environ=environ, wanted=want_cuda
    )
    compiler = _compiler(environ)
    return BuildFacts(
        python=interpreter,
        torch=torch,
        mpi=_mpi_facts(interpreter, environ),
        cuda=gpu,
        why_no_cuda=why_no_cuda,
        compiler=compiler,
        compiler_version=_first_line([str(compiler), "-dumpfullversion"]) if compiler else "",
    )


def _mpi_facts(interpreter: PythonFacts, environ: Mapping[str, str]) -> MpiFacts:
    loaded = probe_mpi4py(interpreter.executable)
    if loaded is None:
        raise InstallError(
            f"Horovod is compiled against the MPI that mpi4py uses, and mpi4py of "
            f"{interpreter.executable} finds none; load the site's MPI module or `pip install "
            "mpi4py mpich`, then build again"
        )
    search = environ.get("PATH", "")
    inside = str(interpreter.prefix / "bin")
    try:
        mpirun: Path | None = matching_mpirun(loaded, f"{search}:{inside}")[0]
    except LaunchError:
        mpirun = None
    return MpiFacts(
        version=loaded.mpi,
        library=Path(loaded.library),
        mpicxx=_mpicxx(loaded, mpirun, search),
        mpirun=mpirun,
    )


def _mpicxx(loaded: LoadedMpi, mpirun: Path | None, search: str) -> Path | None:
    """Find the C++ wrapper of that MPI: next to its library or launcher, then on PATH."""
    folders = [parent / "bin" for parent in Path(loaded.library).parents[1:5]]
    if mpirun is not None:
        folders[:0] = [mpirun.parent, mpirun.resolve().parent]
    folders += [Path(folder) for folder in search.split(":") if folder]
    openmpi = loaded.mpi.family == "openmpi"
    for folder in folders:
        for name in (f"mpicxx.{loaded.mpi.family}", "mpicxx", "mpic++"):
            path = shutil.which(name, path=str(folder))
            # `-showme` is Open MPI's only; MPICH derivatives use `-show`.
            if path and bool(_first_line([path, "-showme:version"], "Open MPI")) == openmpi:
                return Path(path)
    return None


def _compiler(environ: Mapping[str, str]) -> Path | None:
    for name in (environ.get("CXX", ""), "g++", "c++", "clang++"):
        path = shutil.which(name, path=environ.get("PATH")) if name else None
        if path:
            return Path(path)
    return None


def _first_line(command: list[str], containing: str = "") -> str:
    """First line a quick command prints that contains the text, or nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = (done.stdout + done.stderr).splitlines() if done.returncode == 0 else []
    return next((line.strip() for line in lines if containing in line), "")
