"""How a number of ranks factors into data x pipeline x tensor. Pure."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

from hpctrain.errors import ConfigError

__all__ = ["DIMENSIONS", "Coordinate", "Shape", "check_dimensions", "factorings", "fit_shape"]

DIMENSIONS = ("data", "pipeline", "tensor")
"""From the one whose ranks may be far apart to the one whose ranks must be neighbours."""

_MOST_NAMED = 12


class Shape(NamedTuple):
    """How many ranks along each dimension."""

    data: int
    pipeline: int
    tensor: int

    def __str__(self) -> str:
        return f"data={self.data}, pipeline={self.pipeline}, tensor={self.tensor}"

    @property
    def size(self) -> int:
        """How many ranks in all."""
        return self.data * self.pipeline * self.tensor


class Coordinate(NamedTuple):
    """Where a rank stands along each dimension, from 0."""

    data: int
    pipeline: int
    tensor: int


def factorings(size: int) -> list[Shape]:
    """All shapes of so many ranks, those with the most data parallelism first."""
    shapes = [
        Shape(size // (pipeline * tensor), pipeline, tensor)
        for pipeline in _divisors(size)
        for tensor in _divisors(size // pipeline)
    ]
    return sorted(shapes, key=lambda shape: (-shape.data, -shape.pipeline))


def fit_shape(size: int, *, data: int | None = None, pipeline: int = 1, tensor: int = 1) -> Shape:
    """The shape of a grid over all ranks.

    Args:
        size: How many ranks there are.
        data: Ranks along the data dimension; None: what pipeline and tensor leave.
        pipeline: Ranks along the pipeline: its stages.
        tensor: Ranks that share each layer.

    Raises:
        ConfigError: they do not multiply to the number of ranks; with those that do.
    """
    _check_size("data", 1 if data is None else data)
    _check_size("pipeline", pipeline)
    _check_size("tensor", tensor)
    rest = int(pipeline) * int(tensor)
    wanted = Shape(size // rest if data is None else int(data), int(pipeline), int(tensor))
    if wanted.size == size:
        return wanted
    given = f"pipeline={pipeline}, tensor={tensor}"
    given = given if data is None else f"data={data}, {given}"
    needs = f"a multiple of {rest}" if data is None else str(wanted.size)
    possible = _nearest(factorings(size), data, int(pipeline), int(tensor))
    raise ConfigError(
        f"Grid: {given} needs {needs} ranks, and there are {size}; possible are "
        + "; ".join(map(str, possible[:_MOST_NAMED]))
        + ("; ..." if len(possible) > _MOST_NAMED else "")
    )


def _check_size(name: str, value: object) -> None:
    if type(value) is bool or not isinstance(value, Integral) or int(value) < 1:
        raise ConfigError(f"Grid: {name}={value!r} must be a whole number, at least 1")


def check_dimensions(call: str, dims: tuple[str, ...]) -> tuple[str, ...]:
    """Dimensions that a user named, in the grid's order.

    Raises:
        ConfigError: none, an unknown one, or one twice.
    """
    known = ", ".join(map(repr, DIMENSIONS))
    for dim in dims:
        if dim not in DIMENSIONS:
            raise ConfigError(f"{call}({dim!r}): a grid has the dimensions {known}")
    if not dims or len(set(dims)) < len(dims):
        raise ConfigError(f"{call}{dims!r}: name one or more of {known}, each once")
    return tuple(dim for dim in DIMENSIONS if dim in dims)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _nearest(shapes: list[Shape], data: int | None, pipeline: int, tensor: int) -> list[Shape]:
    """Those that keep most of what was asked for come first."""

    def kept(shape: Shape) -> int:
        asked = (data, pipeline, tensor)
        return sum(1 for own, wish in zip(shape, asked, strict=True) if own == wish and wish != 1)

    return sorted(shapes, key=kept, reverse=True)
