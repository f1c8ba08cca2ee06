"""Compiling a Horovod wheel into the cache, once per set of bindings, never half."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpctrain import log
from hpctrain.errors import InstallError
from hpctrain.install.horovod import HOROVOD_VERSION, cache, recipe
from hpctrain.install.horovod.cache import bindings, cache_key
from hpctrain.install.horovod.diagnosis import diagnose
from hpctrain.install.horovod.facts import BUILD_NEEDS, RUNTIME_NEEDS, BuildFacts
from hpctrain.install.lock import held
from hpctrain.install.mpi import lacks_headers
from hpctrain.install.process import TooLongError, interruptible, run_logged

__all__ = ["BuildOptions", "build_wheel", "percent", "shown"]

_SPECS = {"cmake": "cmake>=3.26,<5", "setuptools": "setuptools>=70,<81"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """How to build.

    Attributes:
        cache_dir: Folder of all cached wheels.
        sdist: Horovod's source archive, for machines without network; None downloads it.
        jobs: Compilers at a time; None takes what cores and memory allow.
        force: Build again even if the wheel is cached.
        limit_s: Time limit of the compilation.
        lock_wait_s: How long to wait for another build of the same wheel.
    """

    cache_dir: Path
    sdist: Path | None = None
    jobs: int | None = None
    force: bool = False
    limit_s: float = 3600.0
    lock_wait_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise InstallError(f"--jobs {self.jobs}: give 1 or more")
        if self.sdist is not None and not self.sdist.is_file():
            raise InstallError(
                f"--sdist {self.sdist}: no such file; give the path of "
                f"horovod-{HOROVOD_VERSION}.tar.gz"
            )


def build_wheel(facts: BuildFacts, options: BuildOptions, environ: Mapping[str, str]) -> Path:
    """Return the cached wheel for these facts, compiling it first if need be.

    Raises:
        InstallError: it cannot be built; one paragraph with cause, log and cure.
    """
    key = cache_key(facts)
    home = options.cache_dir / key
    found = None if options.force else cache.cached_wheel(home)
    if found:
        log.notice(f"Horovod {HOROVOD_VERSION}: using the cached wheel {found}")
        return found
    _require_tools(facts, environ)
    try:
        with held(
            options.cache_dir / f"{key}.lock", what="building Horovod", wait_s=options.lock_wait_s
        ):
            found = None if options.force else cache.cached_wheel(home)
            return found or _build_locked(facts, home, options, environ)
    except OSError as error:
        raise InstallError(
            f"Horovod cannot be built in {options.cache_dir}: {error}. Give a folder that can be "
            "written to with --cache-dir or XDG_CACHE_HOME, and one for temporary files in TMPDIR"
        ) from error


def _require_tools(facts: BuildFacts, environ: Mapping[str, str]) -> None:
    """Refuse before anything is downloaded what cannot succeed."""
    missing = []
    if facts.compiler is None:
        missing.append(
            "no C++ compiler (g++, c++, clang++ or CXX) was found (Debian and Ubuntu: `apt install "
            "g++`)"
        )
    if not shutil.which("make", path=environ.get("PATH")):
        missing.append("`make` was not found (Debian and Ubuntu: `apt install make`)")
    if facts.mpi.mpicxx is None:
        missing.append(
            f"no mpicxx of {facts.mpi.version} was found near {facts.mpi.library} or on PATH (load "
            "its module, or install its development package)"
        )
    elif lacks_headers(facts.mpi.mpicxx, environ):
        package = "libopenmpi-dev" if facts.mpi.version.family == "openmpi" else "libmpich-dev"
        missing.append(
            f"{facts.mpi.mpicxx} finds no mpi.h (Debian and Ubuntu: `apt install {package}`)"
        )
    if missing:
        raise InstallError(
            f"Horovod {HOROVOD_VERSION} cannot be compiled here: {'; '.join(missing)}. Install "
            "what is missing, then run `hpctrain horovod build` again. Everything but the horovod "
            "engine works without it."
        )


def _build_locked(
    facts: BuildFacts, home: Path, options: BuildOptions, environ: Mapping[str, str]
) -> Path:
    root = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    prefix = f"hpctrain-horovod-{home.name.rsplit('_', 1)[-1]}-"
    cache.clean_leftovers(home, root, prefix)
    staging = cache.staging_folder(home)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    log_file = home / "build.log"
    log_file.write_text("", encoding="utf-8")
    started = time.monotonic()
    try:
        with interruptible():
            wheel = _compile(facts, work, staging, log_file, options, environ)
            final = cache.store(wheel, home, bindings(facts))
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(staging, ignore_errors=True)
    log.notice(f"built {final} in {time.monotonic() - started:.0f} s")
    return final


def _compile(
    facts: BuildFacts,
    work: Path,
    staging: Path,
    log_file: Path,
    options: BuildOptions,
    environ: Mapping[str, str],
) -> Path:
    jobs = options.jobs or recipe.jobs_for(len(os.sched_getaffinity(0)), _free_memory())
    _prepare(facts, work)
    recipe.fetch_headers(facts.python, work / "headers", environ)
    includes = recipe.header_folders(facts.python, work / "headers")
    env = recipe.build_environment(facts, jobs=jobs, work=work, includes=includes, environ=environ)
    pip = [str(facts.python.executable), "-m", "pip"]
    missing = _missing_tools(facts, environ)
    if missing:
        tools = [*pip, "install", "--target", str(work / "tools"), *missing]
        _run("fetching its build tools", tools, log_file, env, limit_s=600)
    sdist = options.sdist
    if sdist is None:
        download = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        download += ["-d", str(work), f"horovod=={HOROVOD_VERSION}"]
        _run("downloading its sources", download, log_file, env, limit_s=600)
        sdist = next(work.glob("horovod-*"))
    gpu = f"no CUDA ({facts.why_no_cuda})"
    if facts.cuda is not None:
        gpu = f"CUDA {facts.cuda.version} and NCCL {facts.cuda.nccl.version}"
    log.notice(
        f"compiling Horovod {HOROVOD_VERSION} for torch {facts.torch.version}, "
        f"{facts.mpi.version}, {gpu}; {jobs} at a time; log: {log_file}"
    )
    # pip's own cache would hand back a wheel that is bound to another torch or MPI.
    wheel = [*pip, "wheel", "-v", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    wheel += ["-w", str(staging), str(sdist)]
    with shown(f"compiling Horovod {HOROVOD_VERSION}") as update:

        def watch(line: str) -> None:
            done = percent(line)
            if done is not None:
                update(done)

        _run("compiling it", wheel, log_file, env, limit_s=options.limit_s, on_line=watch)
    return next(staging.glob("horovod-*.whl"))


def _run(
    doing: str,
    command: list[str],
    log_file: Path,
    env: Mapping[str, str],
    *,
    limit_s: float,
    on_line: object = None,
) -> None:
    watcher = on_line if callable(on_line) else (lambda line: None)
    try:
        code = run_logged(command, log_file=log_file, env=env, limit_s=limit_s, on_line=watcher)
    except TooLongError:
        _fail(doing, log_file, f"it exceeded {limit_s:.0f} s and was killed")
    if code != 0:
        _fail(doing, log_file)


def _fail(doing: str, log_file: Path, why: str = "") -> NoReturn:
    found = diagnose(log_file.read_text(encoding="utf-8", errors="replace"))
    cure = "use more cores (--jobs) or a less busy machine" if why else found.cure
    raise InstallError(
        f"Horovod {HOROVOD_VERSION} could not be built: {doing} failed because {why or found.why}. "
        f"The whole log is {log_file}. To fix it: {cure}; then run `hpctrain horovod build` "
        "again. Everything but the horovod engine works without it."
    )


def _prepare(facts: BuildFacts, work: Path) -> None:
    """Fill the build's private folder: shims to go first on PATH, NCCL in Horovod's layout."""
    (work / "tmp").mkdir()
    (work / "bin").mkdir()
    if facts.compiler is None or facts.mpi.mpicxx is None:
        raise InstallError("no compiler or no mpicxx")  # _require_tools was called first
    scripts = {
        "cxx": recipe.compiler_wrapper(facts.compiler, recipe.relative_rpath(facts)),
        "mpicxx": recipe.shim(facts.mpi.mpicxx),
    }
    if facts.mpi.mpirun is not None:
        scripts["mpiexec"] = recipe.shim(facts.mpi.mpirun)
    for name, text in scripts.items():
        (work / "bin" / name).write_text(text, encoding="utf-8")
        (work / "bin" / name).chmod(0o755)
    if facts.cuda is not None:
        nccl = facts.cuda.nccl
        (work / "nccl" / "lib").mkdir(parents=True)
        (work / "nccl" / "include").symlink_to(nccl.include)
        # pip's package has libnccl.so.2 alone, and the linker looks for libnccl.so.
        (work / "nccl" / "lib" / "libnccl.so").symlink_to(nccl.library)


def _missing_tools(facts: BuildFacts, environ: Mapping[str, str]) -> list[str]:
    """Requirements for pip of what the build needs and the environment lacks."""
    have = facts.python.packages
    missing = [name for name in (*BUILD_NEEDS, *RUNTIME_NEEDS) if not have.get(name)]
    if "cmake" in missing and shutil.which("cmake", path=environ.get("PATH")):
        missing.remove("cmake")
    return [_SPECS.get(name, name) for name in missing]


def _free_memory() -> int:
    """Memory that may still be used, by the kernel's count and by the container's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return free
    return min(free, int(limit) - used) if limit.isdigit() else free


_STEP = 10


def percent(line: str) -> int | None:
    """Pure: how far a line of make's output says it is, as `[ 45%] Building` does."""
    match = re.match(r"\s*\[\s*(\d{1,3})%\]", line)
    return min(100, int(match.group(1))) if match else None


@contextmanager
def shown(title: str) -> Iterator[Callable[[int], None]]:
    """Give a function to call with the percentage reached, while the block runs."""
    if sys.stderr.isatty():
        with _bar(title) as update:
            yield update
        return
    started = time.monotonic()
    next_step = _STEP

    def tell(done: int) -> None:
        nonlocal next_step
        if done >= next_step:
            log.notice(f"{title}: {done} %, {time.monotonic() - started:.0f} s")
            next_step = (done // _STEP + 1) * _STEP

    yield tell


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("hpctrain: {task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=100)
        yield lambda done: progress.update(task, completed=done)
