"""Loading the newest valid checkpoint on all ranks, or a certain one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain import log
from hpctrain.checkpoint.alone import read_tree
from hpctrain.checkpoint.assembling import Assembly
from hpctrain.checkpoint.catalog import list_checkpoints, quick_check
from hpctrain.checkpoint.comparing import differences, tensor_shapes
from hpctrain.checkpoint.flattening import flatten
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.reading import read_parts
from hpctrain.checkpoint.tree_file import Tree
from hpctrain.checkpoint.unflattening import unflatten
from hpctrain.errors import CheckpointError
from hpctrain.tensor_names import plain_keys
from hpctrain.world import World, agree

__all__ = ["Loaded", "load", "refuse_misfit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a checkpoint held. Tensors are in this rank's own memory, on the CPU."""

    state: Any
    own: Any
    """What this rank alone knew; None if it was saved by another number of ranks, or not at all."""
    step: int
    note: Any
    path: Path
    num_ranks: int
    """How many ranks saved it."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """What rank 0 tells all: a checkpoint to try, or that there is none left."""

    path: Path
    manifest: Manifest
    tree: Tree


def load(
    world: World,
    directory: Path,
    *,
    path: Path | None,
    like: Mapping[str, object] | None,
    timeout_s: float,
) -> Loaded | None:
    """Collective: load a checkpoint; the arguments must match.

    Returns:
        The newest valid one, or None where there is none at all.

    Raises:
        CheckpointError: on all ranks: the one that was asked for is not valid, or none of those
            that are there is.
    """
    refused: list[tuple[str, str]] = []
    offers = _offers(directory, path, like, refused) if world.rank == 0 else iter(())
    while True:
        offer, trouble = None, None
        try:
            with world.watching.patience(timeout_s):  # the disk may be slow
                offer = next(offers, None)
        except CheckpointError as error:
            trouble = str(error)
        agree(world.comm, trouble, error=CheckpointError, timeout_s=timeout_s)
        offer = world.comm.bcast(offer, root=0)
        if offer is None:
            break
        loaded, trouble = _try(world, offer, timeout_s)
        if loaded is not None:
            for each, why in refused:  # on rank 0
                log.warn(f"checkpoint {each} is refused: {why}")
            return loaded
        if world.rank == 0:
            refused.append((str(offer.path), str(trouble)))
    refused = world.comm.bcast(refused, root=0)
    if not refused:
        return None
    if path is not None:
        asked = ": ".join(refused[0])
        raise CheckpointError(f"the checkpoint that was asked for cannot be used: {asked}")
    raise CheckpointError(
        f"none of the checkpoints in {directory} can be used:\n  {_by_reason(refused)}\nto begin "
        "anew, move them away or choose another directory"
    )


def _by_reason(refused: Sequence[tuple[str, str]]) -> str:
    """Each reason once, with the checkpoints that it holds for."""
    reasons: dict[str, list[str]] = {}
    for path, why in refused:
        reasons.setdefault(why, []).append(Path(path).name)
    return "\n  ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())


def _offers(
    directory: Path,
    path: Path | None,
    like: Mapping[str, object] | None,
    refused: list[tuple[str, str]],
) -> Iterator[_Offer]:
    """Rank 0's part: checkpoints that look right, the newest first."""
    if path is None:
        paths = [entry.path for entry in reversed(list_checkpoints(directory))]
    else:
        paths = [path]
    for each in paths:
        manifest, trouble = quick_check(each)
        if manifest is not None and trouble is None:
            try:
                tree = read_tree(each, manifest)
                refuse_misfit(tree, like or {})
                yield _Offer(path=each, manifest=manifest, tree=tree)
                continue
            except CheckpointError as error:
                trouble = str(error)
        refused.append((str(each), str(trouble)))


def _try(world: World, offer: _Offer, timeout_s: float) -> tuple[Loaded | None, str | None]:
    """Collective: read a checkpoint; what is wrong with it is the same on all ranks."""
    manifest = offer.manifest
    try:
        same = manifest.num_ranks == world.size
        assembly = Assembly(manifest, offer.tree, own_rank=world.rank if same else None)
        trouble = read_parts(world, offer.path, manifest, assembly, timeout_s=timeout_s)
        if trouble is not None:
            return None, trouble
        return Loaded(
            state=assembly.state(),
            own=assembly.own(),
            step=manifest.step,
            note=unflatten(manifest.note, {}),
            path=offer.path,
            num_ranks=manifest.num_ranks,
            metrics=manifest.metrics,
        ), None
    except CheckpointError as error:  # of what all ranks read alike
        return None, str(error)


def refuse_misfit(tree: Tree, like: Mapping[str, object]) -> None:
    """Compare the tensors under certain keys of a checkpoint with those that are here. Pure.

    Raises:
        CheckpointError: they have other names or shapes; the first differences are named.
    """
    for key, wanted in like.items():
        flat = flatten(wanted)
        found = tensor_shapes(tree.skeleton, {k: s.shape for k, s in tree.tensors.items()}, key)
        if found is None:
            raise CheckpointError(f"it holds no {key}")
        here = tensor_shapes(flat.skeleton, {k: tuple(t.shape) for k, t in flat.tensors.items()})
        wrong = differences(plain_keys(found), plain_keys(here or {}))
        if wrong:
            raise CheckpointError(f"its {key} is of another model: {'; '.join(wrong)}")
