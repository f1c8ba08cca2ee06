"""The grid of a job's ranks: data x pipeline x tensor, with what speaks along each dimension."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from hpctrain import log
from hpctrain.connection import Connection, connect
from hpctrain.errors import ConfigError
from hpctrain.grid.factoring import DIMENSIONS, Coordinate, check_dimensions, fit_shape
from hpctrain.grid.placing import place
from hpctrain.torch_backend import open_default_group
from hpctrain.world import World, agree

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup

    from hpctrain.engines import Engine

__all__ = ["Grid"]

_c10d: Any = distributed_c10d
Dims = tuple[str, ...]


class Grid:
    """Collective: all ranks of a world as data x pipeline x tensor; arguments must match.

    Along `data` ranks train on different samples; along `pipeline` they hold successive stages of
    the model; along `tensor` they share each layer. A context manager; the world's end closes it,
    too.

    From now on the world's per-rank random streams are keyed by the data coordinate: ranks that
    train on the same samples draw the same numbers.

    Args:
        world: The ranks.
        data: Ranks along the data dimension; None: what the others leave.
        pipeline: Stages of the pipeline.
        tensor: Ranks that share each layer; they stay on one node, or fill whole nodes.
        engine: What hpctrain's own collectives go over: `auto`, or a name as in `distribute`.
        timeout_s: How long a collective may wait for a rank before the job ends and names it.

    Raises:
        ConfigError: on all ranks; the sizes do not multiply to the number of ranks (the message
            names those that do), tensor groups would span nodes unevenly, or the script has a
            default process group of its own.
    """

    def __init__(
        self,
        world: World,
        *,
        data: int | None = None,
        pipeline: int = 1,
        tensor: int = 1,
        engine: str = "auto",
        timeout_s: float = 600.0,
    ) -> None:
        _check_equal(world, (data, pipeline, tensor, engine, timeout_s))
        self.world = world
        self.shape = fit_shape(world.size, data=data, pipeline=pipeline, tensor=tensor)
        self.placement = place(self.shape, [info.node_rank for info in world.ranks], world.hosts)
        self.coordinate: Coordinate = self.placement.coordinate(world.rank)
        self._engine_name = engine
        self._timeout_s = timeout_s
        self._closed = False
        self._default = open_default_group(world, timeout_s=timeout_s)
        self._connection: Connection | None = None
        self._comms: dict[Dims, Intracomm] = {dims: self._split(dims) for dims in _FIRST}
        self._engines: dict[Dims, Engine] = {}
        self._groups: dict[Dims, Any] = {}
        self._mesh = DeviceMesh(
            world.device.type,
            torch.tensor(self.placement.order, dtype=torch.int).view(*self.shape),
            mesh_dim_names=DIMENSIONS,
        )
        self._say_where()
        world.streams.move(self.coordinate.data, self.coordinate.pipeline)
        world.at_exit(self.close)

    @property
    def data(self) -> int:
        """Ranks along the data dimension."""
        return self.shape.data

    @property
    def pipeline(self) -> int:
        """Ranks along the pipeline."""
        return self.shape.pipeline

    @property
    def tensor(self) -> int:
        """Ranks that share each layer."""
        return self.shape.tensor

    @property
    def backend(self) -> str:
        """What carries its process groups: `hpctrain` (MPI) or `nccl`."""
        return self._default.backend

    @property
    def speakers(self) -> tuple[int, ...]:
        """A rank for each data coordinate, which has what its model gives: of the last stage."""
        last = self.pipeline - 1
        return tuple(self.placement.rank(Coordinate(d, last, 0)) for d in range(self.data))

    def ranks(self, *dims: str) -> tuple[int, ...]:
        """The ranks of this rank's group along dimensions, itself too, ordered by coordinate."""
        return self.placement.group(self.world.rank, check_dimensions("ranks", dims))

    def comm(self, *dims: str) -> Intracomm:
        """This rank's communicator along dimensions; the grid frees it.

        Collective over the group at the first call with two dimensions.
        """
        dims = self._open_dims("comm", dims)
        if dims not in self._comms:
            self._comms[dims] = self._create(dims)
        return self._comms[dims]

    def group(self, *dims: str) -> ProcessGroup:
        """This rank's process group of torch along dimensions.

        Collective over the group at the first call with two or three dimensions.
        """
        dims = self._open_dims("group", dims)
        if dims not in self._groups:
            if len(dims) == 1:
                self._groups[dims] = self._mesh.get_group(dims[0])
            elif len(dims) == len(DIMENSIONS):
                self._groups[dims] = _c10d._get_default_group()
            else:
                self._groups[dims] = _c10d.new_group(
                    list(self.ranks(*dims)), use_local_synchronization=True
                )
        group: ProcessGroup = self._groups[dims]
        return group

    def mesh(self, *dims: str) -> DeviceMesh:
        """The device mesh along dimensions, with their names."""
        dims = self._open_dims("mesh", dims)
        return self._mesh if dims == DIMENSIONS else self._mesh[dims]

    def engine(self, *dims: str) -> Engine:
        """The engine along dimensions, for hpctrain's own collectives.

        Collective over all ranks of the world at the first call with these dimensions.
        """
        dims = self._open_dims("engine", dims)
        if self._connection is None:
            self._connection = connect(self.world, self._engine_name, timeout_s=self._timeout_s)
        if dims == DIMENSIONS:
            return self._connection.engine
        if dims not in self._engines:
            color, key = self._color(dims)
            made = self._connection.engine.split(color, key)
            if made is None:
                raise ConfigError(f"engine{dims!r}: this rank is in none of its groups")
            self._engines[dims] = made
        return self._engines[dims]

    def describe(self) -> str:
        """Draw the grid: which rank and node stands where. The same on every rank."""
        return self.placement.describe(self.world.hosts)

    def close(self) -> None:
        """Collective: give back communicators, engines and process groups; may be called again."""
        if self._closed:
            return
        self._closed = True
        self.world.streams.move(self.world.rank)
        for engine in self._engines.values():
            engine.close(cure="its grid was closed")
        if self._connection is not None:
            self._connection.close()
        for comm in self._comms.values():
            comm.Free()
        self._groups.clear()
        self._default.close()

    def __enter__(self) -> Grid:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Collective when the block ended well."""
        if error is None:
            self.close()

    def __repr__(self) -> str:
        return f"Grid({self.shape})"

    def _open_dims(self, call: str, dims: Dims) -> Dims:
        if self._closed:
            raise ConfigError(f"{call}: this grid is closed; use it inside the world's block")
        return check_dimensions(call, dims)

    def _color(self, dims: Dims) -> tuple[int, int]:
        """Which group of all those along dimensions is this rank's, and its place there."""
        mine = self.ranks(*dims)
        return self.placement.groups(dims).index(mine), mine.index(self.world.rank)

    def _split(self, dims: Dims) -> Intracomm:
        """Collective over the world."""
        return MPI.Intracomm(self.world.comm.Split(*self._color(dims)))

    def _create(self, dims: Dims) -> Intracomm:
        """Collective over the group."""
        whole = self._comms[DIMENSIONS]
        everyone = whole.Get_group()
        places = {rank: place for place, rank in enumerate(self.placement.order)}
        members = everyone.Incl([places[rank] for rank in self.ranks(*dims)])
        try:
            return whole.Create_group(members)
        finally:
            members.Free()
            everyone.Free()

    def _say_where(self) -> None:
        spanned = self.placement.num_nodes("tensor")
        if self.tensor > 1 and spanned > 1 and self.world.is_main:
            log.warn(
                f"grid: a tensor group of {self.tensor} ranks spans {spanned} nodes, so every "
                "layer waits for the network; a smaller tensor= stays inside a node"
            )


_FIRST: tuple[Dims, ...] = (*((dim,) for dim in DIMENSIONS), DIMENSIONS)


def _check_equal(world: World, given: tuple[object, ...]) -> None:
    """Collective: refuse arguments that differ, on all ranks."""
    trouble = None
    timeout_s = given[-1]
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        trouble = f"Grid: timeout_s={timeout_s!r} must be more than 0"
    agree(world.comm, trouble, error=ConfigError)
    told = world.comm.allgather(given)
    odd = next((rank for rank, other in enumerate(told) if other != told[0]), None)
    if odd is not None:
        names = ("data", "pipeline", "tensor", "engine", "timeout_s")
        first, other = (
            ", ".join(f"{n}={v}" for n, v in zip(names, told[r], strict=True)) for r in (0, odd)
        )
        raise ConfigError(
            f"Grid: rank 0 gives {first}, rank {odd} gives {other}; give all the same"
        )
