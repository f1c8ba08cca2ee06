"""Which rank of a node updates which piece of which parameter, and for which optimizers. Pure.

Most of torch's optimizers treat every element alone, so any piece of a parameter can be updated
apart. Some look at a whole parameter (a norm, a matrix): those are divided by whole parameters. One
that couples parameters cannot be divided. A custom class declares which it is by an attribute:
`shards_by = "element"` or `"parameter"`.

Parameters are laid end to end and cut into as many cells as the largest node has ranks, so that
every node, whatever the number of its ranks, computes the same pieces: a piece of another length
may round differently in its last elements. A rank takes neighbouring cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hpctrain.balance import largest_first
from hpctrain.errors import ConfigError

__all__ = [
    "Fragment",
    "cut_elements",
    "describe_shares",
    "divide_parameters",
    "refuse_fused_complex",
    "shards_by",
    "some_names",
]


_BY_ELEMENT = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_BY_PARAMETER = ("Adafactor", "Muon")


def shards_by(optimizer: torch.optim.Optimizer) -> tuple[str | None, str]:
    """`element`, `parameter` or None, and why.

    Raises:
        ConfigError: a class says what is unknown.
    """
    kind = type(optimizer)
    told = getattr(kind, "shards_by", None)
    if told in ("element", "parameter"):
        return str(told), f"{kind.__name__} says that it can be divided by {told}"
    if told is not None:
        raise ConfigError(
            f"{kind.__name__}.shards_by={told!r} is unknown; choose 'element', 'parameter' or None"
        )
    if f"{kind.__module__}.".startswith("torch.optim."):
        if kind.__name__ in _BY_ELEMENT:
            return "element", f"{kind.__name__} updates every element independently"
        if kind.__name__ in _BY_PARAMETER:
            return "parameter", f"{kind.__name__} updates every parameter independently"
    return None, (
        f"{kind.__name__} is not known to update elements or parameters independently (your own "
        'class can declare it: shards_by = "element" or "parameter")'
    )


def refuse_fused_complex(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Refuse, on all ranks, what torch refuses only where the piece is updated.

    Args:
        optimizer: With the gradients of the step.
        names: Of its parameters, in the order of its groups.

    Raises:
        ConfigError: a fused group is about to update a complex parameter.
    """
    fused = [bool(group.get("fused")) for group in optimizer.param_groups for _ in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, parameter, is_fused in zip(names, parameters, fused, strict=True):
        if is_fused and parameter.is_complex() and parameter.grad is not None:
            raise ConfigError(
                f"{name} is complex, and torch's fused {type(optimizer).__name__} takes real "
                "parameters alone; put it into a parameter group of its own with fused=False"
            )


_GRAIN = 1024
"""Cuts are at multiples of this many elements of a parameter: whole vectors, whole cache lines."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of the elements of a parameter, in the order in which they lie in memory."""

    parameter: int
    start: int
    stop: int


def cut_elements(
    sizes: Sequence[int], weights: Sequence[int], *, num_cells: int, num_ranks: int
) -> list[list[Fragment]]:
    """Cut parameters into cells of about equal weight; each rank's fragments, in order.

    Args:
        sizes: Elements of each parameter.
        weights: Bytes of one element of each parameter.
        num_cells: The ranks of the largest node.
        num_ranks: The ranks of this node.
    """
    total = sum(size * weight for size, weight in zip(sizes, weights, strict=True))
    by_rank: list[list[Fragment]] = [[] for _ in range(num_ranks)]
    cell, done = 0, 0
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        start = 0
        if not size:  # has state and a step count like any other
            by_rank[cell * num_ranks // num_cells].append(Fragment(index, 0, 0))
        while start < size:
            stop = size
            if cell < num_cells - 1:
                left = total * (cell + 1) // num_cells - done
                stop = _nearest_cut(start + left // weight, start, size)
            if stop > start:
                by_rank[cell * num_ranks // num_cells].append(Fragment(index, start, stop))
                done += (stop - start) * weight
                start = stop
            if start < size:  # the cell is as full as a cut here can make it
                cell += 1
    return by_rank


def _nearest_cut(wanted: int, start: int, size: int) -> int:
    """Where a parameter can be cut, next to where it should be."""
    if wanted >= size:
        return size
    below = max(start, wanted // _GRAIN * _GRAIN)
    above = min(size, below + _GRAIN) if below // _GRAIN * _GRAIN == below else size
    return below if wanted - below < above - wanted else above


def divide_parameters(sizes: Sequence[int], *, num_ranks: int) -> list[list[Fragment]]:
    """Give each rank whole parameters, largest first, each to the rank with the least so far."""
    shares = largest_first([size + 1 for size in sizes], num_ranks)  # 1: empty ones count, too
    return [[Fragment(index, 0, sizes[index]) for index in share] for share in shares]


_MOST_RANKS = 4
_MOST_NAMES = 3


def some_names(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def describe_shares(
    shares: Sequence[Sequence[Fragment]], names: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """A row for each of a node's first ranks: the parameters that it updates.

    Adjacent ones are shown as a range of names, and a cut parameter with its elements.

    Args:
        shares: By local rank.
        names: Of the parameters.
        sizes: Elements of each.
    """
    for rank, share in enumerate(shares[:_MOST_RANKS]):
        runs = [_describe_run(run, names, sizes) for run in _runs(share, sizes)]
        yield f"local rank {rank}", some_names(runs) or "nothing"
    if len(shares) > _MOST_RANKS:
        yield "", f"the other {len(shares) - _MOST_RANKS} of the node likewise"


def _runs(share: Sequence[Fragment], sizes: Sequence[int]) -> list[list[Fragment]]:
    """Whole parameters that follow each other together; parts of one by themselves."""
    runs: list[list[Fragment]] = []
    for fragment in share:
        last = runs[-1][-1] if runs else None
        follows = (
            last is not None
            and _is_whole(last, sizes)
            and _is_whole(fragment, sizes)
            and fragment.parameter == last.parameter + 1
        )
        if follows:
            runs[-1].append(fragment)
        else:
            runs.append([fragment])
    return runs


def _is_whole(fragment: Fragment, sizes: Sequence[int]) -> bool:
    return fragment.stop - fragment.start == sizes[fragment.parameter]


def _describe_run(run: Sequence[Fragment], names: Sequence[str], sizes: Sequence[int]) -> str:
    first, last = run[0], run[-1]
    name = names[first.parameter]
    if len(run) > 1:
        between = " to " if len(run) > 2 else ", "
        return f"{name}{between}{names[last.parameter]}"
    if _is_whole(first, sizes):
        return name
    start = f"{first.start:,}" if first.start else ""
    stop = f"{first.stop:,}" if first.stop < sizes[first.parameter] else ""
    return f"{name}[{start}:{stop}]"
