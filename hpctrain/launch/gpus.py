"""How many GPUs the ranks of this machine would have: known before they are started.

The launcher loads no torch. It reads what the drivers show and what the variables leave visible,
which takes no time; only if that is less than one GPU per rank it queries torch itself, in a
process of its own: a torch without CUDA uses no GPU at all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.programs import ask

__all__ = ["count_gpus", "count_present", "explain_sharing", "limit_visible"]

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ASK = "import torch; print('gpus', torch.cuda.device_count())"
_ASK_S = 60.0


def count_present(root: Path = Path("/")) -> int:
    """GPUs that the drivers of NVIDIA and AMD show on this machine."""
    nvidia = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    nvidia = nvidia or len(list(root.glob("dev/nvidia[0-9]*")))
    amd = 0
    for path in root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id"):
        try:
            amd += path.read_text().strip() not in ("", "0")  # CPUs are nodes, too
        except OSError:  # a container may show a node that it does not let us read
            continue
    return nvidia + amd


def limit_visible(num_present: int, environ: Mapping[str, str]) -> int:
    """GPUs that the usual variables leave visible, at most. Pure.

    A list ends at the first entry that is none (`-1`, or nothing), as for CUDA.
    """
    for name in _VARIABLES:
        if name in environ:
            entries = [entry.strip() for entry in environ[name].split(",")]
            ends = [i for i, entry in enumerate(entries) if not _names_a_gpu(entry)]
            num_present = min(num_present, ends[0] if ends else len(entries))
    return num_present


def _names_a_gpu(entry: str) -> bool:
    return re.fullmatch(r"\d+|(GPU|MIG)-\S+", entry) is not None


def count_gpus(num_ranks: int, environ: Mapping[str, str]) -> int | None:
    """GPUs that this many ranks would find here; None: unknown."""
    visible = limit_visible(count_present(), environ)
    if visible == 0 or visible >= num_ranks:
        return visible
    answer = ask([sys.executable, "-c", _ASK], environ=environ, limit_s=_ASK_S)
    found = re.search(r"^gpus (\d+)$", answer.out, re.MULTILINE)
    return int(found.group(1)) if answer.ok and found else None


def explain_sharing(num_ranks: int, num_gpus: int | None, *, alone: str, on_cpu: str) -> str | None:
    """What more ranks than GPUs mean, and the commands that work; None where there are enough.

    Args:
        num_ranks: Ranks to be started on this machine.
        num_gpus: GPUs that they will see; None: not known.
        alone: The command with one rank per GPU.
        on_cpu: The command with all ranks on the CPU.
    """
    if not num_gpus or num_gpus >= num_ranks:
        return None
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return (
        f"{num_ranks} ranks for {gpus} on this machine: a script that computes on GPUs fails "
        "unless it lets ranks share them: init(allow_shared_device=True), or in a "
        "training file train.allow_shared_device = true\n"
        f"  one rank per GPU:      {alone}\n"
        f"  all ranks on the CPU:  {on_cpu}"
    )
