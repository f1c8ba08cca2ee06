"""What a process group hands back: collectives that have ended, and messages under way."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import distributed_c10d

from hpctrain.errors import CollectiveError, TimedOutError
from hpctrain.world import poll

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

__all__ = ["Ended", "Message", "Several"]

_c10d: Any = distributed_c10d
_Work: Any = _c10d.Work

_HOLDS_WORKS = torch.__version__ >= "2.7"
"""Whether torch's C++ keeps the Python part of a Work; before, its `wait` would wait for ever."""
_held: dict[int, Any] = {}
_LONGEST_NAP_S = 1e-4  # a stage that naps longer keeps all later ones waiting
_MOST_BYTES = 2**30
"""In one message: counts have 32 bits in MPI 3. Longer ones travel in pieces, in order."""


class Ended(_Work):  # type: ignore[misc]
    """A collective that has ended on the host; its values may still be on the way to a GPU.

    Args:
        tensors: What it wrote.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        kind = next((t.device.type for t in tensors if t.device.type != "cpu"), None)
        self._event = None if kind is None else torch.Event(kind)
        if self._event is not None:
            self._event.record()
        if not _HOLDS_WORKS:
            _held[id(self)] = self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for the values."""
        _held.pop(id(self), None)
        if self._event is not None:
            self._event.wait()
        return True

    def is_completed(self) -> bool:
        """It has ended."""
        return self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        """It has ended, and what fails raises at once."""
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that it wrote."""
        return self._tensors

    def get_future(self) -> Any:
        """A future that has its value."""
        return _future_of(self._tensors)


class Several(_Work):  # type: ignore[misc]
    """Works that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """A future that has its value; waits."""
        self.wait()
        return _future_of([tensor for work in self._works for tensor in work.result()])


class Message(_Work):  # type: ignore[misc]
    """A tensor on its way to or from one rank; `wait` completes it.

    Args:
        comm: The ranks of the group.
        tensor: What is sent, or what receives.
        peer: The other rank in the group; MPI.ANY_SOURCE: whoever sends.
        tag: What tells messages between the same ranks apart.
        sends: Whether this rank sends.
        title: The message in words, which name the other rank.
        timeout_s: How long `wait` may wait.
    """

    def __init__(
        self,
        comm: Comm,
        tensor: Tensor,
        peer: int,
        tag: int,
        *,
        sends: bool,
        title: str,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._tensor = tensor
        self._title = title
        self._timeout_s = timeout_s
        self._sends = sends
        self._source = peer
        self._event: torch.Event | None = None
        plain = tensor.detach()
        on_host = plain.device.type == "cpu"
        if sends:
            # A GPU's values are on the host when `to` returns.
            self._memory = plain.resolve_conj().resolve_neg().to("cpu").contiguous()
        elif on_host and plain.is_contiguous():
            self._memory = plain
        else:
            self._memory = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=not on_host)
        self._requests: list[tuple[Request, int]] = [
            (
                comm.Isend(piece, peer, tag) if sends else comm.Irecv(piece, peer, tag),
                len(piece),
            )
            for piece in _pieces(self._memory)
        ]

    @property
    def is_under_way(self) -> bool:
        """Whether the other rank has not come yet."""
        return bool(self._requests) and not self.is_completed()

    def is_completed(self) -> bool:
        """Whether the memory may be used again; lets MPI go on."""
        while self._requests:
            request, num_bytes = self._requests[0]
            status = MPI.Status()
            try:
                if not request.Test(status):
                    return False
            except MPI.Exception as error:
                self._requests.clear()
                raise CollectiveError(
                    f"{self._title} failed: {error}; both ranks must give tensors of one size"
                ) from error
            self._requests.pop(0)
            self._check(status, num_bytes)
            if not self._requests:
                self._arrive()
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message was sent or received.

        Raises:
            TimedOutError: the other rank did not come; it is named.
            CollectiveError: it gave a tensor of another size.
        """
        timeout_s = self._timeout_s
        if timeout is not None and timeout > timedelta(0):
            timeout_s = timeout.total_seconds()
        if not poll(self.is_completed, timeout_s=timeout_s, longest_nap_s=_LONGEST_NAP_S):
            for request, _ in self._requests:
                request.Cancel()
            raise TimedOutError(
                f"{self._title}: timed out after {timeout_s:g} s; check that rank (an exception, "
                "another code path, a stopped node), or allow more time (timeout_s)"
            )
        if self._event is not None:  # it may have arrived while another stream was the current one
            self._event.wait()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_success(self) -> bool:
        """What fails raises in `wait`."""
        return self.is_completed()

    def result(self) -> list[Tensor]:
        """The tensor; waits."""
        self.wait()
        return [self._tensor]

    def get_future(self) -> Any:
        """A future that has its value; waits."""
        return _future_of(self.result())

    def source_rank(self) -> int:
        """Who sent it, as a rank of the group."""
        return self._source

    _source_rank = source_rank

    def _check(self, status: MPI.Status, num_bytes: int) -> None:
        if self._sends:
            return
        self._source = status.Get_source()
        came = status.Get_count(MPI.BYTE)
        if came != num_bytes:
            self._requests.clear()
            raise CollectiveError(
                f"{self._title}: rank {self._source} of the group sent {came} bytes, the tensor "
                f"that receives has {num_bytes}; both ranks must give tensors of one size and dtype"
            )

    def _arrive(self) -> None:
        if self._sends:
            return
        plain = self._tensor.detach()
        if self._memory.data_ptr() != plain.data_ptr() or self._memory.device != plain.device:
            plain.copy_(self._memory, non_blocking=True)
            if plain.device.type != "cpu":
                self._event = torch.Event(plain.device.type)
                self._event.record()
        elif not plain.is_inference():
            torch.autograd.graph.increment_version(plain)


def _pieces(memory: Tensor) -> list[MPI.memory]:
    """The memory of a contiguous host tensor, cut into messages; one even where it is empty."""
    num_bytes = memory.numel() * memory.element_size()
    whole = MPI.memory.fromaddress(memory.data_ptr() if num_bytes else 0, num_bytes)
    starts = range(0, num_bytes, _MOST_BYTES) if num_bytes else (0,)
    return [whole[start : start + _MOST_BYTES] for start in starts]


def _future_of(tensors: list[Tensor]) -> Any:
    devices: Any = sorted({t.device for t in tensors if t.device.type != "cpu"}, key=str)
    future: Any = torch.futures.Future(devices=devices)
    future.set_result(tensors)
    return future
