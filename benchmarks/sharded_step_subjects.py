"""A rank's side of `sharded_step`: the same training step, whole and in shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hpctrain as hpc
from benchmarks.sharded_step import CASES
from hpctrain.bench import Measurable
from hpctrain.errors import CollectiveError
from hpctrain.world import World

__all__ = ["Words", "make"]

_SEED = 11
_FIRST_STEPS = 2
_RATE = 1e-5
"""Small: the time of a step stays what it is over a whole run."""


class Words(nn.Module):
    """A transformer that predicts words: six layers, 512 wide; 21 million parameters.

    `small` has two layers, 32 wide, to be quick.
    """

    def __init__(self, *, small: bool = False) -> None:
        super().__init__()
        width, num_layers, self.num_words = (32, 2, 64) if small else (512, 6, 4096)
        self.embed = nn.Embedding(self.num_words, width)
        nn.init.normal_(self.embed.weight, std=0.02)  # or the scores would be huge
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )

    def forward(self, words: Tensor) -> Tensor:
        """The scores of all words at each place, by the weights that also embed them."""
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


def _loss_of(scores: Tensor, words: Tensor) -> Tensor:
    """Of predicting the word that comes next."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.roll(-1, 1).flatten())


class Whole:
    """Forward, backward and the optimizer on every rank, and no communication at all."""

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: build model and optimizer, and take the first steps, which are slow."""
        torch.manual_seed(_SEED)
        self.model: nn.Module = Words(small=case not in CASES)
        num_words = self.model.num_words
        rows, length = CASES.get(case, (2, 4))
        drawn = torch.Generator().manual_seed(_SEED + self.world.rank)
        self.words = torch.randint(num_words, (rows, length), generator=drawn)  # type: ignore[call-overload]
        self.divide()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), _RATE, fused=True)
        self.distribute()
        self.first_loss = self.loss_over_all()
        self.run(_FIRST_STEPS)
        return {}

    def divide(self) -> None:
        """Collective: let every rank have a part of the model; here each has all of it."""

    def distribute(self) -> None:
        """Collective: let the ranks train together; here they do not."""

    def step(self) -> None:
        """Collective where ranks train together: one training step."""
        self.optimizer.zero_grad()
        torch.autograd.backward(_loss_of(self.model(self.words), self.words))
        self.optimizer.step()

    def run(self, repeats: int) -> None:
        """Take steps."""
        for _ in range(repeats):
            self.step()

    def loss_over_all(self) -> float:
        """Collective: the mean over all ranks' words."""
        with torch.no_grad():
            own = _loss_of(self.model(self.words), self.words).item()
        return sum(self.world.comm.allgather(own)) / self.world.size

    def counts(self) -> dict[str, int]:
        """Nothing is counted in other people's software."""
        return {}

    def finish(self) -> dict[str, object]:
        """Collective: see that the loss fell, and let the memory go.

        Raises:
            CollectiveError: it did not, so that the speed is of no interest.
        """
        loss = self.loss_over_all()
        if not loss < self.first_loss:
            raise CollectiveError(f"the loss went from {self.first_loss} to {loss}")
        self.release()
        return {"loss": loss}

    def release(self) -> None:
        """Let the model go."""
        del self.model, self.optimizer


class Distributed(Whole):
    """`hpctrain.distribute`, as it chooses itself."""

    replica: hpc.Replica

    def distribute(self) -> None:
        """Collective: make the replica."""
        self.replica = hpc.distribute(self.world, self.model, self.optimizer)

    def step(self) -> None:
        """Collective: one training step."""
        self.replica.learn(_loss_of, self.words, self.words)

    def counts(self) -> dict[str, int]:
        """Gathers and reductions so far."""
        return {"messages": self.replica.counts()["messages"]}

    def release(self) -> None:
        """Let the model go."""
        self.replica.close()
        del self.replica
        super().release()


class Split(Distributed):
    """`hpctrain.split(shard=...)`."""

    def __init__(self, world: World, kind: str, *, by_message: bool = False) -> None:
        super().__init__(world)
        self.kind = kind
        self.by_message = by_message

    def divide(self) -> None:
        """Collective: cut the model into shards."""
        self.model = hpc.split(_grid_of(self.world), self.model, shard=self.kind)
        if self.by_message:
            from hpctrain.sharding import sharding_of

            sharding = sharding_of(self.model)
            if sharding is not None and sharding.staging is not None:
                sharding.staging.turn_off("measured without")

    def distribute(self) -> None:
        """Collective: make the replica."""
        self.replica = hpc.distribute(
            self.world, self.model, self.optimizer, grid=_grid_of(self.world)
        )


class OverGloo(Whole):
    """torch's fully_shard with the same units, over Gloo."""

    def __init__(self, world: World, kind: str) -> None:
        super().__init__(world)
        self.kind = kind
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            world.at_exit(dist.destroy_process_group)

    def divide(self) -> None:
        """Collective: cut the model into shards."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.world.size,))
        frees = self.kind == "parameters"
        for layer in self.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, reshard_after_forward=frees)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=frees)


_grids: dict[World, hpc.Grid] = {}


def _grid_of(world: World) -> hpc.Grid:
    if world not in _grids:
        _grids[world] = hpc.Grid(world)  # the world's end closes it
    return _grids[world]


_MAKERS: dict[str, Callable[[World], Measurable]] = {
    "compute": Whole,
    "compute-again": Whole,
    "hpctrain-mpi": Distributed,
    "parameters-by-message": lambda world: Split(world, "parameters", by_message=True),
    **{f"gloo-{kind}": lambda w, k=kind: OverGloo(w, k) for kind in ("gradients", "parameters")},
}


def make(world: World, variant: str) -> Measurable:
    """Collective: the subject of a variant."""
    return _MAKERS.get(variant, lambda one: Split(one, variant))(world)
