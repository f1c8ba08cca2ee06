"""The `mpi` engine: collectives of mpi4py on a communicator of its own.

Asynchronous collectives run on one worker thread, in the order in which they were started, with the
interpreter's lock released; a blocking one queues behind those that are pending. A sum is made in
the order that the MPI library chooses by count and size alone, so equal runs give equal bits.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.engines import encoding
from hpctrain.engines.base import Engine, EngineWatchdog, Finish, Op
from hpctrain.engines.node import NodeGroup, domain_here
from hpctrain.engines.node_buffers import NodeBuffers, is_large
from hpctrain.engines.registry import BUILT_IN
from hpctrain.world import SharedBlock, environment

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["MpiEngine", "Worker", "WorkerCall", "mpi_reads_device_memory", "over_mpi"]

_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_OPS = {Op.SUM: MPI.SUM, Op.MIN: MPI.MIN, Op.MAX: MPI.MAX}
_QUERIES = {"cuda": "MPIX_Query_cuda_support", "rocm": "MPIX_Query_rocm_support"}
_STOP_S = 30.0


class MpiEngine(Engine):
    """Collectives over MPI; CUDA tensors by MPI itself if it reads device memory, else by the host.

    Args:
        comm: The ranks; duplicated here.
        device: This rank's device.
        watch: Monitors this rank's collectives.
    """

    name = "mpi"
    capabilities = BUILT_IN["mpi"].capabilities

    def __init__(
        self, comm: Comm, device: torch.device, *, watch: EngineWatchdog | None = None
    ) -> None:
        super().__init__(comm, device, watch=watch)
        self._data: Comm = comm.Dup()
        self._worker = Worker("hpctrain-mpi", device)
        self._concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._direct = device.type == "cpu" or mpi_reads_device_memory(device.type)
        self._group: NodeGroup | None = None
        self._buffers: NodeBuffers | None = None

    def node_group(self) -> NodeGroup:
        """Collective at the first call: this node's ranks and their counterparts elsewhere."""
        if self._group is None:
            domain = domain_here()
            self._group = self.meet(
                lambda: NodeGroup(self._data, domain, meet=self._announce),
                "meeting of nodes",
                "",
                None,
            )
        return self._group

    def _announce(self, make: Callable[[], SharedBlock], call: str) -> SharedBlock:
        return self.meet(make, call, "", None)

    def allocate(self, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Collective: a flat buffer of zeros that this engine combines with the fewest copies.

        On CPUs it is this rank's part of node-shared memory, which lives as long as the engine. A
        collective gets it from every rank or from none: ranks that pass different tensors are
        refused together, or, where they wait in different ways, named by the watchdog.
        """
        self.check_open("allocate")
        encoding.check_buffer(num_elements, dtype)
        if self.device.type != "cpu":
            return super().allocate(num_elements, dtype)
        return self.meet(
            lambda: self._node_buffers().allocate(num_elements, dtype), "allocate", "", None
        )

    def allreduce_(self, tensor: Tensor, op: Op = Op.SUM, *, what: str = "") -> Tensor:
        """Collective: as on every engine; a buffer from `allocate` goes the short way."""
        buffers = self._buffers
        buffer = buffers.find(tensor) if op is Op.SUM and buffers is not None else None
        if buffers is None or buffer is None:
            return super().allreduce_(tensor, op, what=what)
        self.check_open("allreduce")
        run = partial(self._worker.run, partial(buffers.combine, buffer, op))
        self.meet(run, buffer.text(what), "", None)
        torch.autograd.graph.increment_version(tensor)
        return tensor

    def _node_buffers(self) -> NodeBuffers:
        """Collective at the first call."""
        if self._buffers is None:
            self._buffers = NodeBuffers(self.node_group())
        return self._buffers

    def _sends(self, dtype: torch.dtype, op: Op, device: torch.device) -> bool:
        return dtype in _DATATYPES

    def _start_allreduce(self, flat: Tensor, op: Op, what: str) -> Finish:
        staged = self._stage(flat)

        def combine() -> None:
            staged.ready()
            self._data.Allreduce(MPI.IN_PLACE, _buffer(staged.memory), op=_OPS[op])

        if not self._concurrent:  # MPI may not be called by two threads: do it now
            combine()
            return staged.bring_back
        job = self._worker.submit(combine)

        def finish() -> None:
            job.wait()
            staged.bring_back()

        return finish

    def _allreduce(self, flat: Tensor, op: Op, what: str) -> None:
        if flat.device.type == "cpu" and self.size > 1 and is_large(flat.nbytes):
            buffers = self._node_buffers()
            if buffers.shares_memory:
                self._worker.run(lambda: buffers.allreduce(flat, op))
                return
        staged = self._stage(flat)
        staged.ready()
        memory = _buffer(staged.memory)
        self._worker.run(lambda: self._data.Allreduce(MPI.IN_PLACE, memory, op=_OPS[op]))
        staged.bring_back()

    def allgather_into(self, output: Tensor, tensor: Tensor, *, what: str = "") -> None:
        """Collective: as on every engine, without a copy where the output is contiguous."""
        self._check_into(output, tensor)
        if tensor.nbytes * self.size > self.chunk:
            super().allgather_into(output, tensor, what=what)
            return
        if tensor.numel() == 0:
            return
        flat = encoding.to_bytes(encoding.flatten(tensor))
        whole = encoding.flatten(output)  # the output itself, or a copy of its size
        counts = [flat.numel()] * self.size

        def exchange() -> None:
            target = encoding.to_bytes(whole)
            staged = self._stage(flat)
            staged.ready()
            if whole.device.type == "cpu" or self._direct:
                self._gather(flat, target, counts)
                return
            joined = torch.empty_like(target, device="cpu", pin_memory=True)
            self._gather(staged.memory, joined, counts)
            target.copy_(joined, non_blocking=True)  # the device has room for one copy alone

        self.meet(exchange, "allgather", what, tensor)
        encoding.store(whole, output)

    def _buffers_for(self, device: torch.device, num_bytes: int) -> NodeBuffers | None:
        """Collective at the first large tensor: the memory all ranks share, where that is faster.

        Decided by what is equal on all ranks.
        """
        if device.type != "cpu" or self.size == 1 or not is_large(num_bytes):
            return None
        buffers = self._node_buffers()
        return buffers if buffers.is_one_node else None

    def _reduce_scatter(self, lines: Tensor, op: Op, what: str) -> Tensor:
        num_rows, width = lines.shape
        share = encoding.shares(num_rows, self.size)
        counts = [count * width for count in share]
        buffers = self._buffers_for(lines.device, lines.nbytes)
        if buffers is not None:
            own = lines.new_empty(share[self.rank], width)
            flat, kept = lines.reshape(-1), own.view(-1)
            self._worker.run(lambda: buffers.reduce_scatter(flat, kept, counts, op))
            return own
        staged = self._stage(lines)
        part = staged.memory.new_empty(share[self.rank], width)
        staged.ready()
        self._worker.run(
            lambda: self._data.Reduce_scatter(
                _buffer(staged.memory), _buffer(part), recvcounts=counts, op=_OPS[op]
            )
        )
        return part.to(lines.device)

    def _broadcast(self, flat: Tensor, root: int, what: str) -> None:
        staged = self._stage(flat)
        staged.ready()
        self._worker.run(lambda: self._data.Bcast(_buffer(staged.memory), root=root))
        staged.bring_back()

    def _allgather(self, what: str, flat: Tensor, counts: list[int]) -> Tensor:
        staged = self._stage(flat)
        joined = staged.memory.new_empty(sum(counts))
        staged.ready()
        self._gather(staged.memory, joined, counts)
        return joined.to(flat.device)

    def _gather(self, flat: Tensor, joined: Tensor, counts: list[int]) -> None:
        buffers = self._buffers_for(flat.device, sum(counts))
        if buffers is not None:
            self._worker.run(lambda: buffers.allgather(flat, joined, counts))
            return
        # MPI refuses memory that is sent and received, as where a rank gathers in place.
        given = flat.clone() if _overlap(flat, joined) else flat
        self._worker.run(lambda: self._data.Allgatherv(_buffer(given), _buffer(joined, counts)))

    def _alltoall(self, what: str, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        staged = self._stage(flat)
        came = staged.memory.new_empty(sum(received))
        staged.ready()
        self._worker.run(
            lambda: self._data.Alltoallv(_buffer(staged.memory, sent), _buffer(came, received))
        )
        return came.to(flat.device)

    def _split(self, table: list[tuple[int | None, int]]) -> Engine | None:
        color, key = table[self.rank]
        part = self._data.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        try:
            return MpiEngine(part, self.device, watch=None)
        finally:
            part.Free()

    def _close(self) -> None:
        self._worker.stop()
        if self._buffers is not None:
            self._buffers.close()
        if self._group is not None:
            self._group.close()
        self._data.Free()

    def _stage(self, tensor: Tensor) -> _Staged:
        return _Staged(tensor, by_host=tensor.device.type != "cpu" and not self._direct)


class _Staged:
    """Memory that MPI can read: the tensor's own, or pinned host memory that mirrors it."""

    def __init__(self, tensor: Tensor, *, by_host: bool) -> None:
        self._tensor = tensor
        self._by_host = by_host
        self._event: torch.Event | None = None
        self.memory = tensor
        if by_host:
            self.memory = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self.memory.copy_(tensor, non_blocking=True)
        if tensor.device.type != "cpu":
            self._event = torch.Event(tensor.device.type)
            self._event.record()

    def ready(self) -> None:
        """Wait until the device has written what is to be sent."""
        if self._event is not None:
            self._event.synchronize()

    def bring_back(self) -> None:
        """Put the result where the tensor is."""
        if self._by_host:
            self._tensor.copy_(self.memory, non_blocking=True)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether flat tensors share memory. Pure."""
    first, second = sorted((one, other), key=lambda flat: flat.data_ptr())
    return second.data_ptr() < first.data_ptr() + first.nbytes


def _buffer(tensor: Tensor, counts: list[int] | None = None) -> list[object]:
    """A contiguous tensor as mpi4py takes it: address, counts, datatype."""
    memory = MPI.memory.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    datatype = _DATATYPES[tensor.dtype]
    if counts is None:
        return [memory, tensor.numel(), datatype]
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return [memory, (counts, starts), datatype]


class WorkerCall:
    """A call that the worker runs."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call and keep its exception for the waiting caller."""
        try:
            self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the call has ended; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Worker:
    """A thread that is started by the first asynchronous call, and not before.

    Args:
        name: The thread's.
        device: What the thread computes on, so that a library that looks at the current device sees
            the right one.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._jobs: queue.SimpleQueue[WorkerCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: WorkerCall | None = None

    def submit(self, call: Callable[[], None]) -> WorkerCall:
        """Queue a call and return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._last = job = WorkerCall(call)
        self._jobs.put(job)
        return job

    def run(self, call: Callable[[], None]) -> None:
        """Run a call behind those that are pending; on the caller's thread when there are none."""
        if self._last is None or self._last.done:
            call()
        else:
            self.submit(call).wait()

    def stop(self) -> None:
        """Let the pending calls end, then the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_STOP_S)
            self._thread = None

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (job := self._jobs.get()) is not None:
            job.run()


def mpi_reads_device_memory(kind: str) -> bool:
    """Query the MPI library that mpi4py has loaded.

    Open MPI answers by a function. Cray MPICH has the function too, and needs
    MPICH_GPU_SUPPORT_ENABLED=1 besides. An MPI without the function is taken not to.

    Args:
        kind: `cuda` (ROCm included, as in torch).
    """
    if kind != "cuda":
        return False
    name = _QUERIES["rocm" if torch.version.hip else "cuda"]
    try:
        query = getattr(ctypes.CDLL(MPI.__file__), name)
    except (OSError, AttributeError):
        return False
    query.restype = ctypes.c_int
    if "CRAY MPICH" in MPI.Get_library_version().upper():
        return environment().get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    return bool(query())


def over_mpi(comm: Comm, device: torch.device) -> MpiEngine:
    """Collective: the engine whose collectives are MPI's, for ranks that are not a world's."""
    return MpiEngine(comm, device)
