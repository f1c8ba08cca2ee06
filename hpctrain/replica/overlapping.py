"""Whether gradients should travel while backward still runs, and in pieces of which size. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.world import World

__all__ = ["bucket_size", "can_hide"]

_SMALLEST_BYTES = 4 << 20
_LARGEST_BYTES = 25 << 20
_PIECES = 8


def can_hide(world: World, engine: Engine, total_bytes: int) -> bool:
    """Whether something else than this rank's computing threads can carry messages meanwhile.

    That is so on GPUs, between nodes, where the engine has threads of its own anyway (Horovod and
    Gloo), and where the node has cores that no rank computes on; and if there are gradients for at
    least two pieces. The same on every rank.
    """
    if engine.size == 1 or total_bytes < 2 * _SMALLEST_BYTES:
        return False
    elsewhere = world.device.type != "cpu" or world.num_nodes > 1
    return elsewhere or engine.capabilities.own_threads or world.num_spare_cores > 0


def bucket_size(total_bytes: int) -> int:
    """Cut gradients into some eight pieces: enough to begin early, few enough to be worth sending.

    The last piece is what backward cannot hide; small pieces cost more in latency than they bring.
    """
    return min(max(total_bytes // _PIECES, _SMALLEST_BYTES), _LARGEST_BYTES)
