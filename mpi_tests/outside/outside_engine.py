"""An engine of another package: mpi4py's collectives and nothing else.

It is found by the entry point in the metadata beside it, as that of an installed package would be.
"""

from __future__ import annotations

import torch
from mpi4py import MPI

from hpctrain.engines import Capabilities, Engine, Op

__all__ = ["OutsideEngine"]

_OPS = {Op.SUM: MPI.SUM, Op.MIN: MPI.MIN, Op.MAX: MPI.MAX}
_SENDS = {torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64}


class OutsideEngine(Engine):
    """Six primitives on flat tensors; the base class makes all collectives of them."""

    name = "outside"
    capabilities = Capabilities(topology="halving", device_types=frozenset({"cpu"}))

    def __init__(self, comm, device, *, watch=None):
        super().__init__(comm, device, watch=watch)
        self._comm = comm.Dup()

    def _sends(self, dtype, op, device):
        return dtype in _SENDS

    def _start_allreduce(self, flat, op, what):
        request = self._comm.Iallreduce(MPI.IN_PLACE, flat.numpy(), op=_OPS[op])
        return lambda: request.Wait() and None

    def _broadcast(self, flat, root, what):
        self._comm.Bcast(flat.numpy(), root=root)

    def _allgather(self, what, flat, counts):
        joined = flat.new_empty(sum(counts))
        self._comm.Allgatherv(flat.numpy(), [joined.numpy(), counts])
        return joined

    def _alltoall(self, what, flat, sent, received):
        came = flat.new_empty(sum(received))
        self._comm.Alltoallv([flat.numpy(), sent], [came.numpy(), received])
        return came

    def _split(self, table):
        color, key = table[self.rank]
        part = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        try:
            return OutsideEngine(part, self.device)
        finally:
            part.Free()

    def _close(self):
        self._comm.Free()
