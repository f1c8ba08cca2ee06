"""The sections that say how it runs: precision, engine, checkpoints, logging, faults. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hpctrain.engines import AUTO, engine_names
from hpctrain.tables import key, keys_of, table
from hpctrain.train.config.sections import MONITOR, Section
from hpctrain.wire import NONE, wire_names

__all__ = ["Checkpoint", "EngineChoice", "Faults", "GridChoice", "Logging", "Precision"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision(Section):
    """In which numbers it is computed."""

    title: ClassVar[str] = "precision"

    kind: Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure"] = key(
        "fp32, tf32, autocast to bf16 or fp16, or weights in bf16 with float32 masters.",
        default="fp32",
    )
    init_scale: float = key(
        "fp16: what losses are multiplied by at first.", default=65536.0, above=0
    )
    growth_interval: int = key(
        "fp16: steps without overflow until the scale doubles.", default=2000, low=1
    )
    max_skips: int = key("fp16: steps skipped in a row that end the run.", default=20, low=1)

    def conflicts(self) -> Iterator[str]:
        """Loss scaling is for fp16."""
        fields = type(self).__dataclass_fields__
        for name in ("init_scale", "growth_interval", "max_skips"):
            if self.kind != "fp16" and getattr(self, name) != fields[name].default:
                yield f'precision.{name} belongs to precision.kind="fp16", not "{self.kind}"'


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice(Section):
    """What carries the gradients."""

    title: ClassVar[str] = "engine"

    name: str = key(
        "Which engine; `auto` takes the fastest that works here.",
        default=AUTO,
        words=lambda: (AUTO, *engine_names()),
    )
    overlap: bool | None = key(
        "Send gradients while backward still runs; left out, if there is something to overlap.",
        default=None,
    )
    bucket_bytes: int | None = key("When to close a bucket of gradients.", default=None, low=1)
    update: Literal["auto", "sharded", "replicated"] = key(
        "Whether the ranks of a node divide the update and hold the optimizer's state once.",
        default="auto",
    )
    share_parameters: bool = key("Hold the weights once per node, too.", default=False)
    wire: str = key(
        "How gradients are sent between nodes: as they are, or in 16 bits.",
        default=NONE,
        words=wire_names,
    )
    timeout_s: float = key(
        "How long a collective may wait for a rank before the job ends and names it.",
        default=600.0,
        above=0,
    )

    def conflicts(self) -> Iterator[str]:
        """Shared weights need a shared update."""
        if self.share_parameters and self.update == "replicated":
            yield 'engine.share_parameters needs engine.update="sharded" or "auto"'
        messages = self.overlap or self.bucket_bytes is not None
        if self.update == "sharded" and messages:
            yield (
                'engine.update="sharded" needs gradients in shared memory; engine.overlap=true and '
                "engine.bucket_bytes ask for messages"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GridChoice(Section):
    """How a model is divided among the ranks; left out, every rank has all of it."""

    title: ClassVar[str] = "grid"

    data: int | None = key(
        "Ranks that train on different samples; left out, what the others leave.",
        default=None,
        low=1,
    )
    pipeline: int = key("Stages that the model, a chain of modules, is cut into.", default=1, low=1)
    tensor: int = key("Ranks that share each layer.", default=1, low=1)
    shard: Literal["state", "gradients", "parameters"] | None = key(
        "What lies in shards over the data dimension; left out, nothing.", default=None
    )
    units: tuple[str, ...] = key(
        "Patterns of module names that are gathered each for itself; left out, the repeated blocks "
        "of the model.",
        default=(),
    )
    whole_gradients: bool = key(
        "Keep gradients of shards whole between the parts of a step.", default=False
    )
    stages: tuple[str, ...] = key(
        "Names of the layers at which the stages but the first begin; left out, they are balanced.",
        default=(),
    )
    layers: dict[str, Any] = field(
        default_factory=dict,
        metadata=table(
            "Layers that are divided over the tensor dimension: patterns of names, each with "
            "`column`, `row` or `vocabulary`."
        ),
    )
    micro_batches: int | None = key(
        "Parts that a batch is cut into on its way through the stages.", default=None, low=1
    )
    schedule: Literal["1f1b", "gpipe"] | None = key(
        "In which order a stage runs them; left out, 1f1b.", default=None
    )

    @property
    def is_used(self) -> bool:
        """Whether anything of it was asked for."""
        return any(getattr(self, each.name) != each.default for each in keys_of(type(self)))

    def conflicts(self) -> Iterator[str]:
        """Options of stages, layers and shards where there are some."""
        if self.pipeline > 1 and self.micro_batches is None:
            yield (
                f"grid.pipeline={self.pipeline} needs grid.micro_batches; take at least "
                f"{4 * self.pipeline}"
            )
        for name in ("stages", "micro_batches", "schedule"):
            if self.pipeline == 1 and getattr(self, name):
                yield f"grid.{name} belongs to grid.pipeline, which is 1; leave it out"
        if (self.tensor > 1) != bool(self.layers):
            yield (
                f"grid.tensor={self.tensor} with {len(self.layers)} patterns in grid.layers; give "
                "both or neither"
            )
        for name in ("units", "whole_gradients"):
            if getattr(self, name) and self.shard not in ("gradients", "parameters"):
                yield f'grid.{name} belongs to grid.shard="gradients" or "parameters"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint(Section):
    """What is kept, so that no run is lost."""

    title: ClassVar[str] = "checkpoint"

    enabled: bool = key("Save checkpoints, and resume from the newest.", default=True)
    every_s: float | Literal["auto"] | None = key(
        "Seconds between checkpoints; `auto` balances the cost of a save against how often jobs "
        "fail.",
        default="auto",
        above=0,
    )
    every_steps: int | None = key(
        "Steps between checkpoints, instead of seconds.", default=None, low=1
    )
    keep_last: int = key("How many of the newest are kept.", default=3, low=1)
    keep_best: str | None = key(
        "Also keep the best by a metric of the evaluation.", default=None, form=MONITOR
    )
    keep_best_count: int = key("How many of the best.", default=1, low=1)
    keep_every_hours: float | None = key(
        "Also keep one every so many hours.", default=None, above=0
    )
    asynchronous: bool = key("Write while the training continues.", default=True)

    def conflicts(self) -> Iterator[str]:
        """Options of checkpoints where there are some."""
        if self.every_steps is not None and self.every_s not in ("auto", None):
            yield "checkpoint.every_s and checkpoint.every_steps are both given; leave one out"
        if self.keep_best is None and self.keep_best_count != 1:
            yield "checkpoint.keep_best_count belongs to checkpoint.keep_best"


@dataclass(frozen=True, kw_only=True, slots=True)
class Logging(Section):
    """What is written and shown."""

    title: ClassVar[str] = "logging"

    directory: str | None = key(
        "The run directory; left out, runs/ and the name of the configuration file.", default=None
    )
    every_steps: int = key("Steps between lines of metrics.", default=10, low=1)
    timing: bool | None = key(
        "Measure input, forward, backward, exchange and update of every step. Left out: on CPUs; "
        "on GPUs it synchronizes the device at each boundary.",
        default=None,
    )
    tensorboard: bool = key(
        "Also write TensorBoard events (needs the package tensorboard).", default=False
    )
    csv: bool = key("Also write metrics.csv, one row per line of metrics.", default=False)
    wandb: Literal["off", "offline", "online"] = key(
        "Also log to Weights & Biases (needs the package wandb): into the run directory, for "
        "`wandb sync`, or to the server while it runs.",
        default="off",
    )
    wandb_project: str = key("Its project.", default="hpctrain")
    display: Literal["auto", "live", "plain", "off"] = key(
        "What rank 0 shows: `auto` is live on a terminal and plain lines in a batch log.",
        default="auto",
    )

    @property
    def loggers(self) -> dict[str, str | None]:
        """What is written besides metrics.jsonl, by its key, and the package that it needs."""
        asked = {
            "logging.csv=true": (self.csv, None),
            "logging.tensorboard=true": (self.tensorboard, "tensorboard"),
            f'logging.wandb="{self.wandb}"': (self.wandb != "off", "wandb"),
        }
        return {key: package for key, (wanted, package) in asked.items() if wanted}

    def conflicts(self) -> Iterator[str]:
        """Options of Weights & Biases where it is used."""
        if self.wandb == "off" and self.wandb_project != "hpctrain":
            yield 'logging.wandb_project belongs to logging.wandb="offline" or "online"'


def _check_signal(name: str) -> bool:
    return name in signal.Signals.__members__


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults(Section):
    """What interrupts a job, and how often."""

    title: ClassVar[str] = "faults"

    signals: tuple[str, ...] = key(
        "Signals after which all ranks save and exit to be requeued.",
        default=("SIGUSR2", "SIGUSR1", "SIGTERM"),
        form=(r"SIG[A-Z0-9]+", "SIGNAME"),
    )
    mtbf_hours: float = key(
        'Mean time between failures of the whole job, for checkpoint.every_s="auto".',
        default=24.0,
        above=0,
    )

    sentinel_every_steps: int = key(
        "Steps between comparisons of the weights of all ranks, bit by bit; 0 never compares.",
        default=100,
        low=0,
    )
    nonfinite: Literal["stop", "ignore"] = key(
        "What happens if a loss is inf or NaN on some rank, checked with every line of metrics.",
        default="stop",
    )

    def conflicts(self) -> Iterator[str]:
        """Only signals that this system has, each once."""
        for name in self.signals:
            if not _check_signal(name):
                yield f"faults.signals: there is no signal {name} here"
        if len(set(self.signals)) != len(self.signals):
            yield "faults.signals names a signal twice"
