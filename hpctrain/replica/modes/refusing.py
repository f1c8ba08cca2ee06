"""Refuse on all ranks what only some of them can see: a model that has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpctrain.engines import Op
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.engines import Engine

__all__ = ["refuse_together"]


def refuse_together(engine: Engine, trouble: str | None) -> None:
    """Collective on CPUs: refuse where some rank has found trouble.

    On GPUs a rank refuses alone, and ends the job: agreeing would wait for the device.

    Args:
        engine: Over the ranks that must refuse together.
        trouble: What this one has found; None: nothing.

    Raises:
        ConfigError: on all ranks, with the trouble of the first that has one.
    """
    if engine.size > 1 and engine.device.type == "cpu":
        trouble = _find_any(engine, trouble)
    if trouble is not None:
        raise ConfigError(trouble)


def _find_any(engine: Engine, trouble: str | None) -> str | None:
    """Collective: the first rank's trouble, in words; one small message where there is none."""
    words = (trouble or "").encode()
    length = torch.tensor([len(words)])
    engine.allreduce_(length, Op.MAX, what="whether the model has changed")
    if not length:
        return None
    padded = torch.tensor([[*words.ljust(int(length), b"\0")]], dtype=torch.uint8)
    told = [bytes(row.tolist()).rstrip(b"\0").decode() for row in engine.allgather(padded)]
    return next(
        f"rank {rank}: {text}" for rank, text in zip(engine.members, told, strict=True) if text
    )
