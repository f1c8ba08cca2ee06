"""The whole configuration of a training. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.tables import Key, keys_of, write_toml
from hpctrain.train.config.parts import Averages, Data, Model, Optimizer, Schedule, Training
from hpctrain.train.config.running import Checkpoint, EngineChoice, Faults, Logging, Precision
from hpctrain.train.config.section import Section

__all__ = ["SECTIONS", "Config", "all_keys", "to_toml"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What `hpctrain train` is told, by section."""

    model: Model
    data: Data
    train: Training
    optimizer: Optimizer
    schedule: Schedule = field(default_factory=Schedule)
    ema: Averages = field(default_factory=Averages)
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
        if not self.evaluates:
            for name, given in (
                ("train.patience", self.train.patience),
                ("train.metrics", self.train.metrics),
                ("train.evaluate_every_steps", self.train.evaluate_every_steps),
                ("train.evaluation_batch", self.train.evaluation_batch),
                ("checkpoint.keep_best", self.checkpoint.keep_best),
                (f'schedule.name="{self.schedule.name}"', self.schedule.is_plateau),
                ("schedule.metric", self.schedule.metric),
                ("ema.evaluate=false", not self.ema.evaluate),
            ):
                if given:
                    yield f"{name} needs data.evaluation or data.evaluation_files"
        yield from self._plateau_conflicts()
        if self.checkpoint.keep_best and not self.checkpoint.enabled:
            yield "checkpoint.keep_best needs checkpoint.enabled=true"
        if self.schedule.name == "recipe" and "lr" in self.schedule.args:
            yield "schedule.args.lr is optimizer.lr; write it there"
        if self.engine.share_parameters and self.precision.kind == "bf16-pure":
            yield 'engine.share_parameters does not go with precision.kind="bf16-pure"'

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations."""
        return bool(self.data.evaluation or self.data.evaluation_files)

    @property
    def plateau_metric(self) -> str:
        """What ReduceLROnPlateau looks at, as `min:NAME` or `max:NAME`."""
        return self.schedule.metric or self.train.monitor

    def _plateau_conflicts(self) -> Iterator[str]:
        """It follows evaluations, in the direction of its metric."""
        if not self.schedule.is_plateau:
            return
        by_epoch = self.train.evaluate_every_steps is None and self.train.evaluate_every_epochs == 1
        if self.schedule.every == "epoch" and not by_epoch:
            yield (
                'schedule.every="epoch" with ReduceLROnPlateau needs an evaluation after every '
                "epoch; leave it out, and the schedule steps after every evaluation"
            )
        mode, way = self.schedule.args.get("mode"), self.plateau_metric.partition(":")[0]
        if mode not in (None, way):
            key = "train.monitor" if self.schedule.metric is None else "schedule.metric"
            yield (
                f'schedule.args.mode="{mode}" and {key}="{self.plateau_metric}" say opposite '
                "things; leave mode out"
            )

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
        Averages,
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


def to_toml(config: Config) -> str:
    """Write all keys of a configuration, those included that were left out, except None."""
    return write_toml(
        {
            title: {name: value for name, value in table.items() if value != {}}
            for title, table in config.as_tree().items()
        }
    )
