"""The whole configuration of a training. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.train.config.keys import Key, keys_of
from hpctrain.train.config.parts import Data, Model, Optimizer, Schedule, Training
from hpctrain.train.config.running import Checkpoint, EngineChoice, Faults, Logging, Precision
from hpctrain.train.config.section import Section

__all__ = ["SECTIONS", "Config", "all_keys"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What `hpctrain train` is told, by section."""

    model: Model
    data: Data
    train: Training
    optimizer: Optimizer
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    engine: EngineChoice = field(default_factory=EngineChoice)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        """Refuse sections that do not go together."""
        wrong = list(self.conflicts())
        if wrong:
            raise ConfigError("\n".join(wrong))

    def conflicts(self) -> Iterator[str]:
        """What does not go together between sections, each with what to do."""
        evaluates = bool(self.data.evaluation or self.data.evaluation_files)
        if not evaluates:
            for name, given in (
                ("train.patience", self.train.patience),
                ("train.metrics", self.train.metrics),
                ("train.evaluate_every_steps", self.train.evaluate_every_steps),
                ("train.evaluation_batch", self.train.evaluation_batch),
                ("checkpoint.keep_best", self.checkpoint.keep_best),
            ):
                if given:
                    yield f"{name} needs data.evaluation or data.evaluation_files"
        if evaluates and self.train.loss is None:
            yield "data.evaluation needs train.loss beside train.step, to evaluate with"
        if self.checkpoint.keep_best and not self.checkpoint.enabled:
            yield "checkpoint.keep_best needs checkpoint.enabled=true"
        if self.schedule.name == "recipe" and "lr" in self.schedule.args:
            yield "schedule.args.lr is optimizer.lr; write it there"
        if self.engine.share_parameters and self.precision.kind == "bf16-pure":
            yield 'engine.share_parameters does not go with precision.kind="bf16-pure"'

    def as_tree(self) -> dict[str, dict[str, Any]]:
        """Sections of plain values, without those that are None."""
        return {
            section.name: {
                key.name: value
                for key in keys_of(type(getattr(self, section.name)))
                if (value := getattr(getattr(self, section.name), key.name)) is not None
            }
            for section in dataclasses.fields(self)
        }


SECTIONS: dict[str, type[Section]] = {
    cls.title: cls
    for cls in (
        Model,
        Data,
        Training,
        Optimizer,
        Schedule,
        Precision,
        EngineChoice,
        Checkpoint,
        Logging,
        Faults,
    )
}
"""Every section by its name in the file, in the order of a file."""


def all_keys() -> dict[str, Key]:
    """Every key by its name with its section, as in `optimizer.lr`."""
    return {f"{title}.{key.name}": key for title, cls in SECTIONS.items() for key in keys_of(cls)}
