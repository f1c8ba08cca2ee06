"""Which rank updates what, in few words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.update.sharing import Fragment

__all__ = ["describe_shares", "some_names"]

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

    Neighbours are told as a range of names, and a cut parameter with the elements of it.

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
