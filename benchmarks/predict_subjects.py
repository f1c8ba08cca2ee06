"""A rank's side of `predict`: profile, collectives, and the steps that are to be predicted."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

import hpctrain as hpc
from hpctrain.predict import SIZES, Profile, Subject, measure, measure_profile
from hpctrain.world import World

__all__ = ["WORKLOADS", "main"]

_SEED = 11
_LAYERS = 20
WORKLOADS = {"mlp-256": (256, 64), "mlp-512": (512, 16)}
"""By name, width and batch of a rank: twenty linear layers, 5 and 21 MB of gradients, plain SGD."""


class Part:
    """A workload's model, optimizer and batch on one rank."""

    def __init__(self, name: str, world: World) -> None:
        width, self.batch = WORKLOADS[name]
        self.name = name
        torch.manual_seed(_SEED)
        layers: list[nn.Module] = []
        for _ in range(_LAYERS):
            linear = nn.Linear(width, width)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            layers += [linear, nn.ReLU()]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        torch.manual_seed(_SEED + 1 + world.rank)
        self.x, self.y = torch.randn(self.batch, width), torch.randn(self.batch, width)

    def loss(self) -> Tensor:
        """The mean over this rank's batch."""
        return nn.functional.mse_loss(self.model(self.x), self.y)

    def subject(self) -> Subject:
        """What is profiled and trained."""
        return Subject(
            model=self.model,
            optimizer=self.optimizer,
            loss=self.loss,
            batch=self.batch,
            name=self.name,
        )


def profile_together(world: World, subject: Subject, repeats: int) -> Profile:
    """Collective: every rank measures a profile at the same time; that with the median step."""
    world.comm.Barrier()
    mine = measure_profile(subject, repeats=repeats)
    every: list[Profile] = world.comm.allgather(mine)
    ordered = sorted(every, key=lambda each: each.compute_s)
    return ordered[len(ordered) // 2]


def main(arguments: list[str]) -> int:
    """Measure one launch; rank 0 writes it."""
    out, name, engine, steps, sizes = arguments
    with hpc.init(bind="numa") as world:
        subject = Part(name, world).subject()
        largest = int(sizes)
        # Profiled first: a replica leaves gradients in memory that ranks share.
        profile = profile_together(world, subject, int(steps))
        measured = measure(
            world, [engine], sizes=[size for size in SIZES if size <= largest], subject=subject
        )
        if world.rank == 0:
            data = {
                "measurement": measured.as_json(),
                "profile": {"schema": "hpctrain.profile/1", **asdict(profile)},
                "step_s": measured.training[0].seconds if measured.training else profile.step_s,
            }
            Path(out).write_text(json.dumps(data), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
