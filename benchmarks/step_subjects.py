"""A rank's side of `step_overhead`: the same training step, by each way of exchanging gradients."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hpctrain as hpc
from benchmarks.workloads import find
from hpctrain.bench import Measurable
from hpctrain.engines import Engine
from hpctrain.replica import HorovodTraining, Replica
from hpctrain.world import World

__all__ = ["Compute", "make_maker"]

_FIRST_STEPS = 5
_SEED = 11


class Compute:
    """Forward, backward and the optimizer on every rank, and no communication at all."""

    exchanges = False

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: build model and optimizer, and take the first steps, which are slow."""
        self.workload = workload = find(case)
        torch.manual_seed(_SEED)
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        self.x, self.y = workload.data(self.world.rank, self.world.size)
        self.distribute()
        self.run(_FIRST_STEPS)
        return self.facts()

    def distribute(self) -> None:
        """Collective: let the ranks train together; here they do not."""

    def facts(self) -> dict[str, object]:
        """What is known of a step beforehand."""
        return {}

    def loss(self) -> Tensor:
        """The mean over this rank's batch."""
        return nn.functional.mse_loss(self.model(self.x), self.y)

    def backward(self) -> None:
        """Collective where ranks train together: compute gradients."""
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss())

    def step(self) -> None:
        """Update the weights."""
        self.optimizer.step()

    def run(self, repeats: int) -> None:
        """Take steps."""
        for _ in range(repeats):
            self.backward()
            self.step()

    def counts(self) -> dict[str, int]:
        """Nothing is counted in other people's software."""
        return {}

    def finish(self) -> dict[str, object]:
        """Collective: the weights' digest, which ranks must share, and the loss over all ranks."""
        outcome: dict[str, object] = {}
        if self.exchanges:
            digest = hashlib.sha256()
            for parameter in self.model.parameters():
                digest.update(parameter.detach().numpy().tobytes())
            loss = sum(self.world.comm.allgather(self.loss().item())) / self.world.size
            outcome = {"weights": digest.hexdigest()[:16], "loss": loss}
        self.release()
        return outcome

    def release(self) -> None:
        """Let the case's memory go."""
        del self.model, self.optimizer


class OneProcess(Compute):
    """Training as it is without any of this; its loss is told, for others to agree with."""

    exchanges = True


class Distributed(Compute):
    """`hpctrain.distribute` on an engine."""

    exchanges = True
    replica: Replica

    def __init__(
        self,
        world: World,
        engine: Engine,
        *,
        update: str = "auto",
        share_parameters: bool = False,
        horovod: HorovodTraining | None = None,
    ) -> None:
        super().__init__(world)
        self.engine = engine
        self.update = update
        self.share_parameters = share_parameters
        self.horovod = horovod

    def distribute(self) -> None:
        """Collective: make the replica."""
        self.replica = hpc.distribute(
            self.world,
            self.model,
            self.optimizer,
            engine=self.engine,
            update=self.update,
            share_parameters=self.share_parameters,
            horovod=self.horovod,
        )

    def facts(self) -> dict[str, object]:
        """How large an exchange is."""
        return {"bytes": self.replica.counts()["bytes"]}

    def backward(self) -> None:
        """Collective: compute gradients, averaged over all ranks."""
        self.replica.backward(self.loss())

    def step(self) -> None:
        """Collective: update the weights."""
        self.replica.step()

    def counts(self) -> dict[str, int]:
        """Messages sent and Python hooks called so far."""
        counts = self.replica.counts()
        return {name: counts[name] for name in ("messages", "hooks")}

    def release(self) -> None:
        """Let the model go."""
        self.replica.close()
        del self.replica
        super().release()


class RawHorovod(Compute):
    """Horovod's own DistributedOptimizer, as its documentation has it."""

    exchanges = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own imports warn of what setuptools will drop
            import horovod.torch as hvd
        hvd.init()
        self.hvd = hvd

    def distribute(self) -> None:
        """Collective: wrap the optimizer."""
        self.hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.optimizer = self.hvd.DistributedOptimizer(
            self.optimizer, named_parameters=self.model.named_parameters()
        )


class RawDdp(Compute):
    """DistributedDataParallel over Gloo, with the options that make it fastest here."""

    exchanges = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            world.at_exit(dist.destroy_process_group)

    def distribute(self) -> None:
        """Collective: wrap the model."""
        self.model = nn.parallel.DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, static_graph=True
        )


class RawDdpZero(RawDdp):
    """The same with torch's own sharded update, over the same optimizer class and options.

    Its weights lie in buckets, so that one message a bucket brings them round. It can overlap with
    DDP for a few optimizers that torch has written anew; fused ones are not among them.
    """

    def distribute(self) -> None:
        """Collective: wrap the model, and replace the optimizer."""
        super().distribute()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports what torch itself calls deprecated
            from torch.distributed.optim import ZeroRedundancyOptimizer
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            self.workload.optimizer_class,
            parameters_as_bucket_view=True,
            **dict[str, Any](self.workload.options),
        )


def make_maker() -> Callable[[World, str], Measurable]:
    """What makes the subject of a variant; variants of a launch share its engine."""
    engines: dict[str, Engine] = {}
    alone: dict[str, Callable[[World], Measurable]] = {
        "compute": Compute,
        "compute-again": Compute,
        "one-process": OneProcess,
        "horovod": RawHorovod,
        "ddp": RawDdp,
        "ddp-zero": RawDdpZero,
    }
    updates = {"hpctrain-mpi-replicated": "replicated", "hpctrain-mpi-sharded": "sharded"}

    def connect(world: World, name: str) -> Engine:
        if name not in engines:
            engines[name] = hpc.connect(world, name).engine
        return engines[name]

    def make(world: World, variant: str) -> Measurable:
        if variant == "compute-beside-idle":
            connect(world, "mpi")
            return Compute(world)
        if variant in alone:
            return alone[variant](world)
        if variant == "hpctrain-horovod-fusion":
            own_fusion = HorovodTraining(fusion="horovod")
            return Distributed(world, connect(world, "horovod"), horovod=own_fusion)
        if variant == "hpctrain-mpi-one-copy":
            return Distributed(world, connect(world, "mpi"), share_parameters=True)
        if variant in updates:
            return Distributed(world, connect(world, "mpi"), update=updates[variant])
        return Distributed(world, connect(world, variant.removeprefix("hpctrain-")))

    return make
