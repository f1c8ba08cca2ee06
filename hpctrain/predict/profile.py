"""What one rank computes in a step, and what it has to send: the predictor's first input. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.tables import check_keys, count_of, number_of, positive, text_of

__all__ = ["SCHEMA", "Layer", "Profile", "parse_profile", "read_profile", "write_profile"]

SCHEMA = "hpctrain.profile/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A piece of backward that ends with a gradient."""

    name: str
    backward_s: float
    gradient_bytes: int

    def __post_init__(self) -> None:
        number_of(self.backward_s, f"backward_s of {self.name}")
        count_of(self.gradient_bytes, f"gradient_bytes of {self.name}", least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A step of one rank that has its node to itself; layers in the order of backward."""

    machine: str
    """A description of the machine it was measured on."""
    model: str
    batch: int
    """Samples a rank."""
    input_s: float
    """Waiting for the next batch, which nothing overlaps."""
    forward_s: float
    layers: tuple[Layer, ...]
    update_s: float
    divides_update: bool = True
    """Whether the ranks of a node would divide the update; not if there is no optimizer state."""
    samples: int = 0
    """Samples of an epoch; 0: not said."""
    parameters: int = 0
    bytes_per_sample: int = 0
    error: float = 0.0
    """Relative uncertainty of the times, one standard deviation."""

    def __post_init__(self) -> None:
        count_of(self.batch, "batch")
        for name in ("input_s", "forward_s", "update_s", "error"):
            number_of(getattr(self, name), name)
        for name in ("samples", "parameters", "bytes_per_sample"):
            count_of(getattr(self, name), name, least=0)
        if not self.layers:
            raise ConfigError("a profile needs at least one layer")
        positive(self.compute_s, "the time of forward and backward")

    @property
    def backward_s(self) -> float:
        """All of backward."""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def step_s(self) -> float:
        """All of a step."""
        return self.input_s + self.compute_s + self.update_s

    @property
    def gradient_bytes(self) -> int:
        """All gradients."""
        return sum(layer.gradient_bytes for layer in self.layers)

    def at_batch(self, batch: int) -> Profile:
        """The same model with another batch a rank, times in proportion.

        That is a model, not a measurement: small batches use a processor less well.
        """
        scale = count_of(batch, "batch") / self.batch
        return replace(
            self,
            batch=batch,
            input_s=self.input_s * scale,
            forward_s=self.forward_s * scale,
            layers=tuple(
                replace(layer, backward_s=layer.backward_s * scale) for layer in self.layers
            ),
        )


def parse_profile(text: str, where: str = "the profile") -> Profile:
    """Read a profile from JSON.

    Raises:
        ConfigError: it is not as the schema says.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    fields = set(Profile.__dataclass_fields__)
    needed = {"schema", "model", "batch", "forward_s", "layers", "update_s"}
    table = dict(check_keys(data, where, needed=needed, known=fields | {"schema"}))
    if (schema := table.pop("schema")) != SCHEMA:
        raise ConfigError(f"{where} has schema {schema!r}; this version reads {SCHEMA!r}")
    layers = table.pop("layers")
    if not isinstance(layers, list):
        raise ConfigError(f"layers of {where} must be a list")
    keys = {"name", "backward_s", "gradient_bytes"}
    made = []
    for number, layer in enumerate(layers):
        found = check_keys(layer, f"layer {number} of {where}", needed=keys, known=keys)
        made.append(Layer(**{**found, "name": text_of(found["name"], f"name of layer {number}")}))
    model = text_of(table.pop("model"), "model")
    machine = text_of(table.pop("machine", ""), "machine")
    return Profile(model=model, machine=machine, layers=tuple(made), **{"input_s": 0.0, **table})


def read_profile(path: str | Path) -> Profile:
    """Read a profile's file.

    Raises:
        ConfigError: it cannot be read, or is not as the schema says.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return parse_profile(text, str(path))


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile, which `read_profile` reads back."""
    data = {"schema": SCHEMA, **asdict(profile)}
    try:
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
