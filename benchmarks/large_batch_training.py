"""One training of `large_batch`: digits, an optimizer, a global batch and a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.engines import Engine
from hpctrain.world import World

__all__ = ["EPOCHS", "SETTINGS", "Digits", "Setting", "load_digits", "num_steps", "train"]

BASE_BATCH = 32
LARGE_BATCH = 1024
WIDTHS = (64, 128, 128, 10)
EPOCHS = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    optimizer: str
    """`sgd`, `lars` or `lamb`."""
    global_batch: int
    base_rate: float
    """At a batch of 32."""
    scaling: str
    warmup: float
    """The part of all steps that the rate rises."""
    decay: str = "cosine"

    def recipe(self, steps: int) -> hpc.optim.Recipe:
        """The learning rates of so many steps."""
        return hpc.optim.Recipe(
            base_rate=self.base_rate,
            base_batch=BASE_BATCH,
            global_batch=self.global_batch,
            num_steps=steps,
            scaling=self.scaling,
            warmup_steps=round(self.warmup * steps),
            decay=self.decay,
        )


_SMALL = Setting(
    name="sgd 32",
    optimizer="sgd",
    global_batch=BASE_BATCH,
    base_rate=0.1,
    scaling="linear",
    warmup=0.0,
)
SETTINGS = {
    setting.name: setting
    for setting in (
        _SMALL,
        replace(_SMALL, name="sgd 1024 plain", global_batch=LARGE_BATCH),
        replace(_SMALL, name="sgd 1024 warm-up", global_batch=LARGE_BATCH, warmup=0.3),
        Setting(
            name="lars 1024",
            optimizer="lars",
            global_batch=LARGE_BATCH,
            base_rate=0.025,
            scaling="linear",
            warmup=0.3,
        ),
        Setting(
            name="lamb 1024",
            optimizer="lamb",
            global_batch=LARGE_BATCH,
            base_rate=0.01,
            scaling="sqrt",
            warmup=0.3,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Digits:
    """Images and labels to train and to test with."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits(*, validation: bool = False) -> Digits:
    """The 1,797 digits of scikit-learn; every fifth is for testing.

    Args:
        validation: Leave the test digits out, and test with every fifth of the others instead: for
            choosing rates.
    """
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 8.0 - 1.0
    y = torch.tensor(labels)
    for _ in range(1 + validation):
        test = torch.arange(len(x)) % 5 == 0
        found = Digits(x[~test], y[~test], x[test], y[test])
        x, y = found.train_x, found.train_y
    return found


def num_steps(num_samples: int, epochs: int, global_batch: int) -> int:
    """Full batches in so many epochs; batches go on over the end of an epoch. Pure."""
    return num_samples * epochs // global_batch


def batches(num_samples: int, epochs: int, global_batch: int, seed: int) -> Iterator[Tensor]:
    """The samples of each step: every sample once an epoch, in an order of its own."""
    generator = np.random.default_rng([seed, 11])
    order = np.concatenate([generator.permutation(num_samples) for _ in range(epochs)])
    for step in range(num_steps(num_samples, epochs, global_batch)):
        yield torch.from_numpy(order[step * global_batch : (step + 1) * global_batch])


def build(seed: int) -> nn.Module:
    """A network without normalisation, which would forgive a large rate at the start."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with biases left alone; its rate comes from the recipe."""
    groups = hpc.optim.split_parameters(model, weight_decay=1e-4)
    if kind == "lars":
        return hpc.optim.LARS(groups, lr=1.0, trust_coefficient=0.05)
    if kind == "lamb":
        return hpc.optim.LAMB(groups, lr=1.0)
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def train(
    world: World, engine: Engine, setting: Setting, data: Digits, *, epochs: int, seed: int
) -> list[float]:
    """Collective: train on all ranks; the test accuracy after each epoch, the same everywhere."""
    model = build(seed)
    optimizer = optimizer_of(setting.optimizer, model)
    replica = hpc.distribute(world, model, optimizer, engine=engine)
    samples = len(data.train_x)
    steps = num_steps(samples, epochs, setting.global_batch)
    schedule = setting.recipe(steps).schedule(optimizer)
    curve: list[float] = []
    for step, batch in enumerate(batches(samples, epochs, setting.global_batch, seed)):
        mine = batch[world.rank :: world.size]
        loss = cross_entropy(replica(data.train_x[mine]), data.train_y[mine])
        replica.backward(loss, num_samples=len(mine))
        replica.step()
        schedule.step()
        while len(curve) < epochs and (step + 1) * setting.global_batch >= (
            (len(curve) + 1) * samples
        ):
            curve.append(accuracy(model, data))
    curve += [accuracy(model, data)] * (epochs - len(curve))  # the last batch may be left out
    replica.close()
    return curve


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """The part of the test digits that is recognised; all ranks have the same weights."""
    return (model(data.test_x).argmax(1) == data.test_y).float().mean().item()
