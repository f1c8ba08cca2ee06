"""One rank alone: every collective is done before it begins. Also a measure of all but sending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from hpctrain.engines.base import Engine, EngineWatchdog, Finish, Op
from hpctrain.engines.registry import BUILT_IN

if TYPE_CHECKING:
    from hpctrain.engines.horovod_options import HorovodOptions
    from hpctrain.world import World

__all__ = ["LocalEngine"]


class LocalEngine(Engine):
    """Collectives of a world of one rank; checks and refuses as the other engines do."""

    name = "local"
    capabilities = BUILT_IN["local"].capabilities

    def __init__(self, device: torch.device, *, watch: EngineWatchdog | None = None) -> None:
        super().__init__(None, device, watch=watch)

    @classmethod
    def make(
        cls,
        world: World,
        *,
        watch: EngineWatchdog | None,
        options: HorovodOptions | None,
        timeout_s: float,
    ) -> Self:
        """One rank alone."""
        return cls(world.device, watch=watch)

    @property
    def ops(self) -> frozenset[Op]:
        """All: each of them leaves one rank's values as they are."""
        return frozenset(Op)

    def _sends(self, dtype: torch.dtype, op: Op, device: torch.device) -> bool:
        return True

    def _start_allreduce(self, flat: Tensor, op: Op, what: str) -> Finish:
        return _done

    def _broadcast(self, flat: Tensor, root: int, what: str) -> None:
        pass

    def _allgather(self, what: str, flat: Tensor, counts: list[int]) -> Tensor:
        return flat.clone()

    def _alltoall(self, what: str, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return flat.clone()

    def _split(self, table: list[tuple[int | None, int]]) -> Engine | None:
        color, _ = table[0]
        return None if color is None else LocalEngine(self.device, watch=None)


def _done() -> None:
    """Nothing was started, so nothing has to end."""
