"""Worker processes that fetch samples: torch's own, started so that MPI is not forked.

And why they cannot be started: what cannot be sent, what reads the script.
"""

from __future__ import annotations

import ast
import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpctrain.data.mapped import MapSource
from hpctrain.data.partition import Indices
from hpctrain.data.source import Batch
from hpctrain.errors import ConfigError, DataError

__all__ = [
    "METHODS",
    "Job",
    "WorkerOptions",
    "Workers",
    "explain_start",
    "explain_unpicklable",
    "has_main_guard",
    "trouble_with_function",
]


METHODS = ("forkserver", "spawn")
_DEATH_S = 0.2
_NO_MPI = "MPI4PY_RC_INITIALIZE"

Job = tuple[Indices, int, Indices | None]
"""Which samples, the epoch's seed, and the keys of their random numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """How workers are started and how far they run ahead."""

    num_workers: int = 0
    depth: int = 2
    """Batches ahead for each worker."""
    start_method: str = "forkserver"
    timeout_s: float = 0.0
    """How long to wait for a batch; 0 waits as long as the workers live, and looks every 5 s."""
    initialize: Callable[[int], None] | None = None
    """Called in every worker with its number, at its start."""

    def __post_init__(self) -> None:
        """Refuse what cannot be started."""
        if self.num_workers < 0 or self.depth < 1 or self.timeout_s < 0:
            raise ConfigError(
                f"num_workers={self.num_workers} and timeout_s={self.timeout_s:g} must not be "
                f"negative, and prefetch={self.depth} must be at least 1 for workers"
            )
        if self.start_method not in METHODS:
            raise ConfigError(
                f"start_method={self.start_method!r} is not possible: a fork after MPI_Init is "
                f"unsafe; choose from {', '.join(METHODS)}"
            )


class Workers:
    """Processes that fetch batches in order; they stay from epoch to epoch.

    One that raises or dies raises here, with its traceback or its signal.
    """

    def __init__(self, source: MapSource | IterableDataset[Any], options: WorkerOptions, seed: int):
        self._jobs = _Jobs()
        self._source = source
        self._initialize = options.initialize
        streaming = isinstance(source, IterableDataset)
        context = multiprocessing.get_context(options.start_method)
        if options.start_method == "forkserver":
            # Imports torch once for all workers; the script is left out, for there it could start
            # what only ranks may start.
            context.set_forkserver_preload([__name__])
        self._loader: DataLoader[Any] = DataLoader(
            source if streaming else _Fetch(source),  # type: ignore[arg-type]
            sampler=None if streaming else self._jobs,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=options.num_workers,
            prefetch_factor=options.depth,
            persistent_workers=not streaming,
            multiprocessing_context=context,
            timeout=options.timeout_s,
            worker_init_fn=options.initialize,
            generator=torch.Generator().manual_seed(seed),  # the model's is left alone
        )

    def fetch(self, jobs: Iterable[Job] = ()) -> Iterator[Batch]:
        """The batches of these jobs, in order; a stream's own batches need none."""
        self._jobs.now = jobs
        with _without_mpi(), _without_warnings():
            batches = self._start()
        num_batches = 0
        try:
            for batch in batches:
                num_batches += 1
                yield batch
        except (RuntimeError, OSError, EOFError) as error:
            # A worker that dies while it hands memory over is seen as a broken connection.
            workers = getattr(batches, "_workers", ())
            if num_batches == 0:
                _refuse_start(workers)
            if (death := _find_death(workers)) is not None:
                raise DataError(death) from error
            raise

    def _start(self) -> Iterator[Batch]:
        try:
            with warnings.catch_warnings():
                # Torch recommends a fork, which MPI does not survive.
                warnings.filterwarnings("ignore", "Got pickle error when attempting to start")
                return iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            told = explain_unpicklable(self._source, self._initialize, error)
        raise ConfigError(told)  # without the pickler's own traceback, which names nothing


def _refuse_start(workers: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Refuse what ended a worker before it could do anything: torch passes later errors on."""
    for number, worker in enumerate(workers):
        worker.join(_DEATH_S)
        if worker.exitcode == 1:
            raise ConfigError(explain_start(number, worker.pid, 1)) from None


def _find_death(workers: Sequence[multiprocessing.process.BaseProcess]) -> str | None:
    """Which worker has died, and of what; None while all live or have ended well."""
    for number, worker in enumerate(workers):
        worker.join(_DEATH_S)
        code = worker.exitcode
        if code:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            hint = " (perhaps by the kernel's OOM killer)" if code == -signal.SIGKILL else ""
            return (
                f"worker {number} of the loader (process {worker.pid}) ended {how}{hint}; see what "
                "its samples need, or use fewer workers (num_workers)"
            )
    return None


class _Jobs:
    """What the workers are to do in this epoch, as torch's sampler."""

    now: Iterable[Job] = ()

    def __iter__(self) -> Iterator[Job]:
        return iter(self.now)


class _Fetch(Dataset[Batch]):
    """In a worker: a job's batch."""

    def __init__(self, source: MapSource) -> None:
        self._source = source

    def __getitem__(self, job: Job) -> Batch:
        return self._source.fetch(*job)


def _as_it_is(batch: Batch) -> Batch:
    return batch


@contextmanager
def _without_mpi() -> Iterator[None]:
    """Processes started here join no MPI, even if the user's script imports it: ranks are taken."""
    before = os.environ.get(_NO_MPI)
    os.environ[_NO_MPI] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MPI]
        else:
            os.environ[_NO_MPI] = before


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Processes started here do not get SIGUSR1 and SIGUSR2, by which workers would die.

    Batch systems send them to every process of a job, to warn the ranks. Those that come meanwhile
    wait for the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_DEPTH = 5
_PRIVATE = {"_source": None, "_stream": None, "_dataset": "dataset", "_collate": "collate"}
"""What the loader's own attributes are called in messages; None leaves them out."""


class _Nowhere:
    """Takes what a pickler writes, and keeps none of it: data sets are large."""

    def write(self, content: Any) -> int:
        return len(content)


def trouble_with_function(name: str, function: Callable[..., Any] | None) -> str | None:
    """Why a function cannot be sent to worker processes, or None.

    Only plain functions are tried: they are sent by name, which costs nothing.
    """
    if not isinstance(function, types.FunctionType) or (error := _try(function)) is None:
        return None
    return _tell(name, function, error)


def explain_unpicklable(source: Any, initialize: Any, error: Exception) -> str:
    """Which part of the data cannot be sent to worker processes, and what to do.

    Args:
        source: What the workers were to get.
        initialize: The user's function that begins each of them.
        error: What starting them raised.
    """
    if initialize is not None and (own := _try(initialize)) is not None:
        return _tell("worker_init_fn", initialize, own)
    path, found, reason = _find([], source, error, _DEPTH)
    return _tell(".".join(path) or "the data set", found, reason)


def _find(
    path: list[str], found: Any, error: Exception, depth: int
) -> tuple[list[str], Any, Exception]:
    """Follow what cannot be pickled to the attribute that is to blame."""
    inside = getattr(found, "__dict__", None)
    if depth == 0 or not isinstance(inside, dict) or isinstance(found, types.FunctionType | type):
        return path, found, error
    for name, part in inside.items():
        own = None if name == "_generators" else _try(part)
        if own is not None:
            told = _PRIVATE.get(name, name)
            return _find([*path, *([told] if told else [])], part, own, depth - 1)
    return path, found, error


def _try(part: Any) -> Exception | None:
    try:
        pickle.Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(part)
    except Exception as error:  # whatever __reduce__ and __getstate__ raise
        return error
    return None


def _tell(name: str, part: Any, error: Exception) -> str:
    if isinstance(part, types.FunctionType):
        code = part.__code__
        what = f"{part.__qualname__}, {Path(code.co_filename).name} line {code.co_firstlineno}"
        cure = "define it with def at the top level of a module"
    elif isinstance(part, type):
        what, cure = part.__qualname__, "define the class at the top level of a module"
    else:
        what = f"a {type(part).__module__}.{type(part).__qualname__}"
        cure = (
            "define its class at the top level of a module, or make what cannot travel (files, "
            "locks, connections) in __getitem__ when it is first used"
        )
    return (
        f"{name} ({what}) cannot be sent to worker processes: {type(error).__name__}: {error}; "
        f"{cure}, or use num_workers=0"
    )


def explain_start(number: int, process: int | None, code: int) -> str:
    """Why a worker ended with this exit code before it gave a batch, and what to do."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and not has_main_guard(_read(Path(script))):
        return (
            f"worker processes read {Path(script).name} again, and it starts the training while it "
            'is read: it has no `if __name__ == "__main__":`; put everything but imports, '
            "functions and classes under it"
        )
    return (
        f"worker {number} of the loader (process {process}) did not start: exit code {code}, its "
        "traceback is above. Worker processes read the script again: what the data set needs "
        'must be defined at the top level of a module, outside `if __name__ == "__main__":`, and '
        "what starts the training inside of it"
    )


def has_main_guard(source: str) -> bool:
    """Whether a script checks `__name__` at the top level; True if it cannot be read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return True
    return any(
        isinstance(node, ast.Name) and node.id == "__name__"
        for statement in tree.body
        if isinstance(statement, ast.If)
        for node in ast.walk(statement.test)
    )


def _read(script: Path) -> str:
    """The text of a script; what cannot be read counts as one with a guard."""
    try:
        return script.read_text()
    except (OSError, UnicodeDecodeError):
        return "if __name__: pass"
