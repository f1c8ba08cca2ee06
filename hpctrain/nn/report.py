"""What a tensor-train layer saves, and what it costs in accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.log import table
from hpctrain.nn.factors import TrainShape

__all__ = ["Factorised", "TrainReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """Sizes of one layer, against the dense layer that it stands for."""

    kind: str
    shape: TrainShape
    num_parameters: int
    dense_parameters: int
    error: float | None
    """Relative, in the Frobenius norm, when it was made from a dense layer; None: it was not."""

    @property
    def compression(self) -> float:
        """How many times fewer parameters than the dense layer."""
        return self.dense_parameters / self.num_parameters

    def __str__(self) -> str:
        told = (
            f"{self.kind} {self.shape.rows} x {self.shape.columns}, {self.describe_factors()}, "
            f"ranks {_numbers(self.shape.ranks)}: {self.num_parameters:,} parameters instead of "
            f"{self.dense_parameters:,} ({self.describe_compression()})"
        )
        return told if self.error is None else f"{told}, relative error {self.error:.3g}"

    def describe_compression(self) -> str:
        """The same in words: `12.5 x fewer`."""
        return _times(self.compression)

    def describe_factors(self) -> str:
        """The factors of rows and columns, with the padding if there is any."""
        shape, text = self.shape, []
        for size, padded, factors in (
            (shape.rows, shape.padded_rows, shape.row_factors),
            (shape.columns, shape.padded_columns, shape.column_factors),
        ):
            more = f" (padded by {padded - size})" if padded > size else ""
            text.append("x".join(map(str, factors)) + more)
        return " by ".join(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Factorised:
    """What `factorise` has done to a model."""

    replaced: Mapping[str, TrainReport]
    kept: Mapping[str, str]
    """Layers that match and stay as they were: name, and why."""
    parameters_before: int
    parameters_after: int

    @property
    def compression(self) -> float:
        """How many times fewer parameters the whole model has."""
        return self.parameters_before / self.parameters_after

    def __str__(self) -> str:
        headers = ("layer", "factors", "ranks", "parameters", "dense", "compression", "error")
        rows = [
            (
                name,
                one.describe_factors(),
                _numbers(one.shape.ranks),
                one.num_parameters,
                one.dense_parameters,
                one.describe_compression(),
                "" if one.error is None else f"{one.error:.3g}",
            )
            for name, one in self.replaced.items()
        ]
        lines = [table(headers, rows)] if rows else []
        lines += [f"{name} stays dense: {why}" for name, why in self.kept.items()]
        lines.append(
            f"the model: {self.parameters_after:,} parameters instead of "
            f"{self.parameters_before:,} ({_times(self.compression)})"
        )
        return "\n".join(lines)


def _times(compression: float) -> str:
    return f"{compression:.1f} x fewer" if compression >= 1 else f"{1 / compression:.1f} x more"


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
