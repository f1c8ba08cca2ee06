"""A process group of torch.distributed whose ranks speak by MPI.

Its collectives are those of hpctrain's `mpi` engine: the same sums, the same dtypes, CUDA tensors
through host memory, the same watchdog. Before the data, ranks compare what they are about to do: a
rank that calls another collective, or gives another shape, dtype or operation, is refused on all.

torch calls these methods from Python and, by its trampoline, from C++. Newer versions have renamed
some (`_allgather_base` is `all_gather_single`): both names are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import distributed_c10d

from hpctrain.engines import EngineWatchdog, over_mpi
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.log import format_ranges
from hpctrain.torch_backend.comparing import Comparer, in_words
from hpctrain.torch_backend.reducing import Reduction, add_rows, as_reduction, check_fold, fold
from hpctrain.torch_backend.works import Ended, Message, Several

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.engines import Engine

__all__ = ["MpiProcessGroup"]

_c10d: Any = distributed_c10d
_ProcessGroup: Any = _c10d.ProcessGroup
_LEAST_TAG_UB = 32767  # what MPI promises
_MOST_FROM_ANYBODY = 2**30


class MpiProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Collective: the backend `hpctrain` for one group of ranks.

    Collectives end before they return. Messages (`send`, `recv`) do not wait: their Work does.

    Args:
        comm: The ranks of the group; freed by `close`.
        name: What torch calls the group.
        members: These ranks in the world, in the group's order.
        device: This rank's device; CPU tensors travel, too.
        watchdog: Who is told about every collective.
        timeout_s: How long a message may wait for the other rank.
    """

    def __init__(
        self,
        comm: Comm,
        *,
        name: str,
        members: Sequence[int],
        device: torch.device,
        watchdog: EngineWatchdog | None,
        timeout_s: float,
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm = comm
        self._name = name
        self._members = tuple(members)
        self.where = f"group of ranks {format_ranges(members, limit=16)}"
        """The group in words."""
        self._device = device
        self._timeout_s = timeout_s
        self._engine = over_mpi(comm, device)
        if len(self._members) > 1:
            self._engine.watch_among(watchdog, self._members)
        self._calls = Comparer(comm, self._engine, self.where, self._members)
        self._num_ranks = comm.Get_size()
        self._own_rank = comm.Get_rank()
        self._largest_tag = int(comm.Get_attr(MPI.TAG_UB) or _LEAST_TAG_UB)
        self._sent: list[Message] = []
        self._coalesced: list[Any] | None = None
        self._closed = False

    @property
    def engine(self) -> Engine:
        """What carries its collectives."""
        return self._engine

    # What torch asks about the group.

    @property
    def group_name(self) -> str:
        """What torch calls the group."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = {"cpu", self._device.type}
        return [torch.device(kind) for kind in sorted(kinds)]

    def getBackendName(self) -> str:
        """The backend's name."""
        return "hpctrain"

    def __repr__(self) -> str:
        return f"<hpctrain process {self.where}, {self._name!r}>"

    def shutdown(self) -> None:
        """Torch forgets the group; its communicators are given back by `close`."""

    def abort(self) -> None:
        """As `shutdown`: MPI cannot abort one group alone."""

    def close(self) -> None:
        """Collective: wait for messages that were sent, and give everything back."""
        if self._closed:
            return
        self._closed = True
        for message in self._sent:
            message.wait()
        self._sent.clear()
        self._engine.close(cure="its process group was closed")
        self._comm.Free()

    # Collectives.

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Ended:
        """Collective: overwrite each tensor with the root's."""
        root = 0 if opts is None else opts.rootRank
        for tensor in tensors:
            rows = self._swap("broadcast", f"{in_words(tensor)} from {root}", tensor, None)
            if rows is None:
                self._engine.broadcast_(tensor, root)
            else:
                tensor.detach().copy_(rows[root].view(tensor.shape))
        return Ended(tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Ended:
        """Collective: combine each tensor over the ranks, in place."""
        how = self._reduction("all_reduce", opts)
        for tensor in tensors:
            if how.adds(tensor.dtype):
                words = f"{how.name} {in_words(tensor)}"
                rows = self._swap("all_reduce", words, tensor, None)
                if rows is not None:
                    add_rows(rows, tensor, self._num_ranks if how.name == "AVG" else 1)
                    continue
            else:
                self._agree_on_reduction("all_reduce", tensor, how, in_words(tensor))
            self._reduce_in_place(tensor, how)
        return Ended(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Ended:
        """Collective: as `allreduce`."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Ended:
        """Collective: combine each tensor; the root's alone is overwritten."""
        how = self._reduction("reduce", opts)
        root = 0 if opts is None else opts.rootRank
        for tensor in tensors:
            self._agree_on_reduction("reduce", tensor, how, f"{in_words(tensor)} to {root}")
            whole = tensor.detach().clone()
            self._reduce_in_place(whole, how)
            if root == self._own_rank:
                tensor.detach().copy_(whole)
        return Ended(tensors)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Ended:
        """Collective: every rank's tensor in each rank's list; sizes may differ by rank."""
        for parts, given in zip(outputs, inputs, strict=True):
            trouble = self._one_each("all_gather", parts)
            if trouble is None and _size(parts[self._own_rank]) != _size(given):
                trouble = (
                    f"the input is {in_words(given)}, this rank's place in the output is "
                    f"{in_words(parts[self._own_rank])}"
                )
            self._compare("all_gather", in_words(*parts), trouble)
            joined = self._engine.allgather(given.reshape(-1))
            _store_parts(joined, parts)
        return Ended([part for parts in outputs for part in parts])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Ended:
        """Collective: join equal tensors of all ranks in one."""
        trouble = None
        if output.numel() != given.numel() * self._num_ranks or output.dtype != given.dtype:
            trouble = self._does_not_fit(output, given, "output", "input")
        rows = self._swap("all_gather_single", in_words(given), given, trouble)
        if rows is None:
            self._engine.allgather_into(output.detach(), given.detach())
        else:
            output.detach().copy_(rows.reshape(output.shape))
        return Ended([output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Ended:
        """Collective: as `all_gather_single`, for each."""
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given, opts)
        return Ended(outputs)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Ended:
        """Collective: as `allgather`; `output_lists` has one list for each rank."""
        parts = [list(column) for column in zip(*output_lists, strict=True)]
        return self.allgather(parts, inputs, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Ended:
        """Collective: combine the ranks' lists and keep this rank's part; sizes may differ."""
        how = self._reduction("reduce_scatter", opts)
        for output, parts in zip(outputs, inputs, strict=True):
            trouble = self._one_each("reduce_scatter", parts)
            if trouble is None and _size(parts[self._own_rank]) != _size(output):
                trouble = (
                    f"the output is {in_words(output)}, this rank's part of the input is "
                    f"{in_words(parts[self._own_rank])}"
                )
            self._agree_on_reduction("reduce_scatter", output, how, in_words(*parts), trouble)
            flat = [part.reshape(-1) for part in parts]
            if len({len(part) for part in flat}) == 1:
                self._scatter_sum(output, torch.stack(flat), how)
                continue
            whole = torch.cat(flat)
            self._reduce_in_place(whole, how)
            kept = torch.split(whole, [len(part) for part in flat])[self._own_rank]
            output.detach().copy_(kept.view(output.shape))
        return Ended(outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Ended:
        """Collective: combine one tensor and keep this rank's equal part of it."""
        how = self._reduction("reduce_scatter_single", opts)
        trouble = None
        if given.numel() != output.numel() * self._num_ranks or output.dtype != given.dtype:
            trouble = self._does_not_fit(given, output, "input", "output")
        call = "reduce_scatter_single"
        if how.adds(given.dtype):
            rows = self._swap(call, f"{how.name} {in_words(given)}", given, trouble)
            if rows is not None:
                own = rows.view(self._num_ranks, self._num_ranks, -1)[:, self._own_rank]
                add_rows(own, output, self._num_ranks if how.name == "AVG" else 1)
                return Ended([output])
        else:
            self._agree_on_reduction(call, given, how, in_words(given), trouble)
        self._scatter_sum(output, given.reshape(self._num_ranks, -1), how)
        return Ended([output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Ended:
        """Collective: as `reduce_scatter_single`, for each."""
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, opts)
        return Ended(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Ended:
        """Collective: give each rank its rows; without splits equally many."""
        kind = f"{given.dtype} rows of {tuple(given.shape[1:])}"
        self._compare("all_to_all_single", kind.removeprefix("torch."))
        came, num_rows = self._engine.alltoall(given, list(input_splits) if input_splits else None)
        expected = list(output_splits or ())
        if came.numel() != output.numel() or (expected and expected != num_rows):
            room = f"splits {expected} of " if expected else ""
            raise CollectiveError(
                f"all_to_all_single: ranks sent {num_rows} rows, the output has room for {room}"
                f"{in_words(output)}; the splits of all ranks must fit together"
            )
        output.detach().copy_(came.view(output.shape))
        return Ended([output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Ended:
        """Collective: give tensor r to rank r; shapes may differ."""
        trouble = self._one_each("all_to_all", inputs) or self._one_each("all_to_all", outputs)
        dtype = inputs[0].dtype if inputs else None
        self._compare("all_to_all", str(dtype).removeprefix("torch."), trouble)
        came, counts = self._engine.alltoall(
            torch.cat([part.reshape(-1) for part in inputs]), [part.numel() for part in inputs]
        )
        if counts != [part.numel() for part in outputs]:
            raise CollectiveError(
                f"all_to_all: ranks sent {counts} elements, the output is {in_words(*outputs)}; "
                "shapes must match pair by pair"
            )
        _store_parts(came, outputs)
        return Ended(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Ended:
        """Collective: every rank's tensor in the root's list; equal shapes."""
        root = 0 if opts is None else opts.rootRank
        written: list[Tensor] = []
        for index, given in enumerate(inputs):
            parts = outputs[index] if root == self._own_rank else []
            trouble = None
            if root == self._own_rank:
                trouble = self._one_each("gather", parts)
                if trouble is None and any(_size(part) != _size(given) for part in parts):
                    trouble = f"the input is {in_words(given)}, the output {in_words(*parts)}"
            self._compare("gather", f"{in_words(given)} to {root}", trouble)
            splits = [given.numel() if r == root else 0 for r in range(self._num_ranks)]
            came, _ = self._engine.alltoall(given.reshape(-1), splits)
            _store_parts(came, parts)
            written += parts
        return Ended(written)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Ended:
        """Collective: each rank gets its tensor of the root's list; equal shapes."""
        root = 0 if opts is None else opts.rootRank
        for index, output in enumerate(outputs):
            parts = inputs[index] if root == self._own_rank else []
            trouble = None
            if root == self._own_rank:
                trouble = self._one_each("scatter", parts)
                if trouble is None and any(_size(part) != _size(output) for part in parts):
                    trouble = f"the output is {in_words(output)}, the input {in_words(*parts)}"
            self._compare("scatter", f"{in_words(output)} from {root}", trouble)
            flat = torch.cat([p.reshape(-1) for p in parts]) if parts else output.new_empty(0)
            each = output.numel() if root == self._own_rank else 0
            came, _ = self._engine.alltoall(flat, [each] * self._num_ranks)
            output.detach().copy_(came.view(output.shape))
        return Ended(outputs)

    def barrier(self, opts: Any = None) -> Ended:
        """Collective: wait for all ranks of the group."""
        self._compare("barrier", "")
        return Ended([])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Collective: as `barrier`; the watchdog names the ranks that do not come."""
        self.barrier()

    # torch's former names.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        """Start sending a tensor to a rank of the group; leave it alone until `wait`."""
        self._sent = [message for message in self._sent if message.is_under_way]
        started = [self._start(tensor, peer, tag, sends=True) for tensor in tensors]
        self._sent += started  # the memory must live, also where nobody waits
        return self._note(started)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        """Start receiving a tensor from a rank of the group."""
        return self._note([self._start(tensor, peer, tag, sends=False) for tensor in tensors])

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Start receiving a tensor from whichever rank of the group sends one."""
        for tensor in tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            if num_bytes > _MOST_FROM_ANYBODY:
                raise ConfigError(
                    f"recv: {in_words(tensor)} from any rank has {num_bytes} bytes; at most "
                    f"{_MOST_FROM_ANYBODY} can come from an unknown rank: name the sender (src=)"
                )
        return self._note(
            [self._start(tensor, MPI.ANY_SOURCE, tag, sends=False) for tensor in tensors]
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Several:
        works, self._coalesced = self._coalesced or [], None
        return Several(works)

    def _start(self, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> Message:
        call = "send" if sends else "recv"
        if not (peer == MPI.ANY_SOURCE and not sends) and not 0 <= peer < self._num_ranks:
            raise ConfigError(
                f"{call}: rank {peer} is not in the {self.where}; choose 0 <= rank < "
                f"{self._num_ranks}"
            )
        most = self._largest_tag
        if not 0 <= tag <= most:
            raise ConfigError(f"{call}: tag={tag} is out of range; choose 0 <= tag <= {most}")
        who = "any rank" if peer == MPI.ANY_SOURCE else f"rank {self._members[peer]}"
        way = "to" if sends else "from"
        return Message(
            self._comm,
            tensor,
            peer,
            tag,
            sends=sends,
            title=f"{call} of {in_words(tensor)} {way} {who} ({self.where}, tag {tag})",
            timeout_s=self._timeout_s,
        )

    def _note(self, started: list[Message]) -> Any:
        if self._coalesced is not None:
            self._coalesced += started
        return started[0] if len(started) == 1 else Several(started)

    # How.

    def _reduction(self, call: str, opts: Any) -> Reduction:
        given = _c10d.ReduceOp.SUM if opts is None else opts.reduceOp
        return as_reduction(given, call)

    def _agree_on_reduction(
        self, call: str, tensor: Tensor, how: Reduction, words: str, trouble: str | None = None
    ) -> None:
        if trouble is None and how.op is None:
            trouble = check_fold(how.name, tensor.dtype, call)
        self._compare(call, f"{how.name} {words}", trouble)

    def _reduce_in_place(self, tensor: Tensor, how: Reduction) -> None:
        if how.op is None:
            parts = self._engine.allgather(tensor.detach().reshape(1, -1))
            tensor.detach().copy_(fold(how.name, parts).view(tensor.shape))
            return
        if how.name == "PREMUL_SUM":
            tensor.detach().mul_(how.factor)
        self._engine.allreduce_(tensor.detach(), how.op)

    def _scatter_sum(self, output: Tensor, lines: Tensor, how: Reduction) -> None:
        """Collective: row r of the combined lines for rank r."""
        if how.op is None:
            came, _ = self._engine.alltoall(lines.detach())
            kept = fold(how.name, came)
        else:
            scaled = lines * how.factor if how.name == "PREMUL_SUM" else lines
            kept = self._engine.reduce_scatter(scaled.detach(), how.op)
        output.detach().copy_(kept.view(output.shape))

    def _one_each(self, call: str, parts: Sequence[Tensor]) -> str | None:
        if len(parts) == self._num_ranks:
            return None
        return f"{call}: {len(parts)} tensors for {self._num_ranks} ranks; give one for each"

    def _does_not_fit(self, large: Tensor, small: Tensor, large_name: str, small_name: str) -> str:
        return (
            f"the {large_name} is {in_words(large)} and the {small_name} {in_words(small)}; the "
            f"{large_name} must have {self._num_ranks} times as many elements of the same dtype"
        )

    def _compare(self, call: str, words: str, trouble: str | None = None) -> None:
        """Collective: raise on all ranks of the group unless all are about to do the same."""
        self._check_open(call)
        self._calls.compare(f"{call} {words}".rstrip(), trouble)

    def _swap(self, call: str, words: str, tensor: Tensor, trouble: str | None) -> Tensor | None:
        """Collective: as `_compare`; every rank's values as rows, where they are few."""
        if not self._calls.fits(tensor):
            self._compare(call, words, trouble)
            return None
        self._check_open(call)
        return self._calls.swap(f"{call} {words}", tensor, trouble)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ConfigError(f"{call}: the process {self.where} is closed")

    def refuse(self, text: str) -> NoReturn:
        """Collective: raise what differs between the ranks' calls, on all of them."""
        self._calls.refuse(text)


def _size(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.numel(), tensor.dtype


def _store_parts(joined: Tensor, parts: Sequence[Tensor]) -> None:
    """Cut flat values into the tensors that they belong to."""
    if parts:
        cut = torch.split(joined, [part.numel() for part in parts])
        for part, came in zip(parts, cut, strict=True):
            part.detach().copy_(came.view(part.shape))
