"""The sentinel: every few steps all ranks compare their weights, bit by bit.

Ranks hold copies of one model. A flipped bit, a rank that missed an update or made another one
stays unseen in the loss for long; here it ends the job with the parameter, the rank and the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpctrain.errors import ConfigError, DriftError
from hpctrain.faults.watchdog import Watchdog, start
from hpctrain.log import name_ranks, notice
from hpctrain.name_patterns import matches_any
from hpctrain.pieces import Piece, is_sharded
from hpctrain.world import World, agree

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = [
    "OddTensor",
    "Sentinel",
    "describe_difference",
    "digest",
    "digest_all",
    "find_odd",
    "render",
    "watched_names",
]

_PIECE = 1 << 24
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def digest(tensor: Tensor) -> Tensor:
    """Two int64 on the tensor's device. How it is computed depends on shape and dtype alone."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() == 0:
        return torch.zeros(2, dtype=torch.int64, device=flat.device)
    if flat.numel() * flat.element_size() % 8 == 0:
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()  # words must begin where memory has them
        words = flat.view(torch.uint8).view(torch.int64)
    else:
        words = flat.view(_BY_SIZE[flat.element_size()]).to(torch.int64)
    return torch.stack([words.sum(), _sum_of_squares(words)])


def _sum_of_squares(words: Tensor) -> Tensor:
    if words.device.type == "cpu":
        return torch.dot(words, words)
    # No integer dot on GPUs; in pieces, because the squares take memory.
    pieces = [piece.mul(piece).sum() for piece in torch.split(words, _PIECE)]
    return torch.stack(pieces).sum()


def digest_all(tensors: Sequence[Tensor | None]) -> list[int]:
    """The digests of many tensors, one after the other; the host waits once for each device.

    A tensor that is not there counts as -1, -1.
    """
    found = [None if tensor is None else digest(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(found):
        if one is not None:
            by_device.setdefault(one.device, []).append(index)
    numbers = [-1] * (2 * len(found))
    for indices in by_device.values():
        values = torch.stack([one for i in indices if (one := found[i]) is not None]).tolist()
        for index, (total, squares) in zip(indices, values, strict=True):
            numbers[2 * index : 2 * index + 2] = [total, squares]
    return numbers


_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class OddTensor:
    """A tensor that is not the same on all ranks."""

    name: str
    reference: int
    """The lowest rank of the most frequent version."""
    ranks: tuple[int, ...]
    """Ranks that differ from the majority or, without one, from the reference."""
    majority: bool
    """Whether a majority of ranks agrees, so that the others are the outliers."""


def find_odd(name: str, digests: Sequence[Hashable | None]) -> OddTensor:
    """Find the ranks whose digest is not what most ranks have.

    Args:
        name: Of the tensor.
        digests: Of all ranks, in rank order; None: it does not hold that piece.
    """
    groups: dict[Hashable, list[int]] = {}
    num_held = 0
    for rank, one in enumerate(digests):
        if one is not None:
            groups.setdefault(one, []).append(rank)
            num_held += 1
    usual, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    return OddTensor(
        name=name,
        reference=usual[0],
        ranks=tuple(sorted(rank for ranks in others for rank in ranks)),
        majority=2 * len(usual) > num_held,
    )


def describe_difference(mine: Tensor | None, theirs: Tensor | None) -> str:
    """How a tensor differs from the reference's; nothing where it does not."""
    if mine is None or theirs is None:
        return "" if mine is theirs else "is missing on one side"
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"is {_kind(mine)} instead of {_kind(theirs)}"
    size = mine.element_size()
    own, other = (t.reshape(-1).view(torch.uint8).view(-1, size) for t in (mine, theirs))
    changed = (own != other).any(1).nonzero().view(-1)
    if not len(changed):
        return ""
    first = int(changed[0])
    flipped = sum(int(byte).bit_count() for byte in (own[first] ^ other[first]).tolist())
    bits = f"{flipped} bit{'s' if flipped > 1 else ''}"
    values = f"{mine.reshape(-1)[first].item()!r} instead of {theirs.reshape(-1)[first].item()!r}"
    where = f"element {first} is {values}, {bits} apart"
    return f"{len(changed)} of {mine.numel()} elements differ, {where}"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def render(
    odd: Sequence[OddTensor],
    details: Sequence[str],
    hosts: Sequence[str],
    *,
    step: int,
    num_more: int = 0,
) -> str:
    """The message of the error, the same on all ranks.

    Args:
        odd: What differs, at least one.
        details: Of all ranks, how the first of them differs from the reference's.
        hosts: Of all ranks.
        step: At which it was seen.
        num_more: How many tensors differ besides.
    """
    first = odd[0]
    names = [one.name for one in odd[1:_MOST_NAMED]]
    more = len(odd) - 1 - len(names) + num_more
    also = f"; also {', '.join(names)}" if names else ""
    also += f" and {more} more" if more else ""
    who = f"{name_ranks(first.ranks)} of {len(hosts)}"
    whose = [f"rank {r} on {hosts[r]}: {details[r]}" for r in first.ranks[:_MOST_NAMED]]
    against = "the others" if first.majority else f"rank {first.reference}"
    doubt = "" if first.majority else " (there is no majority to show which is right)"
    one_bit = all("1 bit apart" in details[r] and "1 of " in details[r] for r in first.ranks)
    cause = (
        "one flipped bit suggests faulty memory: have the node checked"
        if one_bit
        else "look for updates, or changes of weights in the script, that differ between ranks"
    )
    return (
        f"step {step}: {first.name} of {who} differs from that of {against}{doubt}; "
        f"{'; '.join(whose)}{also}; {cause}, and resume from a checkpoint before this step"
    )


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_MOST_COMPARED = 64


class _Watch(Protocol):
    def enter(self, call: str) -> None: ...
    def leave(self) -> None: ...


class _Watchdog(Protocol):
    def among(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> _Watch: ...


def watched_names(model: nn.Module, exclude: Sequence[str] = ()) -> tuple[str, ...]:
    """What is compared: all parameters, and all buffers but the statistics of normalisations.

    BatchNorm's running statistics come from each rank's own batches and differ by right. What else
    differs by rank on purpose is excluded by patterns (`decoder.cache.*`). Sparse tensors and those
    without memory are left out. A part of a tensor is named after the part.
    """
    own = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NormBase)
        for name in _STATISTICS
    }
    return tuple(
        name
        for name, tensor in _tensors(model)
        if name not in own
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not matches_any(name.partition(" (")[0], exclude)
    )


_State = Mapping[str, Tensor | Piece]


def _tensors(model: nn.Module | _State) -> Iterator[tuple[str, Tensor]]:
    """All tensors by name; of pieces each block, named after where it lies in the whole."""
    if isinstance(model, nn.Module):
        # A weight that two stages have is one, under its first name.
        first_names = getattr(getattr(model, _CUT, None), "first_names", {})
        for name, parameter in model.named_parameters():
            yield _part_of(first_names.get(name, name), parameter)
        yield from model.named_buffers()
        return
    for name, value in model.items():
        if isinstance(value, Piece):
            yield from ((f"{name}{region}", tensor) for region, tensor in value.held())
        else:
            yield name, value


_CUT = "hpctrain_cut"
"""What a model has that was cut into stages."""


def _part_of(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A tensor as it is here: of one that torch has divided this rank's part, named after it."""
    if not is_sharded(tensor):
        return name, tensor
    divided: Any = tensor
    mesh = divided.device_mesh
    dims = mesh.mesh_dim_names or [str(dim) for dim in range(mesh.ndim)]
    held = [
        f"{dim} part {place + 1} of {size}"
        for dim, size, place, placement in zip(
            dims, mesh.shape, mesh.get_coordinate(), divided.placements, strict=True
        )
        if size > 1 and not placement.is_replicate()
    ]
    return f"{name} ({', '.join(held)})" if held else name, divided.to_local()


def _is_divided(model: nn.Module) -> bool:
    """Whether ranks hold different parts of a model: stages, shards, or parts of layers."""
    return hasattr(model, _CUT) or any(map(is_sharded, model.parameters()))


def _held_by_several(world: World, names: Sequence[str]) -> list[str]:
    """Collective: the names that at least two ranks have, of all ranks' names."""
    held = Counter(name for told in world.comm.allgather(list(names)) for name in told)
    return sorted(name for name, count in held.items() if count > 1)


def _in_state(world: World, state: _State, exclude: Sequence[str]) -> tuple[str, ...]:
    """Collective: the whole tensors of a state, and the blocks that several ranks hold."""
    kept = {name: value for name, value in state.items() if not matches_any(name, exclude)}
    pieces = {name: value for name, value in kept.items() if isinstance(value, Piece)}
    shared = _held_by_several(world, [name for name, _ in _tensors(pieces)])
    return (*(name for name in kept if name not in pieces), *shared)


class Sentinel:
    """Collective: watches over a model; `every`, `exclude` and the model's names must match.

    Args:
        world: The ranks. One rank alone compares nothing.
        model: Whose weights should be the same on all ranks. Of a model that `split` has divided
            what several ranks hold is compared among them: stages and parts of layers over the
            data dimension, whole parameters of divided layers over all; a shard that one rank alone
            holds is not. Or tensors by name, and pieces of them where the state is sharded.
        every: Steps between comparisons.
        exclude: Names that may differ, as patterns of a shell.
        watchdog: Whose logs to use for the comparison; None: those of the world.
        timeout_s: How long a rank may be late.

    Raises:
        ConfigError: on all ranks; nothing is left to compare, or ranks have different models.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module | Mapping[str, Tensor | Piece],
        *,
        every: int = 100,
        exclude: Sequence[str] = (),
        watchdog: _Watchdog | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._world = world
        self._model = model
        self.every = every
        self.names = watched_names(model, exclude) if isinstance(model, nn.Module) else ()
        self._num_steps = 0
        self._comm: Comm | None = None
        self._own: Watchdog | None = None
        trouble = self._trouble(exclude)
        if world.size == 1:
            if trouble is not None:
                raise ConfigError(trouble)
            return
        agree(world.comm, trouble, error=ConfigError, timeout_s=timeout_s)
        with world.watching.allow(timeout_s):
            divided = isinstance(model, nn.Module) and _is_divided(model)
            if not isinstance(model, nn.Module):
                self.names = _in_state(world, model, exclude)
            elif any(world.comm.allgather(divided)):
                self.names = tuple(_held_by_several(world, self.names))
            theirs = world.comm.bcast((self.names, every), root=0)
        if divided and not self.names and world.rank == 0:
            notice(
                "the sentinel compares nothing: every tensor of this model is in shards, each of "
                "which one rank alone holds"
            )
        differs = None if theirs == (self.names, every) else "model or every differs from rank 0"
        agree(world.comm, differs, error=ConfigError, timeout_s=timeout_s)
        if watchdog is None:
            watchdog = self._own = start(world, timeout_s=timeout_s)
        here = {name for name, _ in _tensors(model)}
        may_lack = not isinstance(model, nn.Module) or divided
        self._elsewhere = [may_lack and name not in here for name in self.names]
        self._watch = watchdog.among(range(world.size), timeout_s=timeout_s)
        self._comm = world.comm.Dup()
        world.at_exit(self.close)

    def _trouble(self, exclude: Sequence[str]) -> str | None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            return f"every={self.every!r} must be a whole number of steps, at least 1"
        if isinstance(exclude, str):
            return f"exclude={exclude!r} is one text; give a list of patterns"
        is_whole = isinstance(self._model, nn.Module) and not _is_divided(self._model)
        if is_whole and not self.names:
            return f"nothing is left to compare: the model has no weights but {list(exclude)}"
        return None

    def step(self, number: int | None = None) -> bool:
        """Collective: after each update of the weights; True where they were compared.

        Args:
            number: Of the step, in a run that resumed from a checkpoint; None counts from 1.

        Raises:
            DriftError: on all ranks; with the parameter, the ranks and the step.
        """
        self._num_steps = self._num_steps + 1 if number is None else number
        if self._num_steps % self.every:
            return False
        self.compare(step=self._num_steps)
        return True

    def compare(self, *, step: int) -> None:
        """Collective: compare now; `step` is for the message.

        Raises:
            DriftError: on all ranks; with the parameter, the ranks and the step.
        """
        self._num_steps = step
        if self._comm is None or not self.names:
            return
        mine = np.array(digest_all(self._tensors()), dtype=np.int64)
        self._watch.enter("comparison of weights")
        try:
            self._compare(self._comm, mine, step)
        finally:
            self._watch.leave()

    def close(self) -> None:
        """Collective: give the communicator back. May be called again."""
        if self._comm is not None:
            self._comm.Free()
            self._comm = None
        if self._own is not None:
            self._own.stop()

    def _tensors(self) -> list[Tensor | None]:
        there = dict(_tensors(self._model))
        return [there.get(name) for name in self.names]

    def _compare(self, comm: Comm, mine: np.ndarray, step: int) -> None:
        from mpi4py import MPI

        # Largest, and by the complement smallest: they are equal where all ranks are.
        both = np.concatenate([mine, ~mine])
        both[np.tile(np.repeat(self._elsewhere, 2), 2)] = np.iinfo(np.int64).min  # not held here
        comm.Allreduce(MPI.IN_PLACE, both, op=MPI.MAX)
        largest, smallest = both[: len(mine)], ~both[len(mine) :]
        indices = sorted({int(i) // 2 for i in np.nonzero(largest != smallest)[0]})
        if not indices:
            return
        shown = indices[:_MOST_COMPARED]
        told = comm.allgather(
            [
                None if self._elsewhere[i] else (int(mine[2 * i]), int(mine[2 * i + 1]))
                for i in shown
            ]
        )
        odd = [find_odd(self.names[i], [row[n] for row in told]) for n, i in enumerate(shown)]
        details = comm.allgather(self._look(comm, odd[0], self._tensors()[shown[0]]))
        hosts = [info.host for info in self._world.ranks]
        raise DriftError(render(odd, details, hosts, step=step, num_more=len(indices) - len(shown)))

    def _look(self, comm: Comm, odd: OddTensor, tensor: Tensor | None) -> str:
        """Collective: how this rank's tensor differs from the reference's."""
        root = odd.reference
        value = None if tensor is None else tensor.detach().cpu().contiguous()
        theirs = comm.bcast(value if comm.Get_rank() == root else None, root=root)
        return describe_difference(value, theirs)
