"""What one rank would hold of a model and compute with it, unit by unit: pure data.

A unit is a part of the model that is not cut: the smallest stage of a pipeline, and what is
gathered together where parameters are sharded. `hpctrain.predict.fake_device` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hpctrain.errors import ConfigError
from hpctrain.tables import count_of, number_of

__all__ = ["FORMATS", "Footprint", "TiedWeight", "Unit", "WeightFormat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """What a precision of `hpctrain.distribute` makes of a byte of the model's own weights."""

    stored: float = 1.0
    computed: float = 1.0
    """Of weights that are gathered to compute with."""
    master: float = 0.0
    """Of a float32 copy beside the weights; it counts as optimizer state."""


FORMATS = {
    "fp32": WeightFormat(),
    "tf32": WeightFormat(),
    "bf16": WeightFormat(),  # autocast: gathered as they are, and cast where they are used
    "fp16": WeightFormat(),
    "bf16-pure": WeightFormat(stored=0.5, computed=0.5, master=1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One unit; activations, messages and operations are those of the measured batch."""

    name: str
    weights: int
    """Bytes of all its parameters; one that several units have counts in the first."""
    trained: int
    """Bytes of those that have gradients."""
    buffer_bytes: int = 0
    activation_bytes: int = 0
    """What forward keeps for backward; it goes with the batch."""
    cast_bytes: int = 0
    """Copies of weights in another format that forward keeps for backward, whatever the batch."""
    output_bytes: int = 0
    """What the next unit takes."""
    flops: float = 0.0
    """Operations of forward and backward."""
    tensor_weights: int = 0
    """Bytes that tensor parallelism divides."""
    tensor_activation_bytes: int = 0
    tensor_flops: float = 0.0
    tensor_messages: int = 0
    """Allreduces over the tensor group, forward and backward together."""
    tensor_message_bytes: int = 0
    in_root: bool = False
    """Whether a sharded model gathers it with the root, for the whole pass."""
    layer: str = ""
    """The layer that a pipeline is cut at, where the unit is a part of one; empty: itself."""

    def __post_init__(self) -> None:
        for name in (
            *("weights", "trained", "buffer_bytes", "activation_bytes", "cast_bytes"),
            *("output_bytes", "tensor_weights", "tensor_activation_bytes"),
            *("tensor_messages", "tensor_message_bytes"),
        ):
            count_of(getattr(self, name), f"{name} of {self.name}", least=0)
        number_of(self.flops, f"flops of {self.name}")
        number_of(self.tensor_flops, f"tensor_flops of {self.name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedWeight:
    """A parameter that two units have: each of two stages would hold it."""

    first: int
    other: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """A model, its optimizer and one micro-batch, as far as memory and grids are concerned."""

    model: str
    batch: int
    """Samples that it was measured with."""
    units: tuple[Unit, ...]
    """In the order of the forward pass."""
    state_copies: float
    """Optimizer state in sizes of the trained weights: 2 for Adam."""
    precision: str = "fp32"
    transient_bytes: int = 0
    """The most beside parameters, gradients and what is kept for backward, at any one time."""
    ties: tuple[TiedWeight, ...] = ()
    tensor_sizes: tuple[tuple[str, int], ...] = ()
    """Modules that tensor parallelism divides, and the size that the ranks must divide."""
    no_stages: str = ""
    """Why the model cannot be cut into stages; empty: it can."""

    def __post_init__(self) -> None:
        count_of(self.batch, "batch")
        count_of(self.transient_bytes, "transient_bytes", least=0)
        number_of(self.state_copies, "state_copies")
        if not self.units:
            raise ConfigError("a footprint needs at least one unit")
        if self.precision not in FORMATS:
            raise ConfigError(
                f"precision={self.precision!r} is unknown; choose one of {', '.join(FORMATS)}"
            )

    @property
    def format(self) -> WeightFormat:
        """What its precision makes of its weights."""
        return FORMATS[self.precision]

    @property
    def weights(self) -> int:
        """Bytes of the whole model's parameters."""
        return sum(unit.weights for unit in self.units)

    @property
    def flops(self) -> float:
        """Operations of forward and backward of the measured batch."""
        return sum(unit.flops for unit in self.units)

    @property
    def layers(self) -> list[range]:
        """What stages are made of: units of one layer, with what follows and has no weights."""
        starts: list[int] = []
        for index, unit in enumerate(self.units):
            goes_on = index > 0 and unit.layer and unit.layer == self.units[index - 1].layer
            if not starts or (unit.trained and not goes_on):
                starts.append(index)
        starts[0] = 0
        return [range(a, b) for a, b in pairwise([*starts, len(self.units)])]

    @property
    def activation_bytes(self) -> int:
        """What the whole model keeps for backward."""
        return sum(unit.activation_bytes for unit in self.units)
