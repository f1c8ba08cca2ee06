"""How gradients are sent: in which pieces, when, and how large on the wire. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.engines import AUTO, capabilities_of, communicating_names
from hpctrain.engines import choose as choose_engine
from hpctrain.errors import ConfigError
from hpctrain.predict.costs import RankLayout
from hpctrain.replica import Options, ReplicaFacts, choose
from hpctrain.tables import count_of, number_of, positive
from hpctrain.wire import BITS, NONE

__all__ = ["Exchange", "default_exchange"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A way to exchange gradients."""

    engine: str | None = None
    """The engine whose costs apply; None: those common to all."""
    overlap: bool = True
    """Whether pieces are sent while backward still runs."""
    bucket_bytes: int | None = None
    """When a piece is full; None: all gradients are one."""
    cycle_s: float = 0.0
    """Pieces are sent at multiples of this time, as with Horovod; 0: as soon as they are full."""
    cycle_s_per_rank: float = 0.0
    """Additional negotiation time per piece and rank."""
    wire_ratio: float = 1.0
    """Bytes on all links for a byte of gradients: 0.5 for 16 bits instead of 32."""
    wire: str = NONE
    """How gradients travel between nodes, as `hpctrain.distribute` takes it."""
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
        if self.wire not in BITS:
            raise ConfigError(f"wire={self.wire!r} cannot be predicted; choose {', '.join(BITS)}")
        count_of(self.accumulate, "accumulate")

    def cycle_of(self, num_ranks: int) -> float:
        """Seconds between two times at which pieces can leave."""
        return self.cycle_s + self.cycle_s_per_rank * num_ranks


def default_exchange(
    engine: str | None,
    layout: RankLayout,
    *,
    gradient_bytes: int,
    on_gpu: bool,
    overlap: bool | None = None,
    bucket_bytes: int | None = None,
    wire: str = NONE,
) -> Exchange:
    """What `hpctrain.distribute` does with this engine.

    The choice is `hpctrain.replica.policy`'s, for an optimizer that can be divided; whether the
    profile's can is part of the profile.

    Args:
        engine: Its name; None: `auto`.
        layout: Ranks on nodes.
        gradient_bytes: Of all gradients.
        on_gpu: Whether the ranks compute on GPUs.
        overlap: As `distribute` takes it.
        bucket_bytes: As `distribute` takes it.
        wire: As `distribute` takes it.

    Raises:
        ConfigError: `distribute` would refuse this, too.
    """
    known = communicating_names()
    if engine is not None and engine not in known:
        raise ConfigError(f"engine={engine!r}; choose one of {', '.join(known)}")
    device_type = "cuda" if on_gpu else "cpu"
    name = engine or choose_engine(AUTO, device_kind=device_type, size=layout.num_ranks).name
    choice = choose(
        ReplicaFacts(
            num_ranks=layout.num_ranks,
            num_nodes=layout.num_nodes,
            sharing_ranks=layout.local_ranks,
            device_type=device_type,
            engine=capabilities_of(name),
            gradient_bytes=gradient_bytes,
        ),
        Options(overlap=overlap, bucket_bytes=bucket_bytes, wire=wire),
    )
    if choice.wire != NONE and choice.mode == "arena" and layout.num_ranks % layout.local_ranks:
        raise ConfigError(
            f"wire={wire!r} needs equally many ranks on every node with the {name} engine, and the "
            f"last of {layout.num_nodes} has {layout.num_ranks % layout.local_ranks} of "
            f"{layout.local_ranks}; leave out wire="
        )
    return Exchange(
        engine=engine,
        overlap=choice.overlap,
        bucket_bytes=choice.bucket_bytes,
        divided_update=choice.divides_update,
        wire=choice.wire,
    )
