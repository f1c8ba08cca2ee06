"""The shape of a tensor train: factors of the matrix's sizes, and ranks. Pure.

A matrix of `rows` x `columns` is a product of cores. Core k has the shape
(rank k-1, row factor k, column factor k, rank k). The row factors are the base in which a row's
number is written, first digit first; the same holds for columns. Where a size has no good factors,
the product is a little larger, and the surplus rows or columns are never used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import ConfigError
from hpctrain.tables import count_of

__all__ = [
    "MAX_CORES",
    "TrainShape",
    "balanced_factors",
    "choose_shape",
    "full_ranks",
    "plan_ranks",
]

MAX_CORES = 8
"""More cores than this would make the search for the cheapest contraction slow."""

_EXACT_MAY_COST = 1.25
"""Factors without padding are taken if their sum is at most this much above the smallest sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainShape:
    """Sizes, factors and ranks of a matrix as a tensor train."""

    rows: int
    columns: int
    row_factors: tuple[int, ...]
    column_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    """Between neighbouring cores: one fewer than cores."""

    @property
    def num_cores(self) -> int:
        """How many cores it has."""
        return len(self.row_factors)

    @property
    def padded_rows(self) -> int:
        """The product of the row factors."""
        return math.prod(self.row_factors)

    @property
    def padded_columns(self) -> int:
        """The product of the column factors."""
        return math.prod(self.column_factors)

    @property
    def core_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """(rank before, row factor, column factor, rank after) of each core."""
        ends = (1, *self.ranks, 1)
        return tuple(zip(ends, self.row_factors, self.column_factors, ends[1:], strict=False))

    @property
    def num_parameters(self) -> int:
        """Elements of all cores."""
        return sum(math.prod(shape) for shape in self.core_shapes)


def balanced_factors(size: int, num_cores: int) -> tuple[int, ...]:
    """Factors of about equal size, smallest first, whose product is at least `size`.

    The parameters of a tensor train grow with the sum of the factors. Factors without padding are
    taken where their sum is within a quarter of the smallest; else the smallest sum, and of equal
    ones the least padding. 768 is 8 x 8 x 12; 50257 = 29 x 1733 is 37 x 37 x 37 = 50653.
    """
    count_of(size, "size")
    count_of(num_cores, "num_cores")
    root = size ** (1 / num_cores)
    found = [f for f in _candidates(size, num_cores, max(1, int(root / 2))) if f[-1] >= f[0]]
    least = min(sum(factors) for factors in found)
    exact = [f for f in found if math.prod(f) == size and sum(f) <= _EXACT_MAY_COST * least]
    return min(exact or found, key=lambda f: (sum(f), math.prod(f), f))


def _candidates(size: int, count: int, lowest: int) -> list[tuple[int, ...]]:
    """Ascending factors from `lowest` on, the last just large enough."""
    if count == 1:
        return [(max(size, lowest),)]
    highest = math.ceil(size ** (1 / count))
    return [
        (first, *others)
        for first in range(lowest, max(highest, lowest) + 1)
        for others in _candidates(-(-size // first), count - 1, first)
    ]


def full_ranks(row_factors: Sequence[int], column_factors: Sequence[int]) -> tuple[int, ...]:
    """The ranks with which a tensor train is any matrix of this shape; larger ones are useless."""
    sizes = [r * c for r, c in zip(row_factors, column_factors, strict=True)]
    return tuple(
        min(math.prod(sizes[:bond]), math.prod(sizes[bond:])) for bond in range(1, len(sizes))
    )


def plan_ranks(ranks: int | Sequence[int], full: Sequence[int]) -> tuple[int, ...]:
    """One rank for each bond: a single number is cut to what is possible, several must be.

    Raises:
        ConfigError: not as many as bonds, or one is out of range.
    """
    if isinstance(ranks, int):
        count_of(ranks, "ranks")
        return tuple(min(ranks, most) for most in full)
    given = tuple(ranks)
    if len(given) != len(full):
        raise ConfigError(
            f"ranks={given} has {len(given)} numbers, and {len(full) + 1} cores have {len(full)} "
            "bonds; give one for each bond, or a single number for all"
        )
    for number, (rank, most) in enumerate(zip(given, full, strict=True)):
        if count_of(rank, f"ranks[{number}]") > most:
            raise ConfigError(
                f"ranks[{number}]={rank} is more than {most}, with which the train is exact; "
                f"choose at most {tuple(full)}"
            )
    return given


def choose_shape(
    rows: int,
    columns: int,
    *,
    ranks: int | Sequence[int] | None,
    row_factors: Sequence[int] | None = None,
    column_factors: Sequence[int] | None = None,
    num_cores: int | None = None,
    names: tuple[str, str] = ("row_factors", "column_factors"),
) -> TrainShape:
    """Check what was given, and choose the rest; without ranks it has those that are exact.

    Rows get their factors smallest first and columns largest first: cores are of similar size.

    Raises:
        ConfigError: sizes, factors or ranks that do not fit together.
    """
    count_of(rows, "rows")
    count_of(columns, "columns")
    count = _number_of_cores(row_factors, column_factors, num_cores, names)
    of_rows = _check_factors(row_factors, rows, names[0]) or balanced_factors(rows, count)
    of_columns = (
        _check_factors(column_factors, columns, names[1]) or balanced_factors(columns, count)[::-1]
    )
    full = full_ranks(of_rows, of_columns)
    return TrainShape(
        rows=rows,
        columns=columns,
        row_factors=of_rows,
        column_factors=of_columns,
        ranks=full if ranks is None else plan_ranks(ranks, full),
    )


def _number_of_cores(
    row_factors: Sequence[int] | None,
    column_factors: Sequence[int] | None,
    num_cores: int | None,
    names: tuple[str, str],
) -> int:
    given = {names[0]: row_factors, names[1]: column_factors}
    counts = {name: len(factors) for name, factors in given.items() if factors is not None}
    if num_cores is not None:
        counts["num_cores"] = count_of(num_cores, "num_cores")
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(f"one factor for each core is needed, and there are: {told}")
    count = next(iter(counts.values()), 3)
    if not 2 <= count <= MAX_CORES:
        raise ConfigError(f"a tensor train has 2 to {MAX_CORES} cores, not {count}")
    return count


def _check_factors(factors: Sequence[int] | None, size: int, name: str) -> tuple[int, ...] | None:
    if factors is None:
        return None
    given = tuple(count_of(factor, name) for factor in factors)
    if math.prod(given) < size:
        raise ConfigError(
            f"{name}={given} multiply to {math.prod(given)}, and must to at least {size}; "
            f"{balanced_factors(size, len(given))} would"
        )
    return given
