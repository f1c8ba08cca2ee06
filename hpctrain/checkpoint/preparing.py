"""What a rank brings to a save: its state taken apart and checked. No MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint.flattening import Flat, flatten
from hpctrain.checkpoint.tree_file import pack
from hpctrain.errors import CheckpointError

__all__ = ["Prepared", "prepare", "versions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a rank brings to a save."""

    flat: Flat
    own: bytes | None
    step: int
    note: Any
    metrics: Mapping[str, float]


def prepare(
    state: object,
    *,
    step: int,
    own: object | None,
    note: object,
    metrics: Mapping[str, float] | None,
) -> Prepared:
    """Take apart what is to be saved. No communication.

    Raises:
        CheckpointError: something of it cannot be stored; the place is named.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step={step!r} must be a whole number of at least 0")
    noted = flatten(note)
    if noted.tensors or noted.pieces:
        raise CheckpointError("a note holds no tensors or arrays; put them into the state")
    try:
        numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metrics={metrics!r} must be numbers by name") from error
    return Prepared(
        flat=flatten(state),
        own=None if own is None else pack(own),
        step=step,
        note=noted.skeleton,
        metrics=numbers,
    )


def versions() -> dict[str, str]:
    """Of what has written a checkpoint, for people."""
    import torch

    from hpctrain import __version__

    return {"hpctrain": __version__, "torch": str(torch.__version__)}
