"""How gradients travel: in which pieces, when, and how large on the wire. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.engines import communicating_names
from hpctrain.errors import ConfigError
from hpctrain.predict.costs import RankLayout
from hpctrain.tables import count_of, number_of, positive

__all__ = ["Exchange", "default_exchange"]

_SMALLEST_BYTES = 4 << 20
_LARGEST_BYTES = 25 << 20
_PIECES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A way to exchange gradients."""

    engine: str | None = None
    """Whose costs of the machine count; None: those that hold for all."""
    overlap: bool = True
    """Whether pieces travel while backward still runs."""
    bucket_bytes: int | None = None
    """When a piece is full; None: all gradients are one."""
    cycle_s: float = 0.0
    """Pieces leave at multiples of this time, as Horovod's do; 0: as soon as they are full."""
    cycle_s_per_rank: float = 0.0
    """What agreeing on a piece adds to that, for each rank."""
    wire_ratio: float = 1.0
    """Bytes on the wire for a byte of gradients: 0.5 for 16 bits instead of 32."""
    accumulate: int = 1
    """Backward passes before an exchange."""
    divided_update: bool = False
    """Whether the ranks of a node divide the update among them."""

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None:
            count_of(self.bucket_bytes, "bucket_bytes")
        number_of(self.cycle_s, "cycle_s")
        number_of(self.cycle_s_per_rank, "cycle_s_per_rank")
        if positive(self.wire_ratio, "wire_ratio") > 1:
            raise ConfigError(f"wire_ratio={self.wire_ratio} must be at most 1")
        count_of(self.accumulate, "accumulate")

    def cycle_of(self, num_ranks: int) -> float:
        """Seconds between two times at which pieces can leave."""
        return self.cycle_s + self.cycle_s_per_rank * num_ranks


def default_exchange(
    engine: str | None, layout: RankLayout, *, gradient_bytes: int, on_gpu: bool
) -> Exchange:
    """What `hpctrain.distribute` does with this engine where nothing else is asked for.

    No engine is `auto`. On CPUs with several ranks a node the `mpi` engine adds up in shared memory
    after backward and divides the update; elsewhere pieces of an eighth of the gradients, 4 to 25
    MiB, travel while backward runs (`hpctrain.replica.overlapping`).
    """
    known = communicating_names()
    if engine is not None and engine not in known:
        raise ConfigError(f"engine={engine!r}; choose one of {', '.join(known)}")
    if engine in (None, "mpi") and not on_gpu and layout.local_ranks > 1:
        return Exchange(engine=engine, overlap=False, divided_update=True)
    hides = on_gpu or layout.num_nodes > 1 or engine in ("horovod", "torch")
    if layout.num_ranks == 1 or not hides or gradient_bytes < 2 * _SMALLEST_BYTES:
        return Exchange(engine=engine, overlap=False)
    size = min(max(gradient_bytes // _PIECES, _SMALLEST_BYTES), _LARGEST_BYTES)
    return Exchange(engine=engine, bucket_bytes=size)
