"""Which device a rank computes on. The choice is pure; asking torch is a small function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceInfo", "bind_device", "choose_index", "find_shared", "visible_devices"]

KINDS = ("auto", "cuda", "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """A device as other ranks need to know it."""

    kind: str
    index: int | None = None
    name: str = "CPU"
    uuid: str = ""

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.kind}:{self.index} {self.name}"


def choose_index(*, num_visible: int, local_rank: int, local_size: int, allow_shared: bool) -> int:
    """Choose a device index: the only one visible, else the local rank.

    A site that shows every task its own device calls it 0 in each of them.

    Raises:
        ConfigError: more ranks on the node than devices, and sharing was not requested.
    """
    if num_visible == 1:
        return 0
    if local_rank < num_visible:
        return local_rank
    if allow_shared:
        return local_rank % num_visible
    raise ConfigError(
        f"{local_size} ranks on this node see {num_visible} GPUs; start at most {num_visible} "
        "ranks per node, or pass allow_shared_device=True to init"
    )


def find_shared(devices: Sequence[tuple[str, DeviceInfo]]) -> list[list[int]]:
    """Find ranks that compute on the same GPU.

    Args:
        devices: Host name and device of every rank, in rank order.

    Returns:
        One list of ranks for each GPU that has several.
    """
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (host, device) in enumerate(devices):
        if device.uuid:
            users.setdefault((host, device.uuid), []).append(rank)
    return [ranks for ranks in users.values() if len(ranks) > 1]


def visible_devices(kind: str) -> tuple[str, int]:
    """Resolve `auto` to what torch sees here.

    Returns:
        The kind (`cuda` also stands for ROCm, as in torch itself) and how many are visible.

    Raises:
        ConfigError: the kind is unknown, or `cuda` was requested and torch sees none.
    """
    import torch

    if kind not in KINDS:
        raise ConfigError(f"device={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if kind == "cpu":
        return "cpu", 0
    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_visible:
        return "cuda", num_visible
    if kind == "cuda":
        built = torch.version.cuda or torch.version.hip
        raise ConfigError(
            f"device='cuda' was asked for, but torch {torch.__version__} "
            + (f"(built for {built}) sees no GPU" if built else "is built without CUDA or ROCm")
            + "; check CUDA_VISIBLE_DEVICES and the job's GPU request, or use device='cpu'"
        )
    return "cpu", 0


def bind_device(kind: str, index: int | None) -> tuple[torch.device, DeviceInfo]:
    """Make a device torch's current one and tell what it is."""
    import torch

    if kind == "cpu" or index is None:
        return torch.device("cpu"), DeviceInfo(kind="cpu")
    torch.cuda.set_device(index)
    properties = torch.cuda.get_device_properties(index)
    info = DeviceInfo(
        kind=kind, index=index, name=properties.name, uuid=str(getattr(properties, "uuid", ""))
    )
    return torch.device(kind, index), info
