"""Where each gradient lives in the flat buffers: buckets, slots, flags, control words. Pure.

A bucket is a contiguous piece of one dtype's buffer and is sent as one message:

    [ gradient | gradient | ... | one flag per parameter | control words (one bucket only) ]

The flags say which parameters a rank has used, so that "unused everywhere" can be told from "zero";
the control words carry sample counts and the number of the step. Neither needs its own message.
Gradients lie in the order of their parameters' memory: torch's fused optimizers go through both
side by side without looking at strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hpctrain.errors import ConfigError

__all__ = [
    "CONTROL_WORDS",
    "Bucket",
    "ParameterSpec",
    "cut_into_runs",
    "is_dense",
    "like_parameter",
    "members_between",
    "plan",
]


CONTROL_WORDS = 17
"""Sample counts, step number, findings of a rank: `hpctrain.replica.control_words`. The last one
marks an interrupted backward pass."""

_ALIGN_BYTES = 64
# Exact for the counts that control words carry; half precisions are not.
_EXACT = ("float64", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """A parameter as the layout needs to know it."""

    name: str
    numel: int
    dtype: str
    device: str
    itemsize: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A contiguous piece of a flat buffer. Offsets count elements from the buffer's start."""

    dtype: str
    device: str
    members: tuple[int, ...]
    """Indices of the parameters, in the order of their slots."""
    offsets: tuple[int, ...]
    flags: int
    """Where the flags begin, one per member."""
    control: int | None
    """Where the control words begin, in the one bucket that has them."""
    start: int
    stop: int


def plan(
    specs: Sequence[ParameterSpec],
    *,
    bucket_bytes: int | None,
    order: Sequence[int] | None = None,
    num_parts: int = 1,
) -> list[Bucket]:
    """Lay out parameters in buckets, in the order in which they are sent.

    Args:
        specs: The parameters in the order of the optimizer's groups.
        bucket_bytes: When to close a bucket; None makes one bucket per dtype and device.
        order: The order in which gradients become ready; None takes the parameters backwards.
        num_parts: Into how many equal parts the gradients of a bucket can be cut.

    Returns:
        The buckets in sending order. A model with no float32 or float64 parameter gets a bucket
        of control words alone, since half precision cannot count.
    """
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes={bucket_bytes} must be at least 1, or None for one bucket")
    sequence = list(reversed(range(len(specs)))) if order is None else list(order)
    groups: list[tuple[str, str, list[int]]] = []
    open_groups: dict[tuple[str, str], tuple[list[int], int]] = {}
    for index in sequence:
        spec = specs[index]
        kind = (spec.dtype, spec.device)
        members, filled = open_groups.get(kind, ([], 0))
        if not members:
            groups.append((*kind, members))
        members.append(index)
        filled += spec.numel * spec.itemsize
        full = bucket_bytes is not None and filled >= bucket_bytes
        open_groups[kind] = ([], 0) if full else (members, filled)
    return _place(specs, groups, num_parts)


def _place(
    specs: Sequence[ParameterSpec], groups: list[tuple[str, str, list[int]]], num_parts: int
) -> list[Bucket]:
    exact = [i for i, group in enumerate(groups) if group[0] in _EXACT]
    if exact:  # the last to leave: it can still say that the pass was interrupted
        groups = [*groups[: exact[-1]], *groups[exact[-1] + 1 :], groups[exact[-1]]]
    else:
        groups = [*groups, ("float64", groups[0][1] if groups else "cpu", [])]
    counting = len(groups) - 1
    ends: dict[tuple[str, str], int] = {}
    buckets = []
    for number, (dtype, device, members) in enumerate(groups):
        start = cursor = ends.get((dtype, device), 0)
        offsets = []
        for index in members:
            offsets.append(cursor)
            step = max(1, _ALIGN_BYTES // specs[index].itemsize)
            cursor += -(-specs[index].numel // step) * step
        if members and num_parts > 1:
            grain = num_parts * max(1, _ALIGN_BYTES // specs[members[0]].itemsize)
            cursor = start + -(-(cursor - start) // grain) * grain
        flags = cursor
        cursor += len(members)
        control = cursor if number == counting else None
        cursor += CONTROL_WORDS if number == counting else 0
        itemsize = specs[members[0]].itemsize if members else 8
        step = max(1, _ALIGN_BYTES // itemsize)
        stop = cursor
        ends[dtype, device] = -(-cursor // step) * step
        buckets.append(
            Bucket(
                dtype=dtype,
                device=device,
                members=tuple(members),
                offsets=tuple(offsets),
                flags=flags,
                control=control,
                start=start,
                stop=stop,
            )
        )
    return buckets


def cut_into_runs(bucket: Bucket, apart: frozenset[int]) -> list[tuple[int, int, bool]]:
    """Start, stop and kind of the longest pieces of a bucket that hold gradients of one kind.

    Args:
        bucket: Its flags and control words are in no piece; the gaps between slots, always zero,
            are.
        apart: Parameters of the other kind, by index.
    """
    runs: list[tuple[int, int, bool]] = []
    ends = (*bucket.offsets[1:], bucket.flags)
    for index, start, stop in zip(bucket.members, bucket.offsets, ends, strict=False):
        kind = index in apart
        if runs and runs[-1][2] == kind:
            runs[-1] = (runs[-1][0], stop, kind)
        else:
            runs.append((start, stop, kind))
    return runs


def members_between(
    bucket: Bucket, sizes: Sequence[int], start: int, stop: int
) -> list[tuple[int, int, int, int]]:
    """What of which parameters lies in a piece of a bucket.

    Args:
        bucket: The bucket.
        sizes: Elements of each parameter, by index.
        start: Of the piece, in elements from the buffer's start.
        stop: Its end.

    Returns:
        Of each parameter that has a part there: its index, the first element of that part and the
        one after its last, and where it begins in the piece.
    """
    found = []
    for index, offset in zip(bucket.members, bucket.offsets, strict=True):
        first, last = max(start, offset), min(stop, offset + sizes[index])
        if first < last:
            found.append((index, first - offset, last - offset, first - start))
    return found


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order, with no gaps or overlaps."""
    expected = 1
    pairs = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    for stride, length in pairs:
        if stride != expected:
            return False
        expected *= length
    return True


def like_parameter(flat: Tensor, parameter: Tensor) -> Tensor:
    """A piece of flat memory seen as a dense parameter is; the reverse of `flat_memory`."""
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
