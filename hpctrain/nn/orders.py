"""In which order a tensor train is multiplied with a batch: the cheapest one. Pure.

Every order costs `fixed + batch * each` floating-point operations: what is made of cores alone is
made once, the rest for every sample. The cheapest order depends on the batch, so a layer holds the
few that are cheapest somewhere, each with the batch up to which it is. A backward pass costs twice
as much as the forward pass step by step, so the same order is the cheapest for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeVar

from hpctrain.nn.factors import TrainShape

__all__ = [
    "MERGE_LIMIT",
    "SMALL_PRODUCTS",
    "Join",
    "LookupOrder",
    "ProductOrder",
    "Step",
    "lookup_orders",
    "product_orders",
    "up_to",
]

T = TypeVar("T")
AnyOrder = TypeVar("AnyOrder", bound="Order")

MERGE_LIMIT = 2**22
"""Elements that cores multiplied ahead of the batch may have: 16 MiB in float32."""

SMALL_PRODUCTS = 8
"""A lookup multiplies small matrices for each row, which is slower; an estimate, not measured."""


class Cost(NamedTuple):
    """Operations whatever the batch is, and for each sample of it."""

    fixed: int
    each: int

    def plus(self, *others: Cost) -> Cost:
        """The sum."""
        return Cost(
            self.fixed + sum(o.fixed for o in others), self.each + sum(o.each for o in others)
        )

    def at(self, batch: Fraction | None) -> tuple[Fraction, int]:
        """To be compared at a batch; None is a batch without end."""
        if batch is None:
            return Fraction(self.each), self.fixed
        return self.fixed + batch * self.each, self.each


@dataclass(frozen=True, slots=True)
class Order:
    """An order and what it costs."""

    text: str
    """As a formula: `(x 1) 2` multiplies the batch with the first core, then with the second."""
    cost: Cost

    def flops(self, batch: int) -> int:
        """Floating-point operations of a forward pass, an addition and a multiplication each."""
        return self.cost.fixed + batch * self.cost.each


class Join(NamedTuple):
    """Contract two operands; the result comes after all operands that there are."""

    left: int
    right: int
    left_dims: tuple[int, ...]
    right_dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProductOrder(Order):
    """How a batch of vectors is multiplied with the matrix: operand 0 is the batch, k is core k."""

    joins: tuple[Join, ...]
    permutation: tuple[int, ...]
    """Brings the last result into the order batch, row digits."""


class Step(NamedTuple):
    """One step of a lookup; the result comes after all operands that there are.

    `merge` multiplies two neighbouring tables, `gather` takes the batch's rows of one (left and
    right are the same), `multiply` multiplies two neighbouring stacks of rows.
    """

    kind: str
    left: int
    right: int
    first: int
    """The cores that are in the result: from this one ..."""
    last: int
    """... to this one."""


@dataclass(frozen=True, slots=True)
class LookupOrder(Order):
    """How the rows of a batch of numbers are made: operand k is core k."""

    steps: tuple[Step, ...]


def product_orders(
    shape: TrainShape, *, merge_limit: int = MERGE_LIMIT
) -> tuple[tuple[int | None, ProductOrder], ...]:
    """The cheapest orders of (batch, columns) x matrix, each with the last batch that it is for.

    All orders of pairwise contraction are considered, the dense matrix among them, except those
    that make more than `merge_limit` elements of cores alone.
    """
    network = _Network(shape, merge_limit)
    return _envelope(network.cheapest)


def lookup_orders(
    shape: TrainShape, *, merge_limit: int = MERGE_LIMIT
) -> tuple[tuple[int | None, LookupOrder], ...]:
    """The cheapest orders of reading a batch of rows, each with the last batch that it is for.

    Neighbouring cores may be multiplied into one table before rows are taken, or after, within the
    same limit. Operations of the many small products count `SMALL_PRODUCTS` times.
    """
    chain = _Chain(shape, merge_limit)
    return tuple(
        (None if limit is None else limit // SMALL_PRODUCTS, order)
        for limit, order in _envelope(chain.cheapest)
    )


def up_to(orders: Sequence[tuple[int | None, T]], batch: int) -> T:
    """The order for a batch."""
    for limit, order in orders:
        if limit is None or batch <= limit:
            return order
    return orders[-1][1]


def _envelope(
    cheapest: Callable[[Fraction | None], AnyOrder],
) -> tuple[tuple[int | None, AnyOrder], ...]:
    """Costs are lines over the batch: the lower envelope, by solving where two lines meet."""

    def between(low: AnyOrder, high: AnyOrder) -> list[tuple[int | None, AnyOrder]]:
        if low.cost.each == high.cost.each:
            return []
        meet = Fraction(high.cost.fixed - low.cost.fixed, low.cost.each - high.cost.each)
        middle = cheapest(meet)
        if middle.cost.at(meet)[0] == low.cost.at(meet)[0]:
            return [(math.floor(meet), low)]
        return between(low, middle) + between(middle, high)

    first, last = cheapest(Fraction(1)), cheapest(None)
    return (*between(first, last), (None, last))


class _Network:
    """All ways to contract a batch with all cores, pair by pair: the best for every subset.

    A set of operands, and the indices that are open in it, are bits of a number. Every index is of
    two operands, or of one and the result; so what is open in a set is the exclusive or.
    """

    def __init__(self, shape: TrainShape, merge_limit: int) -> None:
        count = shape.num_cores
        self.sizes = (1, *shape.column_factors, *shape.row_factors, *shape.ranks)
        columns = [1 + k for k in range(count)]
        rows = [1 + count + k for k in range(count)]
        bonds = [1 + 2 * count + k for k in range(count - 1)]
        self.operands = [[0, *columns]]  # the indices of each, in the order of its dimensions
        for k in range(count):
            before, after = bonds[k - 1 : k] if k else [], bonds[k : k + 1]
            self.operands.append([*before, rows[k], columns[k], *after])
        self.result = [0, *rows]
        self.open = [0] * (1 << (count + 1))
        for members in range(1, len(self.open)):
            lowest = (members & -members).bit_length() - 1
            own = sum(1 << index for index in self.operands[lowest])
            self.open[members] = self.open[members & (members - 1)] ^ own
        self.pairs = [self._pairs(members, merge_limit) for members in range(len(self.open))]

    def _pairs(self, members: int, merge_limit: int) -> list[tuple[int, int, Cost]]:
        """Both parts of a set, and what joining them costs."""
        if not members & 1 and self._elements(self.open[members]) > merge_limit:
            return []
        lowest, found = members & -members, []
        left = (members - 1) & members
        while left:
            if left & lowest:
                right = members ^ left
                work = 2 * self._elements(self.open[left] | self.open[right])
                found.append((left, right, Cost(0, work) if members & 1 else Cost(work, 0)))
            left = (left - 1) & members
        return found

    def _elements(self, indices: int) -> int:
        return math.prod(size for index, size in enumerate(self.sizes) if indices >> index & 1)

    def cheapest(self, batch: Fraction | None) -> ProductOrder:
        """The cheapest order at a batch."""
        best: dict[int, tuple[Cost, tuple[int, int] | None]] = {}
        for members in range(1, len(self.open)):
            if members & (members - 1) == 0:
                best[members] = Cost(0, 0), None
                continue
            costs = [
                (work.plus(best[left][0], best[right][0]), (left, right))
                for left, right, work in self.pairs[members]
                if left in best and right in best
            ]
            if costs:
                best[members] = min(costs, key=lambda found: found[0].at(batch))
        everything = len(self.open) - 1
        trail: list[tuple[int, int]] = []
        text = self._walk(everything, best, trail)
        joins, permutation = self._dimensions(trail)
        return ProductOrder(text, best[everything][0], joins, permutation)

    def _walk(
        self,
        members: int,
        best: dict[int, tuple[Cost, tuple[int, int] | None]],
        trail: list[tuple[int, int]],
    ) -> str:
        """Note the joins from the inside out."""
        parts = best[members][1]
        if parts is None:
            number = members.bit_length() - 1
            return str(number) if number else "x"
        left, right = (self._walk(part, best, trail) for part in parts)
        trail.append(parts)
        return f"({left} {right})"

    def _dimensions(self, trail: list[tuple[int, int]]) -> tuple[tuple[Join, ...], tuple[int, ...]]:
        """Joins of sets as joins of numbered operands and their dimensions."""
        places = {1 << number: number for number in range(len(self.operands))}
        held = [list(indices) for indices in self.operands]
        joins = []
        for left, right in trail:
            a, b = places[left], places[right]
            shared = [index for index in held[a] if index in held[b]]
            joins.append(
                Join(
                    a,
                    b,
                    tuple(held[a].index(index) for index in shared),
                    tuple(held[b].index(index) for index in shared),
                )
            )
            places[left | right] = len(held)
            held.append([index for index in held[a] + held[b] if index not in shared])
        return tuple(joins), tuple(held[-1].index(index) for index in self.result)


class _Chain:
    """All ways to read rows: each run of neighbouring cores is a table, or rows taken from it."""

    def __init__(self, shape: TrainShape, merge_limit: int) -> None:
        self.shape, self.merge_limit = shape, merge_limit
        self.ends = (1, *shape.ranks, 1)
        self.runs: dict[tuple[int, int, Fraction | None, bool], _Run | None] = {}

    def _joins(self, first: int, last: int, batch: Fraction | None, *, table: bool) -> _Run | None:
        """The cheapest split of cores first..last into two runs of the same kind, joined."""
        shape, ends = self.shape, self.ends
        elements = math.prod(shape.column_factors[first : last + 1])
        if table:
            elements *= math.prod(shape.row_factors[first : last + 1])
            if ends[first] * elements * ends[last + 1] > self.merge_limit:
                return None
        found = []
        for middle in range(first, last):
            left = self._run(first, middle, batch, table=table)
            right = self._run(middle + 1, last, batch, table=table)
            if left is None or right is None:
                continue
            work = 2 * ends[first] * ends[middle + 1] * ends[last + 1] * elements
            cost = (Cost(work, 0) if table else Cost(0, work)).plus(left.cost, right.cost)
            kind = "merge" if table else "multiply"
            found.append(_Run(cost, kind, first, last, (left, right)))
        return min(found, key=lambda run: run.cost.at(batch), default=None)

    def _run(self, first: int, last: int, batch: Fraction | None, *, table: bool) -> _Run | None:
        """The cheapest table of cores first..last, or the cheapest rows of it; found once."""
        key = first, last, batch, table
        if key not in self.runs:
            self.runs[key] = self._find(first, last, batch, table=table)
        return self.runs[key]

    def _find(self, first: int, last: int, batch: Fraction | None, *, table: bool) -> _Run | None:
        if table:
            if first == last:
                return _Run(Cost(0, 0), "core", first, last, ())
            return self._joins(first, last, batch, table=True)
        made = self._run(first, last, batch, table=True)
        taken = None if made is None else _Run(made.cost, "gather", first, last, (made,))
        joined = None if first == last else self._joins(first, last, batch, table=False)
        found = [run for run in (taken, joined) if run is not None]
        return min(found, key=lambda run: run.cost.at(batch), default=None)

    def cheapest(self, batch: Fraction | None) -> LookupOrder:
        """The cheapest order at a batch."""
        run = self._run(0, self.shape.num_cores - 1, batch, table=False)
        if run is None:  # a single core is always a table, so there is always a way
            raise RuntimeError("no order of lookup")
        steps: list[Step] = []
        run.note(steps, self.shape.num_cores)
        return LookupOrder(run.text(), run.cost, tuple(steps))


class _Run(NamedTuple):
    """Neighbouring cores, how they are combined, and what that costs."""

    cost: Cost
    kind: str
    first: int
    last: int
    parts: tuple[_Run, ...]

    def text(self) -> str:
        """As a formula: `[1 2]` is a table of two cores, from which rows are taken."""
        if self.kind == "core":
            return str(self.first + 1)
        inside = " ".join(part.text() for part in self.parts)
        if self.kind == "gather":
            return f"[{inside}]"
        return f"({inside})"

    def note(self, steps: list[Step], num_cores: int) -> int:
        """Append the steps from the inside out; the number of the operand that is the result."""
        if self.kind == "core":
            return self.first
        numbers = [part.note(steps, num_cores) for part in self.parts]
        steps.append(Step(self.kind, numbers[0], numbers[-1], self.first, self.last))
        return num_cores + len(steps) - 1
