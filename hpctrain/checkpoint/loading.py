"""Loading the newest valid checkpoint on all ranks, or a given one, as a whole or in pieces."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain import log
from hpctrain.checkpoint.agreeing import same_on_all
from hpctrain.checkpoint.directory import list_checkpoints, quick_check
from hpctrain.checkpoint.format import Manifest
from hpctrain.checkpoint.parts import Tree
from hpctrain.checkpoint.reading import Assembly, read_parts, read_tree
from hpctrain.checkpoint.tree import Flat, PieceRequest, Wanted, flatten, unflatten
from hpctrain.errors import CheckpointError
from hpctrain.pieces import Region
from hpctrain.tensor_names import plain_keys, plain_name
from hpctrain.world import World, agree

__all__ = [
    "Cut",
    "Loaded",
    "differences",
    "flatten_like",
    "load",
    "refuse_misfit",
    "tensor_shapes",
    "want",
]

_Shape = tuple[int, ...]


Cut = Callable[[str, _Shape], Region | range | None]
"""Which part of a tensor this rank needs, by its place under a key (`0/exp_avg`) and its shape: a
block, elements counted flat, or None for all of it."""


def flatten_like(like: Mapping[str, object] | None) -> dict[str, Flat | Cut]:
    """What `load` was asked for, by key of the state.

    Raises:
        CheckpointError: a tree holds something that no checkpoint does, or a piece is wrong.
    """
    return {
        key: wanted if callable(wanted) else flatten(wanted) for key, wanted in (like or {}).items()
    }


def refuse_misfit(tree: Tree, like: Mapping[str, Flat | Cut]) -> None:
    """Compare the tensors under certain keys of a checkpoint with those that are here.

    Raises:
        CheckpointError: they have other names or shapes; the first differences are named.
    """
    stored = {name: spec.shape for name, spec in tree.tensors.items()}
    for key, wanted in like.items():
        found = tensor_shapes(tree.skeleton, stored, key)
        if found is None:
            raise CheckpointError(f"it contains no {key}")
        if not isinstance(wanted, Flat):
            continue
        shapes = {name: shape for name, (_, shape) in wanted.kinds.items()}
        here = tensor_shapes(wanted.skeleton, shapes) or {}
        wrong = differences(plain_keys(found), plain_keys(here))
        if wrong:
            raise CheckpointError(f"its {key} belongs to another model: {'; '.join(wrong)}")


def want(tree: Tree, like: Mapping[str, Flat | Cut]) -> tuple[Any, list[Wanted]]:
    """The skeleton with the requested pieces, and all tensors and pieces in it.

    Raises:
        CheckpointError: a piece lies outside of its tensor.
    """
    cuts = {key: _cut_like(each) if isinstance(each, Flat) else each for key, each in like.items()}
    found: dict[str, list[PieceRequest | None]] = {}

    def choose(node: Any, path: tuple[str, ...]) -> Any:
        name = node["name"]
        cut = cuts.get(path[0], _all_of_it) if path else _all_of_it
        ask = _ask(name, plain_name("/".join(path[1:])), tree.tensors[name].shape, cut)
        found.setdefault(name, []).append(ask)
        return node if ask is None else {**node, "name": ask}

    skeleton = _change(tree.skeleton, (), choose)
    whole = [name for name in tree.tensors if None in found.get(name, [None])]
    asks = dict.fromkeys(ask for each in found.values() for ask in each if ask is not None)
    return skeleton, [*whole, *asks]


def _all_of_it(place: str, shape: _Shape) -> None:
    return None


def _cut_like(flat: Flat) -> Cut:
    """What an existing tree needs: pieces where it has pieces."""
    places = {plain_name("/".join(place)): name for place, name in _tensors(flat.skeleton, ())}

    def cut(place: str, shape: _Shape) -> Region | range | None:
        piece = flat.pieces.get(places.get(place, ""))
        if piece is None:
            return None
        if isinstance(piece.offset, int):
            return range(piece.offset, piece.offset + piece.tensor.numel())
        return Region(tuple(piece.offset), tuple(piece.tensor.shape))

    return cut


def _ask(name: str, place: str, shape: _Shape, cut: Cut) -> PieceRequest | None:
    wanted = cut(place, shape)
    if wanted is None:
        return None
    if isinstance(wanted, range):
        is_inside = 0 <= wanted.start <= wanted.stop <= Region.whole(shape).num_elements
        ask = PieceRequest(name, wanted.start, (len(wanted),), shape)
        is_inside = is_inside and wanted.step == 1
    else:
        ends = zip(wanted.offset, wanted.shape, shape, strict=False)
        is_inside = len(wanted.offset) == len(wanted.shape) == len(shape) and all(
            0 <= a <= a + n <= m for a, n, m in ends
        )
        ask = PieceRequest(name, wanted.offset, wanted.shape, shape)
    if not is_inside:
        raise CheckpointError(f"{wanted} of {name} was asked for, which has the shape {shape}")
    return ask


def _change(
    value: Any, path: tuple[str, ...], change: Callable[[Any, tuple[str, ...]], Any]
) -> Any:
    """A skeleton with every tensor changed."""
    if type(value) is list:
        return [_change(item, (*path, str(i)), change) for i, item in enumerate(value)]
    if type(value) is not dict:
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _change(item, (*path, key), change) for key, item in value.items()}
    if kind == "tensor":
        return change(value, path)
    if kind in ("dict", "OrderedDict"):
        items = [[key, _change(item, (*path, str(key)), change)] for key, item in value["items"]]
        return {**value, "items": items}
    if kind == "tuple":
        return {**value, "items": _change(value["items"], path, change)}
    return value


def differences(
    found: Mapping[str, _Shape], wanted: Mapping[str, _Shape], *, most: int = 5
) -> list[str]:
    """A description of where the tensors of a checkpoint differ from the required ones.

    Args:
        found: Shapes by name in the checkpoint.
        wanted: Shapes by name here.
        most: How many differences to name; the rest is counted.

    Returns:
        Nothing if they fit.
    """
    texts: list[str] = []
    missing = [name for name in wanted if name not in found]
    surplus = [name for name in found if name not in wanted]
    for name in missing:
        near = difflib.get_close_matches(name, surplus, n=1) if len(texts) < most else []
        hint = f"; it has {near[0]} {_shape(found[near[0]])} instead" if near else ""
        texts.append(f"{name} {_shape(wanted[name])} is missing in it{hint}")
    texts += [
        f"{name} is {_shape(found[name])} in it and {_shape(shape)} here"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    texts += [f"it has {name} {_shape(found[name])}, which is not here" for name in surplus]
    if len(texts) > most:
        texts = [*texts[:most], f"and {len(texts) - most} more differences"]
    return texts


def _shape(shape: _Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"


def tensor_shapes(
    skeleton: Any, shapes: Mapping[str, _Shape], key: str | None = None
) -> dict[str, _Shape] | None:
    """The shape of every tensor in a tree, by its place; one in several places stands in each.

    Args:
        skeleton: The tree as JSON.
        shapes: Of the stored tensors, by name.
        key: Only what is under this key of the tree; None: everything.

    Returns:
        None if there is no such key.
    """
    if key is not None:
        top = dict(_children(skeleton))
        if key not in top:
            return None
        skeleton = top[key]
    return {"/".join(place) or "it": shapes[name] for place, name in _tensors(skeleton, ())}


def _tensors(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if type(value) is dict and value.get("$") == "tensor":
        yield place, value["name"]
        return
    for key, item in _children(value):
        yield from _tensors(item, (*place, key))


def _children(value: Any) -> list[tuple[str, Any]]:
    """What is directly inside a value of the tree, by key as text."""
    if type(value) is list:
        return [(str(index), item) for index, item in enumerate(value)]
    if type(value) is not dict:
        return []
    kind = value.get("$")
    if kind is None:
        return list(value.items())
    if kind in ("dict", "OrderedDict"):
        return [(str(key), item) for key, item in value["items"]]
    return _children(value["items"]) if kind == "tuple" else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a checkpoint held. Tensors are in this rank's own memory, on the CPU."""

    state: Any
    own: Any
    """This rank's own state; None if saved by a different number of ranks, or not at all."""
    step: int
    note: Any
    path: Path
    num_ranks: int
    """How many ranks saved it."""
    metrics: Mapping[str, float] = field(default_factory=dict)


_Offer = tuple[Path, Manifest, Tree]
"""What rank 0 broadcasts: a checkpoint to try."""


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
        CheckpointError: on all ranks: the requested one is not valid, or none of those
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
            refused.append((str(offer[0]), str(trouble)))
    refused = world.comm.bcast(refused, root=0)
    if not refused:
        return None
    if path is not None:
        asked = ": ".join(refused[0])
        raise CheckpointError(f"the requested checkpoint cannot be used: {asked}")
    raise CheckpointError(
        f"none of the checkpoints in {directory} can be used:\n  {_by_reason(refused)}\nto start "
        "from scratch, move them away or choose another directory"
    )


def _agree_on_wanted(
    world: World, like: Mapping[str, object] | None, timeout_s: float
) -> tuple[dict[str, Flat | Cut], bool]:
    """Collective: what this rank needs, and whether any rank needs pieces."""
    wanted: dict[str, Flat | Cut] = {}
    trouble = None
    try:
        wanted = flatten_like(like)
    except CheckpointError as error:
        trouble = f"like= cannot be used: {error}"
    agree(world.comm, trouble, error=CheckpointError, timeout_s=timeout_s)
    mine = any(not isinstance(each, Flat) or bool(each.pieces) for each in wanted.values())
    (is_same,) = same_on_all(world, [mine], "request for pieces", timeout_s=timeout_s)
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
                yield each, manifest, tree
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
    """Collective: read a checkpoint; errors are the same on all ranks."""
    folder, manifest, tree = offer
    same = manifest.num_ranks == world.size
    own_rank = world.rank if same else None
    try:
        if in_pieces:
            assembly, trouble = _want_pieces(world, offer, like, own_rank)
            if assembly is None:
                return None, trouble
        else:
            assembly = Assembly(manifest, tree, own_rank=own_rank)
        trouble = read_parts(
            world, folder, manifest, assembly, in_pieces=in_pieces, timeout_s=timeout_s
        )
        if trouble is not None:
            return None, trouble
        return Loaded(
            state=assembly.state(),
            own=assembly.own(),
            step=manifest.step,
            note=unflatten(manifest.note, {}),
            path=folder,
            num_ranks=manifest.num_ranks,
            metrics=manifest.metrics,
        ), None
    except CheckpointError as error:  # of what all ranks read
        return None, str(error)


def _want_pieces(
    world: World, offer: _Offer, like: Mapping[str, Flat | Cut], own_rank: int | None
) -> tuple[Assembly | None, str | None]:
    """Collective: memory for what this rank needs; errors are the same on all ranks."""
    _, manifest, tree = offer
    assembly, trouble = None, None
    try:
        refuse_misfit(tree, like)
        skeleton, wanted = want(tree, like)
        assembly = Assembly(manifest, tree, own_rank=own_rank, wanted=wanted, skeleton=skeleton)
    except CheckpointError as error:
        trouble = str(error)
    told = world.comm.allgather(trouble)
    first = next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), None)
    return (assembly, None) if first is None else (None, first)
