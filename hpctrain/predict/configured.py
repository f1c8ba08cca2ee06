"""A configuration of `hpctrain train`, as the predictor sees it. Needs torch only to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.engines import AUTO, capabilities_of
from hpctrain.errors import ConfigError
from hpctrain.train import Config, load_config

if TYPE_CHECKING:
    from hpctrain.predict.footprint import Footprint
    from hpctrain.predict.profile import Profile
    from hpctrain.predict.profiling import Subject

__all__ = [
    "ConfigOptions",
    "footprint_configured",
    "measure_configured",
    "read_options",
    "state_copies_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigOptions:
    """What of a configuration the options of `hpctrain plan` would say."""

    global_batch: int
    accumulate: int
    engine: str | None
    bucket_bytes: int | None
    overlap: bool | None
    wire: str
    epochs: int
    steps: int | None
    drop_last: bool
    even_last: bool
    warmup_steps: int


def read_options(path: Path) -> ConfigOptions:
    """Read a configuration.

    Raises:
        ConfigError: it is wrong, or cannot be predicted.
    """
    config = load_config(path, [])
    engine = config.engine.name
    if engine != AUTO and capabilities_of(engine).topology == "none":
        raise ConfigError(
            f"{path}: engine.name={engine!r} does not communicate; nothing to predict"
        )
    return ConfigOptions(
        global_batch=config.train.global_batch,
        accumulate=config.train.accumulate,
        engine=None if engine == AUTO else engine,
        bucket_bytes=config.engine.bucket_bytes,
        overlap=config.engine.overlap,
        wire=config.engine.wire,
        epochs=config.train.num_epochs or 1,
        steps=config.train.steps,
        drop_last=config.data.drop_last,
        even_last=config.data.even_last,
        warmup_steps=config.schedule.warmup_steps,
    )


def measure_configured(path: Path, batch: int, *, repeats: int = 20) -> Profile:
    """Measure a profile of what a configuration trains, on this process.

    Args:
        path: The configuration.
        batch: Samples of a rank.
        repeats: Steps that count.

    Raises:
        ConfigError: it trains with the user's own step function.
    """
    from hpctrain.predict.profiling import measure_profile

    config = load_config(path, [])
    if config.precision.kind != "fp32":
        raise _refuse(path, f"in {config.precision.kind}", "a loss in fp32 is measured")
    with _prepared(path, batch) as make:
        return measure_profile(make(), repeats=repeats)


def footprint_configured(
    path: Path, batch: int, *, precision: str | None = None, tensor: Mapping[str, str] | None = None
) -> Footprint:
    """Measure what a configuration's model holds, on the fake device.

    Args:
        path: The configuration.
        batch: Samples of a micro-batch.
        precision: None: the configuration's.
        tensor: As `measure_footprint` takes it.

    Raises:
        ConfigError: it trains in a way that only the user's own step function knows, or the model
            does not run on the fake device.
    """
    from hpctrain.predict.fake_device import measure_footprint

    config = load_config(path, [])
    with _prepared(path, batch, on_fake_device=True) as make:
        return measure_footprint(
            make,
            precision=precision or config.precision.kind,
            tensor=tensor,
            name=config.model.build,
        )


def _refuse(path: Path, what: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"{path} trains {what}, and only {wanted} from a configuration; measure it with "
        "--measure-profile and --subject, and give --profile"
    )


@contextmanager
def _prepared(
    path: Path, batch: int, *, on_fake_device: bool = False
) -> Iterator[Callable[[], Subject]]:
    """What builds the configuration's step, with a batch of its data that is there already."""
    from hpctrain.connection import init
    from hpctrain.data import Loader
    from hpctrain.predict.profiling import Subject
    from hpctrain.train import (
        build_data,
        build_models,
        build_optimizer,
        compute,
        count_samples,
        find_loss,
        search_beside,
    )

    config: Config = load_config(path, [])
    search_beside(path)
    train = config.train
    if train.step is not None and train.loss is None:
        raise _refuse(path, "by train.step", "a loss is measured")
    loss_of = None if train.loss is None else find_loss(train.loss)
    device = "cpu" if on_fake_device else train.device
    with init(seed=train.seed, device=device, num_threads=train.num_threads) as alone:
        if alone.size > 1:
            raise ConfigError("a profile is measured in one process; start it without mpirun")
        data = build_data(config, alone, path.resolve().parent)
        loader = Loader(alone, data, global_batch=batch)
        batch_here = next(iter(loader))
        samples = count_samples(data) or 0

        def make() -> Subject:
            (model,) = build_models(config).values()
            model.to(alone.device)
            return Subject(
                model=model,
                optimizer=build_optimizer(config, model),
                loss=lambda: compute(model, model, batch_here, loss_of).loss,
                batch=loader.num_samples,
                samples=samples,
                name=config.model.build,
            )

        yield make


def state_copies_of(path: Path) -> float:
    """What the configuration's optimizer holds, in sizes of the weights."""
    from hpctrain.train import plan_ahead, search_beside

    search_beside(path)
    folder = path.resolve().parent
    memory = plan_ahead(load_config(path, []), folder, num_ranks=1, ranks_per_node=1).memory
    return memory.optimizer_state / max(1, memory.weights)
