"""What a machine is fitted from: measured collectives and measured computing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.predict.checks import check_keys, count_of, number_of, positive, text_of
from hpctrain.predict.collectives import Layout

__all__ = ["SCHEMA", "CollectiveSample", "ComputeSample", "Measurement", "TrainingSample"]

SCHEMA = "hpctrain.samples/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSample:
    """One size of an allreduce on one engine: the median of the slowest rank's times."""

    engine: str
    num_ranks: int
    ranks_per_node: int
    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        text_of(self.engine, "engine")
        count_of(self.num_bytes, "num_bytes")
        positive(self.seconds, "seconds")

    @property
    def layout(self) -> Layout:
        """Where its ranks are."""
        return Layout(num_ranks=self.num_ranks, ranks_per_node=self.ranks_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSample:
    """The same computing step on so many ranks of a node at once, with no communication."""

    ranks_on_node: int
    seconds: float
    """The median over steps and ranks."""
    jitter: float
    """Of a rank's time from step to step, relative, as a standard deviation."""

    def __post_init__(self) -> None:
        count_of(self.ranks_on_node, "ranks_on_node")
        positive(self.seconds, "seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """A step that ranks take together, beside the same step without each other."""

    engine: str
    num_ranks: int
    ranks_per_node: int
    gradient_bytes: int
    compute_s: float
    """Forward, backward and update on as many ranks at once, with no communication."""
    seconds: float
    """The slowest rank's, median over steps."""

    def __post_init__(self) -> None:
        text_of(self.engine, "engine")
        count_of(self.gradient_bytes, "gradient_bytes")
        positive(self.compute_s, "compute_s")
        positive(self.seconds, "seconds")

    @property
    def layout(self) -> Layout:
        """Where its ranks are."""
        return Layout(num_ranks=self.num_ranks, ranks_per_node=self.ranks_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """All that one launch has measured."""

    collectives: tuple[CollectiveSample, ...]
    compute: ComputeSample
    memory_bytes_per_node: int
    training: tuple[TrainingSample, ...] = ()
    foreign_load: float = 0.0
    """The share of all cores that others used meanwhile, where somebody watched."""

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """What `as_json` gave.

        Raises:
            ConfigError: it did not.
        """
        keys = {"schema", "collectives", "compute", "memory_bytes_per_node"}
        table = check_keys(
            data, "the measurement", needed=keys, known=keys | {"training", "foreign_load"}
        )
        if table["schema"] != SCHEMA:
            raise ConfigError(f"schema {table['schema']!r}; this version reads {SCHEMA!r}")
        return cls(
            collectives=tuple(CollectiveSample(**each) for each in table["collectives"]),
            compute=ComputeSample(**table["compute"]),
            memory_bytes_per_node=table["memory_bytes_per_node"],
            training=tuple(TrainingSample(**each) for each in table.get("training", ())),
            foreign_load=number_of(table.get("foreign_load", 0.0), "foreign_load"),
        )
