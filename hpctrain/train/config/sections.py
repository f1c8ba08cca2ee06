"""The sections that say what is trained: model, data, training, optimizer and so on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hpctrain.errors import ConfigError
from hpctrain.tables import key, keys_of, mistake, table, trouble_with

__all__ = ["Averages", "Data", "Model", "Optimizer", "Schedule", "Section", "Training"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A table of a configuration: typed keys, and what does not go together."""

    title: ClassVar[str] = ""
    """Its name in the file."""

    def __post_init__(self) -> None:
        """Refuse wrong kinds, numbers out of range and impossible combinations, all at once."""
        wrong = []
        for each in keys_of(type(self)):
            value = getattr(self, each.name)
            trouble = trouble_with(each, value)
            if trouble is not None:
                wrong.append(mistake(f"{self.title}.{each.name}", value, trouble))
        wrong += [] if wrong else list(self.conflicts())
        if wrong:
            raise ConfigError("\n".join(wrong))

    def conflicts(self) -> Iterator[str]:
        """What does not go together, each with what to do."""
        return iter(())


REFERENCE = (r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", "MODULE:FUNCTION")
NAME_OR_REFERENCE = (rf"[A-Za-z_]\w*|{REFERENCE[0]}", "a name or MODULE:FUNCTION")
PLATEAU = "ReduceLROnPlateau"
MONITOR = (r"(min|max):[A-Za-z_]\w*", "min:NAME or max:NAME of a metric")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model(Section):
    """What is trained."""

    title: ClassVar[str] = "model"

    build: str = key(
        "The function that builds the model; its module is found as by `python -m`. It returns a "
        "module, or a dict of modules that train.step trains, each with its own optimizer.",
        form=REFERENCE,
    )
    args: dict[str, Any] = field(
        default_factory=dict, metadata=table("Keyword arguments of that function.")
    )
    sync_batchnorm: bool = key("Give every BatchNorm the statistics of all ranks.", default=False)
    compile: bool = key(
        "Compile the model with torch.compile, for training and evaluation; checkpoints stay those "
        "of the plain model.",
        default=False,
    )
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = key("How much torch.compile optimizes.", default="default")
    compile_backend: str = key("The backend of torch.compile.", default="inductor")

    def conflicts(self) -> Iterator[str]:
        """Options of the compiler where it is used."""
        fields = type(self).__dataclass_fields__
        for name in ("compile_mode", "compile_backend"):
            if not self.compile and getattr(self, name) != fields[name].default:
                yield f"model.{name} belongs to model.compile=true"
        if self.compile_backend != "inductor" and self.compile_mode != "default":
            yield (
                f'model.compile_mode belongs to model.compile_backend="inductor", not '
                f'"{self.compile_backend}"'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Data(Section):
    """What it is trained on: a function, or files."""

    title: ClassVar[str] = "data"

    build: str | None = key(
        "The function that returns the training data: arrays, a Dataset, a DataLoader. If it has "
        "a parameter `world`, it gets the world, and may use share, scatter or files.",
        default=None,
        form=REFERENCE,
    )
    evaluation: str | None = key(
        "The function that returns the data to evaluate on.", default=None, form=REFERENCE
    )
    args: dict[str, Any] = field(
        default_factory=dict, metadata=table("Keyword arguments of both functions.")
    )
    files: tuple[str, ...] = key(
        "Files of training data instead of a function, or a folder of shards, `.npz` or `.pt` "
        "files; relative to the configuration file.",
        default=(),
    )
    evaluation_files: tuple[str, ...] = key("Files of the data to evaluate on.", default=())
    join: Literal["rows", "columns"] | None = key(
        "How several files are combined: their rows are concatenated, or each is one column "
        "(inputs first, then the target).",
        default=None,
    )
    columns: tuple[str, ...] = key(
        "Which arrays of a file, in the order of the batch: inputs first, then the target.",
        default=(),
    )
    access: Literal["files", "share", "scatter"] = key(
        "How files are read: each rank reads its samples as needed, one copy per node in memory, "
        "or by rank 0, which sends every rank its share.",
        default="files",
    )
    # In the order of the loader's: typing makes equal unions one, and the documentation lists them.
    shuffle: bool | Literal["keyed", "numpy", "local"] = key(
        "A new global order in every epoch; `local` shuffles scattered shares within each rank.",
        default=True,
    )
    sample_weights: str | None = key(
        "One number for each sample, by which epochs draw samples with replacement: a `.npy` "
        "file, or MODULE:FUNCTION of the training data that returns them.",
        default=None,
    )
    num_draws: int | None = key(
        "Draws in an epoch; left out, as many as there are samples.", default=None, low=1
    )
    lengths: str | None = key(
        "One whole number for each sample, to make batches of similar lengths: a `.npy` file, or "
        "MODULE:FUNCTION of the training data that returns them.",
        default=None,
    )
    bucket_batches: int | None = key(
        "Batches whose samples are sorted by length together; left out, 100.", default=None, low=1
    )
    split: Literal["already", "same"] | None = key(
        "Of streams: `already` where each rank's stream is its own part, `same` where all ranks "
        "have one stream whose samples are not compared; left out, one stream that is compared.",
        default=None,
    )
    drop_last: bool = key("Leave out a last batch that is not full.", default=False)
    even_last: bool = key(
        "Make the last two batches equal where the last would be less than half full.", default=True
    )
    num_workers: int = key(
        "Worker processes per rank that fetch samples of a Dataset.", default=0, low=0
    )
    prefetch: int | None = key(
        "Batches to prefetch; left out, the loader decides.", default=None, low=0
    )

    def conflicts(self) -> Iterator[str]:
        """One source for the training data; options only where they mean something."""
        if bool(self.files) == (self.build is not None):
            given = "both are given" if self.files else "neither is given"
            yield f"data.build or data.files must give the data; {given}"
        if self.evaluation and self.evaluation_files:
            yield "data.evaluation and data.evaluation_files are both given; leave one out"
        by_file = bool(self.files or self.evaluation_files)
        if not by_file and (self.columns or self.access != "files" or self.join is not None):
            yield "data.columns, data.join and data.access belong to data.files; leave them out"
        for name in ("files", "evaluation_files"):
            if len(getattr(self, name)) > 1 and self.join is None:
                yield (
                    f'data.{name} names several files; add join = "rows" where their rows follow '
                    'each other, or join = "columns" where row i of each belongs to sample i'
                )
        if self.join == "columns" and self.columns:
            yield (
                'data.columns chooses arrays of a file, and data.join="columns" makes each file '
                "one; leave one of them out"
            )
        by_function = self.build is not None or self.evaluation is not None
        if self.args and not by_function:
            yield "data.args belongs to data.build; leave it out"
        if self.sample_weights and self.lengths:
            yield "data.sample_weights and data.lengths both choose the samples; leave one out"
        chosen = "lengths" if self.lengths else "sample_weights"
        if (self.lengths or self.sample_weights) and self.shuffle is not True:
            yield f"data.{chosen} determines the order; leave out data.shuffle"
        if (self.lengths or self.sample_weights) and self.files and self.access == "scatter":
            yield f'data.{chosen} needs random access; use data.access="files" or "share"'
        if self.num_draws is not None and not self.sample_weights:
            yield "data.num_draws belongs to data.sample_weights; leave it out"
        if self.bucket_batches is not None and not self.lengths:
            yield "data.bucket_batches belongs to data.lengths; leave it out"
        if self.shuffle == "local" and self.files and self.access != "scatter":
            yield 'data.shuffle="local" belongs to data.access="scatter"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Training(Section):
    """How long, in which batches, towards what."""

    title: ClassVar[str] = "train"

    global_batch: int = key(
        "Samples in a step over all ranks; it defines the mathematics, whatever the number of "
        "ranks.",
        low=1,
    )
    epochs: int | None = key("How often all samples are used.", default=None, low=1)
    steps: int | None = key("Steps of the whole training, instead of epochs.", default=None, low=1)
    accumulate: int = key(
        "Parts that each step is computed in, one after the other, to save memory.",
        default=1,
        low=1,
    )
    loss: str | None = key(
        "A function of torch.nn.functional by name, or MODULE:FUNCTION, called with what the "
        "model returns and the target; the mean over samples. Left out, the model gets the "
        "whole batch and returns an object or a dict with a `loss`, as transformers do.",
        default=None,
        form=NAME_OR_REFERENCE,
    )
    metrics: tuple[str, ...] = key(
        "Measured in evaluations beside the loss: `accuracy`, `mae`, `mse`, or MODULE:FUNCTION "
        "that returns one value per sample.",
        default=(),
        form=NAME_OR_REFERENCE,
    )
    step: str | None = key(
        "A function of the trainer and a batch that makes one step itself, for several "
        "optimizers or gradients of gradients; it returns the loss, or a dict of numbers.",
        default=None,
        form=REFERENCE,
    )
    evaluate_every_epochs: int = key("Epochs between evaluations.", default=1, low=1)
    evaluate_every_steps: int | None = key(
        "Steps between evaluations, instead of epochs.", default=None, low=1
    )
    evaluation_batch: int | None = key(
        "Samples in a batch of an evaluation over all ranks; left out, global_batch.",
        default=None,
        low=1,
    )
    monitor: str = key(
        "What better means, for early stopping and the best checkpoint.",
        default="min:loss",
        form=MONITOR,
    )
    patience: int | None = key(
        "Stop after this many evaluations in a row without improvement; left out, never.",
        default=None,
        low=1,
    )
    min_delta: float = key("The least improvement that counts.", default=0.0, low=0)
    seed: int = key("Seed of the run: weights, orders, dropout.", default=0, low=0, below=2**63)
    device: Literal["auto", "cuda", "cpu"] = key("What the ranks compute on.", default="auto")
    allow_shared_device: bool = key(
        "Let several ranks of a node compute on one GPU, for trials; NCCL refuses that.",
        default=False,
    )
    num_threads: int | None = key(
        "Threads per rank; left out, its share of the cores.", default=None, low=1
    )
    bind: Literal["none", "numa"] = key(
        "Bind ranks to cores where the launcher did not.", default="none"
    )

    @property
    def num_epochs(self) -> int | None:
        """Epochs to train: one where nothing was said; None where steps say when to stop."""
        return self.epochs if self.epochs or self.steps else 1

    def conflicts(self) -> Iterator[str]:
        """One way to say how long, one way to say what a step does."""
        if self.epochs is not None and self.steps is not None:
            yield "train.epochs and train.steps both define when to stop; leave one out"
        if self.global_batch % self.accumulate:
            yield (
                f"train.accumulate={self.accumulate} does not divide "
                f"train.global_batch={self.global_batch}"
            )
        if self.evaluate_every_steps is not None and self.evaluate_every_epochs != 1:
            yield (
                "train.evaluate_every_steps and train.evaluate_every_epochs both define when to "
                "evaluate; leave one out"
            )
        if self.min_delta and self.patience is None:
            yield "train.min_delta belongs to train.patience; leave it out or give both"


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer(Section):
    """What moves the weights."""

    title: ClassVar[str] = "optimizer"

    name: str = key(
        "A class of torch.optim, LARS or LAMB by name, or MODULE:FUNCTION that takes parameters.",
        default="AdamW",
        form=NAME_OR_REFERENCE,
    )
    lr: float = key("The learning rate; of train.global_batch unless schedule scales it.", above=0)
    weight_decay: float | None = key(
        "Weight decay; left out, the optimizer's default.", default=None, low=0
    )
    exclude_norms: bool = key(
        "Biases and normalisation do not decay, and have no trust ratio.", default=False
    )
    args: dict[str, Any] = field(
        default_factory=dict, metadata=table("Further keyword arguments of the optimizer.")
    )
    clip_norm: float | None = key(
        "Limit of the norm of all gradients together, over all ranks.", default=None, above=0
    )
    clip_value: float | None = key(
        "Limit of the size of each element of the gradients.", default=None, above=0
    )

    def conflicts(self) -> Iterator[str]:
        """Each option in one place."""
        for name in ("lr", "weight_decay"):
            if name in self.args:
                yield f"optimizer.args.{name} is optimizer.{name}; write it there"
        if self.exclude_norms and self.weight_decay is None:
            yield "optimizer.exclude_norms needs optimizer.weight_decay"
        if self.clip_norm is not None and self.clip_value is not None:
            yield "optimizer.clip_norm and optimizer.clip_value are both given; choose one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule(Section):
    """How the learning rate moves."""

    title: ClassVar[str] = "schedule"

    name: str = key(
        "`none`, `recipe` (the keys below), a class of torch.optim.lr_scheduler by name, or "
        "MODULE:FUNCTION that takes the optimizer.",
        default="none",
        form=NAME_OR_REFERENCE,
    )
    args: dict[str, Any] = field(
        default_factory=dict, metadata=table("Keyword arguments of torch's schedule.")
    )
    every: Literal["step", "epoch"] | None = key(
        "When torch's schedule steps. Left out, at every step; ReduceLROnPlateau after every "
        "evaluation.",
        default=None,
    )
    metric: str | None = key(
        "Which result of the evaluation ReduceLROnPlateau follows, and which way is better; left "
        "out, train.monitor.",
        default=None,
        form=MONITOR,
    )
    base_batch: int | None = key(
        "The batch size that optimizer.lr was tuned for; left out, train.global_batch.",
        default=None,
        low=1,
    )
    scaling: Literal["linear", "sqrt", "none"] = key(
        "How the rate scales from base_batch to the batch of a step.", default="linear"
    )
    warmup_steps: int = key("Steps of warm-up, in which the rate rises.", default=0, low=0)
    warmup_from: float = key(
        "Rate at the start of warm-up, as a fraction of the peak.", default=0.0, low=0, high=1
    )
    decay: Literal["cosine", "polynomial", "step", "none"] = key(
        "How the rate decays after that.", default="cosine"
    )
    decay_steps: int | None = key(
        "The step at which a cosine or polynomial decay ends; left out, the last of the training.",
        default=None,
        low=1,
    )
    end: float = key("Final rate, as a fraction of the peak.", default=0.0, low=0, high=1)
    power: float | None = key("Power of a polynomial decay.", default=None, above=0)
    milestones: tuple[int, ...] = key(
        "For a step decay: the steps at which the rate falls.", default=(), low=0
    )
    factor: float | None = key(
        "For a step decay: the factor at each milestone.", default=None, above=0
    )

    RECIPE: ClassVar[tuple[str, ...]] = (
        "base_batch",
        "scaling",
        "warmup_steps",
        "warmup_from",
        "decay",
        "decay_steps",
        "end",
        "power",
        "milestones",
        "factor",
    )

    def conflicts(self) -> Iterator[str]:
        """Keys of a recipe belong to a recipe, those of torch's schedules to them."""
        fresh = {field: type(self).__dataclass_fields__[field].default for field in self.RECIPE}
        strange = [field for field in self.RECIPE if getattr(self, field) != fresh[field]]
        if self.name != "recipe" and strange:
            yield f'schedule.{strange[0]} belongs to schedule.name="recipe", not "{self.name}"'
        if self.decay_steps is not None and self.decay not in ("cosine", "polynomial"):
            yield f'schedule.decay_steps has no meaning for schedule.decay="{self.decay}"'
        ours = self.name in ("none", "recipe")
        if ours and (self.args or self.every not in (None, "step")):
            yield f'schedule.args and .every belong to torch\'s schedules, not "{self.name}"'
        if self.metric is not None and (ours or (not self.is_plateau and ":" not in self.name)):
            yield f'schedule.metric belongs to ReduceLROnPlateau, not "{self.name}"'
        if self.is_plateau and self.every == "step":
            yield (
                'schedule.every="step" does not go with ReduceLROnPlateau, which steps after every '
                "evaluation; leave it out (train.evaluate_every_steps says how often)"
            )

    @property
    def is_plateau(self) -> bool:
        """Whether it is the schedule of torch that looks at a metric."""
        return self.name == PLATEAU

    @property
    def when(self) -> str:
        """What it steps at, whether or not that was said."""
        return "evaluation" if self.is_plateau else self.every or "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Averages(Section):
    """An exponential moving average of the weights."""

    title: ClassVar[str] = "ema"

    decay: float | None = key(
        "Decay of the average at every step, such as 0.999; left out, there is no average.",
        default=None,
        low=0,
        below=1,
    )
    warm_up: bool = key(
        "Begin with a smaller decay, (1 + k) / (10 + k) after k steps, so that the initial "
        "weights are soon forgotten.",
        default=False,
    )
    evaluate: bool = key(
        "Evaluate the average; otherwise the last weights, with the average only saved.",
        default=True,
    )

    def conflicts(self) -> Iterator[str]:
        """Options of an average where there is one."""
        if self.decay is None and (self.warm_up or not self.evaluate):
            yield "ema.warm_up and ema.evaluate belong to ema.decay; write it, as in 0.999"
