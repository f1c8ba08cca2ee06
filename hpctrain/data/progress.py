"""Where a run stands in its data: (seed, epoch, samples consumed), on any number of ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hpctrain.errors import ConfigError

__all__ = ["Progress", "read_state", "trouble_with"]

_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a loader must know to go on; the same on every rank."""

    seed: int
    epoch: int
    consumed: int
    """Samples of this epoch that were handed out, over all ranks.

    With `split` places in batches, since streams that have ended leave some empty.
    """
    total: int
    """Samples of the whole run that were handed out, over all ranks."""
    order: str
    """How samples are ordered: `keyed`, `numpy`, `stored`, `local`, `stream`, `split`, `weighted`
    or `lengths`.
    """
    num_samples: int | None
    fingerprint: int
    """Of the epoch's order."""
    num_ranks: int
    """Of the run that wrote this; it matters to `local` and `split` alone."""

    def to_state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"version": _VERSION, **asdict(self)}


def read_state(state: Mapping[str, Any]) -> Progress:
    """What `to_state` wrote.

    Raises:
        ConfigError: it is not the state of a loader, or of another version.
    """
    names = {field.name for field in fields(Progress)}
    if state.get("version") != _VERSION or names - set(state):
        raise ConfigError(
            f"this is no state of a loader of version {_VERSION}: it has {sorted(state)}"
        )
    return Progress(**{name: state[name] for name in names})


def trouble_with(saved: Progress, own: Progress) -> str | None:
    """Why a run cannot go on from a state with this loader, or None.

    Args:
        saved: The state.
        own: What this loader would write there, with the state's seed and epoch.
    """
    for name in ("num_samples", "order"):
        was, now = getattr(saved, name), getattr(own, name)
        if was != now:
            return (
                f"the run was begun with {name}={was!r}, and this loader has {now!r}; go on with "
                "the same data in the same order, or begin a run in another directory"
            )
    if saved.fingerprint != own.fingerprint and saved.order == "local":
        if saved.consumed:
            return (
                "the samples were dealt to the ranks in another order when the epoch was stopped; "
                "scatter them with the same seed and epoch, or use a global shuffle"
            )
    elif saved.fingerprint != own.fingerprint and saved.order in ("weighted", "lengths"):
        if saved.consumed:
            changed = (
                "the weights" if saved.order == "weighted" else "the lengths, batches or buckets"
            )
            return (
                f"the plan of epoch {saved.epoch} is another one here: {changed} have changed, or "
                "numpy has; resume with the same ones until the epoch ends"
            )
    elif saved.fingerprint != own.fingerprint:
        return (
            f"the {saved.order} order of epoch {saved.epoch} is another one here, because numpy's "
            "version is; go on with the numpy that began the epoch, or use shuffle='keyed'"
        )
    if not saved.consumed or saved.num_ranks == own.num_ranks:
        return None
    stopped = f"stopped inside an epoch on {saved.num_ranks} ranks and cannot go on on"
    if saved.order == "local":
        return (
            f"a local shuffle was {stopped} {own.num_ranks}; use the same number, or a global "
            "shuffle"
        )
    if saved.order == "split":
        return (
            f"streams that are split by rank were {stopped} {own.num_ranks}: the new split has "
            f"other samples on each rank; use {saved.num_ranks} ranks until the epoch ends, or "
            "give all ranks one stream and leave split='already' out"
        )
    return None
