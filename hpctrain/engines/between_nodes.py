"""Sums over all ranks whose way between nodes is encoded; inside a node they are exact.

For engines that share no memory. Each rank adds up one part of it over its node, then over its
counterparts on the other nodes, and hands it round on the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hpctrain.engines import encoding
from hpctrain.engines.encoding import Op
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.engines.base import Engine
    from hpctrain.wire import Wire

__all__ = ["BetweenNodes"]


class BetweenNodes:
    """A wire between the nodes of an engine's ranks. Collective to make.

    Args:
        engine: All ranks.
        node_of: The node of each of them.
        wire: How sums are sent between nodes.

    Raises:
        ConfigError: on all ranks: nodes have different numbers of ranks.
    """

    def __init__(self, engine: Engine, node_of: Sequence[int], wire: Wire) -> None:
        self._wire = wire
        sizes = Counter(node_of)
        if len(set(sizes.values())) > 1:
            raise ConfigError(
                f"wire={wire.name!r} needs equally many ranks on every node with the {engine.name} "
                f"engine, and they have {sorted(sizes.values())}; leave out wire="
            )
        self._all = engine
        self._node: Engine | None = None
        self._across: Engine | None = None
        local = list(node_of[: engine.rank]).count(node_of[engine.rank])
        if max(sizes.values()) > 1:
            self._node = engine.split(node_of[engine.rank], key=engine.rank)
            self._across = engine.split(local, key=engine.rank)

    def add_(self, flat: Tensor, what: str) -> None:
        """Collective: add up a flat tensor over all ranks in place."""
        if self._node is None or self._across is None:
            self._all.allreduce_encoded_(flat, self._wire, what=what)
            return
        part = self._node.reduce_scatter(flat, Op.SUM, what=what)
        self._across.allreduce_encoded_(part, self._wire, what=what)
        counts = encoding.shares(flat.numel(), self._node.size)
        flat.copy_(self._node.gather_parts(part, counts, what=what))

    def close(self) -> None:
        """Collective: give the parts of the engine back."""
        for engine in (self._node, self._across):
            if engine is not None:
                engine.close()
