"""A rank's side of `large_batch`: one training after the other, each with a seed of its own."""

from __future__ import annotations

import re

import hpctrain as hpc
from benchmarks.large_batch_training import SETTINGS, Setting, load_digits, num_steps, train
from hpctrain.bench import Measurable
from hpctrain.world import World

__all__ = ["make"]


class Training:
    """Trainings of one setting."""

    def __init__(self, world: World, setting: Setting) -> None:
        self.world, self.setting = world, setting
        self.engine = hpc.connect(world).engine
        self.data = load_digits()
        self.epochs = 0
        self.curves: list[list[float]] = []

    def prepare(self, case: str) -> dict[str, object]:
        """Tell how many steps there are, and the largest rate."""
        (found,) = re.findall(r"(\d+) epochs", case)
        self.epochs, self.curves = int(found), []
        steps = num_steps(len(self.data.train_x), self.epochs, self.setting.global_batch)
        recipe = self.setting.recipe(steps)
        return {"steps": steps, "warm-up steps": recipe.warmup_steps, "peak rate": recipe.peak}

    def run(self, repeats: int) -> None:
        """Collective: train, with the next seed each time."""
        for _ in range(repeats):
            self.curves.append(
                train(
                    self.world,
                    self.engine,
                    self.setting,
                    self.data,
                    epochs=self.epochs,
                    seed=len(self.curves),
                )
            )

    def counts(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def finish(self) -> dict[str, object]:
        """The last accuracy of every seed, and the mean curve."""
        means = [sum(epoch) / len(epoch) for epoch in zip(*self.curves, strict=True)]
        return {
            "accuracies": [round(curve[-1], 6) for curve in self.curves],
            "curve": [round(value, 6) for value in means],
        }


def make(world: World, variant: str) -> Measurable:
    """The subject of a variant, named as its setting."""
    return Training(world, SETTINGS[variant])
