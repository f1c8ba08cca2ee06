"""The whole configuration: all sections, read from TOML and `--set`, written as TOML. Pure."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from hpctrain.errors import ConfigError
from hpctrain.tables import Key, adapt, keys_of, mistake, nearest, trouble_with, write_toml
from hpctrain.train.config.running import (
    Checkpoint,
    EngineChoice,
    Faults,
    GridChoice,
    Logging,
    Precision,
)
from hpctrain.train.config.sections import (
    Averages,
    Data,
    Model,
    Optimizer,
    Schedule,
    Section,
    Training,
)
from hpctrain.wire import NONE

__all__ = [
    "SECTIONS",
    "Config",
    "all_keys",
    "build_config",
    "load_config",
    "parse_config",
    "to_toml",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The configuration of `hpctrain train`, by section."""

    model: Model
    data: Data
    train: Training
    optimizer: Optimizer
    schedule: Schedule = field(default_factory=Schedule)
    ema: Averages = field(default_factory=Averages)
    precision: Precision = field(default_factory=Precision)
    engine: EngineChoice = field(default_factory=EngineChoice)
    grid: GridChoice = field(default_factory=GridChoice)
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
        if self.grid.is_used:
            yield from self._grid_conflicts()

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations."""
        return bool(self.data.evaluation or self.data.evaluation_files)

    def _grid_conflicts(self) -> Iterator[str]:
        """What a divided model has no use for."""
        engine = self.engine
        for name, given in (
            ("model.compile", self.model.compile),
            ("engine.overlap", engine.overlap),
            (f'engine.update="{engine.update}"', engine.update != "auto"),
            ("engine.share_parameters", engine.share_parameters),
            (f'engine.wire="{engine.wire}"', engine.wire != NONE),
            ("train.step", self.train.step),
        ):
            if given:
                yield f"{name} does not go with [grid]; leave one of them out"
        if self.grid.pipeline > 1 and self.train.loss is None:
            yield "grid.pipeline needs train.loss: a stage does not return the loss of the model"
        if self.grid.pipeline > 1 and self.model.sync_batchnorm:
            yield "model.sync_batchnorm does not go with grid.pipeline; leave one of them out"

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
                f'schedule.args.mode="{mode}" and {key}="{self.plateau_metric}" contradict '
                "each other; leave out mode"
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
        GridChoice,
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


def load_config(path: Path, settings: Sequence[str] = ()) -> Config:
    """Read a configuration file; `settings` are `key=value` texts that come on top.

    Raises:
        ConfigError: the file cannot be read, or with everything that is wrong in it.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name a TOML file") from error
    return parse_config(text, settings, name=str(path))


def parse_config(text: str, settings: Sequence[str] = (), *, name: str = "config") -> Config:
    """Read the text of a configuration file.

    Raises:
        ConfigError: with everything that is wrong.
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from error
    return build_config(tree, settings, name=name)


def build_config(
    tree: Mapping[str, Any], settings: Sequence[str] = (), *, name: str = "config"
) -> Config:
    """Make a configuration of plain tables.

    Args:
        tree: Sections of keys, as TOML has them.
        settings: `section.key=value` texts that replace what is there.
        name: Where this comes from, for messages.

    Raises:
        ConfigError: with everything that is wrong.
    """
    wrong: list[str] = []
    tables: dict[str, dict[str, Any]] = {title: {} for title in SECTIONS}
    for title, table in tree.items():
        if title not in SECTIONS:
            wrong.append(_unknown_section(title, table))
        elif not isinstance(table, Mapping):
            wrong.append(f"{title}={table!r} must be a section: write [{title}]")
        else:
            tables[title] = dict(table)
    for setting in settings:
        trouble = _set(tables, setting)
        wrong += [trouble] if trouble else []
    sections: dict[str, Section] = {}
    for title, cls in SECTIONS.items():
        section, troubles = _read_section(cls, tables[title])
        wrong += troubles
        if section is not None:
            sections[title] = section
    if not wrong:
        try:
            return Config(**sections)  # type: ignore[arg-type]  # each under its own title
        except ConfigError as error:
            wrong += str(error).split("\n")
    lines = "\n".join(f"  {line}" for line in wrong)
    count = "1 mistake" if len(wrong) == 1 else f"{len(wrong)} mistakes"
    raise ConfigError(f"{name}: {count}\n{lines}\n`hpctrain config explain KEY` explains a key")


def _read_section(cls: type[Section], table: Mapping[str, Any]) -> tuple[Section | None, list[str]]:
    known = {key.name: key for key in keys_of(cls)}
    wrong = [_unknown_key(cls.title, word, known) for word in table if word not in known]
    values: dict[str, Any] = {}
    for name, key in known.items():
        if name not in table:
            if key.is_required:
                wrong.append(f"{cls.title}.{name} is missing: {_first_sentence(key.meaning)}")
            continue
        value = adapt(key, table[name])
        trouble = trouble_with(key, value)
        if trouble is not None:
            wrong.append(mistake(f"{cls.title}.{name}", value, trouble + _meant(key, value)))
        values[name] = value
    if wrong:
        return None, wrong
    try:
        return cls(**values), []
    except ConfigError as error:
        return None, str(error).split("\n")


def _set(tables: dict[str, dict[str, Any]], setting: str) -> str | None:
    """Put one `section.key=value` into the tables; or say what is wrong with it."""
    name, equals, text = setting.partition("=")
    path = [part.strip() for part in name.split(".")]
    if not equals or len(path) < 2 or not all(path):
        return f"--set {setting}: write section.key=value"
    title, word, *inside = path
    if title not in SECTIONS:
        return f"--set {setting}: {_unknown_section(title, {word: None})}"
    known = {key.name: key for key in keys_of(SECTIONS[title])}
    if word not in known:
        return f"--set {setting}: {_unknown_key(title, word, known)}"
    table, last = tables[title], word
    if inside:
        if not any(get_origin(part) is dict for part in known[word].members):
            return f"--set {setting}: {title}.{word} has no keys inside it"
        for step in (word, *inside[:-1]):
            table[step] = dict(table.get(step, {})) if isinstance(table.get(step), dict) else {}
            table = table[step]
        last = inside[-1]
    table[last] = _parse_value(text, None if inside else known[word])
    return None


def _parse_value(text: str, key: Key | None) -> Any:
    """A value as TOML writes it; what is none is text, so that quotes can be left out."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
    if key is not None and trouble_with(key, adapt(key, value)) is not None:
        return text if trouble_with(key, text) is None else value
    return value


def _unknown_section(title: str, table: object) -> str:
    home = [name for name in all_keys() if name.endswith(f".{title}")]
    if home:
        section = home[0].partition(".")[0]
        return f"{title} is unknown at the top; it is {home[0]}: write it under [{section}]"
    guess = nearest(title, SECTIONS)
    hint = f"did you mean [{guess}]?" if guess else f"sections are {', '.join(SECTIONS)}"
    return (
        f"[{title}] is unknown; {hint}"
        if isinstance(table, Mapping)
        else f"{title} is unknown; {hint}"
    )


def _unknown_key(title: str, word: str, known: Mapping[str, Key]) -> str:
    elsewhere = [name for name in all_keys() if name.endswith(f".{word}")]
    guess = nearest(word, known)
    if guess is not None:
        hint = f"did you mean {title}.{guess}?"
    elif elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    else:
        other = nearest(word, (name.partition(".")[2] for name in all_keys()))
        full = next((name for name in all_keys() if name.endswith(f".{other}")), None)
        hint = f"did you mean {full}?" if full else f"keys are {', '.join(known)}"
    return f"{title}.{word} is unknown; {hint}"


def _meant(key: Key, value: object) -> str:
    guess = nearest(value, key.words) if isinstance(value, str) and key.words else None
    return f'; did you mean "{guess}"?' if guess else ""


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")
