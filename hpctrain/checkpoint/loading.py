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
from hpctrain.checkpoint.comparing import Cut, flatten_like, refuse_misfit, want
from hpctrain.checkpoint.flattening import Flat
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.meeting import meet
from hpctrain.checkpoint.reading import read_parts
from hpctrain.checkpoint.tree_file import Tree
from hpctrain.checkpoint.unflattening import unflatten
from hpctrain.errors import CheckpointError
from hpctrain.world import World, agree

__all__ = ["Loaded", "load"]


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
    wanted, in_pieces = _agree_on_wanted(world, like, timeout_s)
    offers = _offers(directory, path, wanted, refused) if world.rank == 0 else iter(())
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
        loaded, trouble = _try(world, offer, wanted, in_pieces=in_pieces, timeout_s=timeout_s)
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


def _agree_on_wanted(
    world: World, like: Mapping[str, object] | None, timeout_s: float
) -> tuple[dict[str, Flat | Cut], bool]:
    """Collective: what this rank wants, and whether any rank wants pieces."""
    wanted: dict[str, Flat | Cut] = {}
    trouble = None
    try:
        wanted = flatten_like(like)
    except CheckpointError as error:
        trouble = f"like= cannot be used: {error}"
    agree(world.comm, trouble, error=CheckpointError, timeout_s=timeout_s)
    mine = any(not isinstance(each, Flat) or bool(each.pieces) for each in wanted.values())
    (is_same,) = meet(world, [mine], "asking for pieces", timeout_s=timeout_s)
    return wanted, mine or not is_same


def _by_reason(refused: Sequence[tuple[str, str]]) -> str:
    """Each reason once, with the checkpoints that it holds for."""
    reasons: dict[str, list[str]] = {}
    for path, why in refused:
        reasons.setdefault(why, []).append(Path(path).name)
    return "\n  ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())


def _offers(
    directory: Path,
    path: Path | None,
    like: Mapping[str, Flat | Cut],
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
                refuse_misfit(tree, like)
                yield _Offer(path=each, manifest=manifest, tree=tree)
                continue
            except CheckpointError as error:
                trouble = str(error)
        refused.append((str(each), str(trouble)))


def _try(
    world: World,
    offer: _Offer,
    like: Mapping[str, Flat | Cut],
    *,
    in_pieces: bool,
    timeout_s: float,
) -> tuple[Loaded | None, str | None]:
    """Collective: read a checkpoint; what is wrong with it is the same on all ranks."""
    manifest = offer.manifest
    same = manifest.num_ranks == world.size
    own_rank = world.rank if same else None
    try:
        if in_pieces:
            assembly, trouble = _want_pieces(world, offer, like, own_rank)
            if assembly is None:
                return None, trouble
        else:
            assembly = Assembly(manifest, offer.tree, own_rank=own_rank)
        trouble = read_parts(
            world, offer.path, manifest, assembly, in_pieces=in_pieces, timeout_s=timeout_s
        )
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


def _want_pieces(
    world: World, offer: _Offer, like: Mapping[str, Flat | Cut], own_rank: int | None
) -> tuple[Assembly | None, str | None]:
    """Collective: memory for what this rank wants; what is wrong is the same on all ranks."""
    assembly, trouble = None, None
    try:
        refuse_misfit(offer.tree, like)
        skeleton, wanted = want(offer.tree, like)
        assembly = Assembly(
            offer.manifest, offer.tree, own_rank=own_rank, wanted=wanted, skeleton=skeleton
        )
    except CheckpointError as error:
        trouble = str(error)
    told = world.comm.allgather(trouble)
    first = next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), None)
    return (assembly, None) if first is None else (None, first)
