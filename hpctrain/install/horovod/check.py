"""Does Horovod work here, and is it bound to the torch and MPI that are here now?

A mismatched Horovod can crash the process that imports it, so it is never imported in this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.errors import LaunchError
from hpctrain.install.horovod.cache import RECORD_NAME, differences
from hpctrain.install.horovod.facts import PythonFacts, probe_interpreter
from hpctrain.install.mpi import LoadedMpi, matching_mpirun, probe_mpi4py, run_two_ranks
from hpctrain.programs import ask

__all__ = ["HorovodCheck", "check_horovod"]

CURE = "run `hpctrain horovod build`"

_IMPORT = """
import json, warnings
warnings.simplefilter("ignore")
import horovod.torch as hvd
built = {name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "nccl", "cuda", "gloo")}
print(json.dumps(built))
"""
_RECORD = """
import json, sys
from importlib import metadata
text = metadata.distribution("horovod").read_text(sys.argv[1])
print(json.dumps(json.loads(text or "{}")))
"""
# Sums rank + 1, so that only a real job of two gives three.
_ALLREDUCE = """
import warnings
warnings.simplefilter("ignore")
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
if hvd.size() != 2 or total != 3.0:
    raise SystemExit(f"size {hvd.size()} and sum {total}, expected 2 and 3")
hvd.shutdown()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class HorovodCheck:
    """What was found.

    Attributes:
        status: `ok`, `broken` or `missing`.
        version: The installed version, None when missing.
        built: Which of mpi, nccl, cuda and gloo it was built with; empty when it cannot be
            imported.
        bound: What it was bound to when built; empty if hpctrain did not build it.
        here: What it would be bound to if it were built now.
        run: `ok`, `failed` or `not run`: the two-rank allreduce.
        problems: What is wrong, one sentence each.
        cure: What to do about it; empty when all is well.
    """

    status: str
    version: str | None = None
    built: Mapping[str, bool] = field(default_factory=dict)
    bound: Mapping[str, str | None] = field(default_factory=dict)
    here: Mapping[str, str | None] = field(default_factory=dict)
    run: str = "not run"
    problems: tuple[str, ...] = ()
    cure: str = ""

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


def check_horovod(
    python: Path, *, environ: Mapping[str, str], run: bool = True, timeout_s: float = 120.0
) -> HorovodCheck:
    """Check the Horovod of an interpreter, in separate processes.

    Args:
        python: The interpreter.
        environ: The user's environment.
        run: Also run an allreduce over two ranks under the matching mpirun.
        timeout_s: Limit of each of the steps.
    """
    here = probe_interpreter(python, environ=environ, timeout_s=timeout_s)
    version = here.packages.get("horovod")
    if version is None:
        return HorovodCheck(status="missing", problems=("Horovod is not installed",), cure=CURE)
    loaded = probe_mpi4py(python)
    bound = _ask(python, [_RECORD, RECORD_NAME], environ, timeout_s)[0]
    now = _bindings_now(here, loaded)
    changed = differences(bound, now)
    built, error = _ask(python, [_IMPORT], environ, timeout_s)
    problems = list(changed)
    if error:
        problems.append(f"`import horovod.torch` fails: {error}")
    elif not built.get("mpi"):
        problems.append("it was built without MPI, so mpirun and srun cannot start it")
    outcome = "not run"
    if run and not problems:
        failure = _run_allreduce(python, loaded, environ, timeout_s)
        outcome = "failed" if failure else "ok"
        problems += [failure] if failure else []
    return HorovodCheck(
        status="broken" if problems else "ok",
        version=version,
        built=built,
        bound=bound,
        here=now,
        run=outcome,
        problems=tuple(problems),
        cure=CURE if problems else "",
    )


def _bindings_now(here: PythonFacts, loaded: LoadedMpi | None) -> dict[str, str | None]:
    now: dict[str, str | None] = {"python_abi": here.soabi, "machine": here.machine}
    if here.torch:
        now |= {
            "torch": here.torch.version,
            "torch_build": here.torch.build,
            "torch_cxx11_abi": str(here.torch.cxx11_abi),
        }
    if loaded:
        now["mpi_family"] = loaded.mpi.family
    return now


def _ask(
    python: Path, script: list[str], environ: Mapping[str, str], timeout_s: float
) -> tuple[dict[str, Any], str]:
    """Run a script that prints JSON; the values, and the reason when there are none."""
    answer = ask([str(python), "-c", *script], environ=environ, limit_s=timeout_s)
    if not answer.ok:
        return {}, answer.reason
    found = answer.objects()
    return (found[-1], "") if found else ({}, "its output cannot be parsed")


def _run_allreduce(
    python: Path, loaded: LoadedMpi | None, environ: Mapping[str, str], timeout_s: float
) -> str:
    """Why an allreduce over two ranks did not work; empty when it did."""
    if loaded is None:
        return "mpi4py finds no MPI library, so its launcher is unknown"
    search = f"{environ.get('PATH', '')}:{python.parent}"
    try:
        mpirun, version = matching_mpirun(loaded, search)
    except LaunchError as error:
        return str(error)
    program = [str(python), "-c", _ALLREDUCE]
    trial = run_two_ranks(mpirun, version, program, environ=environ, timeout_s=timeout_s)
    return "" if trial.ok else f"an allreduce over two ranks under {mpirun} failed: {trial.reason}"
