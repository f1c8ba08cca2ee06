"""Floor 3: torch.distributed over MPI: the backend `hpctrain`, and the default process group.

What torch offers for models larger than a device (FSDP2, pipelining, tensor parallel, DeviceMesh)
speaks through process groups. Here they are made from MPI communicators, without environment
variables. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.torch_backend.opening import (
        BACKEND,
        DefaultGroup,
        choose_backend,
        open_default_group,
    )
    from hpctrain.torch_backend.process_group import MpiProcessGroup
    from hpctrain.torch_backend.staging import NodeStaging

__all__ = [
    "BACKEND",
    "DefaultGroup",
    "MpiProcessGroup",
    "NodeStaging",
    "choose_backend",
    "open_default_group",
]

__getattr__ = lazy(
    __name__,
    {
        ".opening": ("BACKEND", "DefaultGroup", "choose_backend", "open_default_group"),
        ".process_group": ("MpiProcessGroup",),
        ".staging": ("NodeStaging",),
    },
)
