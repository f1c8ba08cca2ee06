"""A machine from measurements, by least squares. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.engines import AUTO, capabilities_of, choose
from hpctrain.errors import ConfigError
from hpctrain.predict.costs import RankLayout, allreduce_s, doublings, shares_of, slowest_of
from hpctrain.predict.machine import NO_LATENCY_S, NO_LIMIT, Costs, Link, Machine
from hpctrain.tables import check_keys, count_of, number_of, positive, text_of

__all__ = [
    "SCHEMA",
    "CollectiveSample",
    "ComputeSample",
    "Measurement",
    "TrainingSample",
    "fit_contention",
    "fit_costs",
    "fit_machine",
    "fit_training",
]

SCHEMA = "hpctrain.samples/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSample:
    """One size of an allreduce on one engine: the median of the slowest rank's times."""

    engine: str
    num_ranks: int
    ranks_per_node: int
    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        text_of(self.engine, "engine")
        count_of(self.num_bytes, "num_bytes")
        positive(self.seconds, "seconds")

    @property
    def layout(self) -> RankLayout:
        """Where its ranks are."""
        return RankLayout(num_ranks=self.num_ranks, ranks_per_node=self.ranks_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSample:
    """The same computing step on this many ranks of a node at once, without communication."""

    ranks_on_node: int
    seconds: float
    """The median over steps and ranks."""
    jitter: float
    """Relative standard deviation of a rank's time from step to step."""

    def __post_init__(self) -> None:
        count_of(self.ranks_on_node, "ranks_on_node")
        positive(self.seconds, "seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """A step with all ranks together, and the same step alone."""

    engine: str
    num_ranks: int
    ranks_per_node: int
    gradient_bytes: int
    compute_s: float
    """Forward, backward and update on this many ranks at once, without communication."""
    seconds: float
    """The slowest rank's, median over steps."""

    def __post_init__(self) -> None:
        text_of(self.engine, "engine")
        count_of(self.gradient_bytes, "gradient_bytes")
        positive(self.compute_s, "compute_s")
        positive(self.seconds, "seconds")

    @property
    def layout(self) -> RankLayout:
        """Where its ranks are."""
        return RankLayout(num_ranks=self.num_ranks, ranks_per_node=self.ranks_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """All that one launch has measured."""

    collectives: tuple[CollectiveSample, ...]
    compute: ComputeSample
    memory_bytes_per_node: int
    training: tuple[TrainingSample, ...] = ()
    foreign_load: float = 0.0
    """The background load as a share of all cores, if it was monitored."""

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """What `as_json` gave.

        Raises:
            ConfigError: it did not.
        """
        keys = {"schema", "collectives", "compute", "memory_bytes_per_node"}
        table = check_keys(
            data, "the measurement", needed=keys, known=keys | {"training", "foreign_load"}
        )
        if table["schema"] != SCHEMA:
            raise ConfigError(f"schema {table['schema']!r}; this version reads {SCHEMA!r}")
        return cls(
            collectives=tuple(CollectiveSample(**each) for each in table["collectives"]),
            compute=ComputeSample(**table["compute"]),
            memory_bytes_per_node=table["memory_bytes_per_node"],
            training=tuple(TrainingSample(**each) for each in table.get("training", ())),
            foreign_load=number_of(table.get("foreign_load", 0.0), "foreign_load"),
        )


_NAMES = ("intra.latency_s", "intra", "inter.latency_s", "inter", "reduce", "crowd")
_MOST_ERROR = 1.0
_ONCE_ERROR = 0.5


def fit_machine(
    measurements: Sequence[Measurement],
    *,
    title: str,
    name: str = "measured",
    ranks_per_node: int | None = None,
) -> Machine:
    """A machine from launches on different numbers of ranks; of equal ones medians count.

    Args:
        measurements: At least one with one rank on a node, and one with several ranks.
        title: A line about the machine.
        name: What to call it.
        ranks_per_node: How many ranks a node is to have; None: the most that were measured.

    Raises:
        ConfigError: something needed was not measured.
    """
    compute = [measurement.compute for measurement in measurements]
    samples = _medians([sample for each in measurements for sample in each.collectives])
    engines = {
        engine: fit_costs(
            [s for s in samples if s.engine == engine], capabilities_of(engine).topology
        )
        for engine in sorted({sample.engine for sample in samples})
    }
    if not engines:
        raise ConfigError("no collective was measured; launch with at least 2 ranks")
    jitter = median([each.jitter for each in compute])
    trained = [sample for each in measurements for sample in each.training]
    engines = {
        engine: fit_training(costs, [s for s in trained if s.engine == engine], jitter)
        for engine, costs in engines.items()
    }
    points, error = fit_contention(compute)
    usual = choose(AUTO, device_kind="cpu", size=2).name
    first = engines.get(usual) or next(iter(engines.values()))
    most = max(each.ranks_on_node for each in compute)
    return Machine(
        name=name,
        title=title,
        ranks_per_node=ranks_per_node or most,
        costs=first,
        engines=engines,
        jitter=jitter,
        jitter_error=0.5,
        contention=points,
        contention_error=error,
        memory_bytes_per_node=min(each.memory_bytes_per_node for each in measurements),
        measured=True,
        foreign_load=max(each.foreign_load for each in measurements),
        as_of=datetime.now(UTC).date().isoformat(),
    )


def fit_training(costs: Costs, samples: Sequence[TrainingSample], jitter: float) -> Costs:
    """Costs with what training adds to its collectives, for each byte of gradients.

    Gradients are copied to where ranks share them, and sums are read that are no longer in the
    cache; collectives that are measured alone show neither.
    """
    if not samples:
        return costs
    left = [
        (
            sample.seconds
            - sample.compute_s * slowest_of(sample.num_ranks, jitter)
            - allreduce_s(sample.gradient_bytes, sample.layout, costs)
        )
        / sample.gradient_bytes
        for sample in samples
    ]
    return replace(costs, reduce_s_per_byte=costs.reduce_s_per_byte + max(0.0, median(left)))


def fit_contention(
    samples: Sequence[ComputeSample],
) -> tuple[tuple[tuple[int, float], ...], float]:
    """How computing slows down with ranks on the node, and how sure that is.

    The error is the spread of steps, or of launches where it is wider, over what is lost; but never
    below a half where a number of ranks has one launch, which does not show how launches differ.
    Where nothing is lost nothing is known of the loss, and the error is 1.
    """
    by_count: dict[int, list[float]] = {}
    for sample in samples:
        by_count.setdefault(sample.ranks_on_node, []).append(sample.seconds)
    if 1 not in by_count:
        raise ConfigError("contention is relative to one rank alone on a node; measure that too")
    alone = median(by_count[1])
    points = tuple(
        (count, max(1.0, median(times) / alone) if count > 1 else 1.0)
        for count, times in sorted(by_count.items())
    )
    between = max((max(times) - min(times)) / 2 / median(times) for times in by_count.values())
    spread = max(between, median([sample.jitter for sample in samples]))
    lost = max(slow for _, slow in points) - 1.0
    if lost <= 0:
        return points, _MOST_ERROR
    least = _ONCE_ERROR if min(map(len, by_count.values())) < 2 else 0.0
    return points, min(_MOST_ERROR, max(least, spread / lost))


def _medians(samples: Sequence[CollectiveSample]) -> list[CollectiveSample]:
    """One sample of all that differ in nothing but their times."""
    alike: dict[CollectiveSample, list[float]] = {}
    for sample in samples:
        alike.setdefault(replace(sample, seconds=1.0), []).append(sample.seconds)
    return [replace(each, seconds=median(times)) for each, times in alike.items()]


def fit_costs(samples: Sequence[CollectiveSample], topology: str) -> Costs:
    """Latency, bandwidth and addition that explain an engine's times best.

    Errors count relative to the root of a time: seconds alone would forget latency, and relative
    errors the large messages that training sends. Nothing is negative. What
    the samples say nothing about costs nothing: without several nodes there is no link between
    them, and such a machine is good for one node.

    Args:
        samples: Of one engine, over several sizes.
        topology: How it adds up.
    """
    if len({sample.num_bytes for sample in samples}) < 2:
        raise ConfigError("latency and bandwidth need at least two sizes of collectives")
    weights = np.array([s.seconds**-0.5 for s in samples])
    rows = np.array([_row(s, topology) for s in samples], dtype=np.float64)
    times = np.array([s.seconds for s in samples])
    values, errors = _least_squares(rows * weights[:, None], times * weights)
    found = dict(zip(_NAMES, zip(values, errors, strict=True), strict=True))
    return Costs(
        topology=topology,
        intra=_link(found, "intra"),
        inter=_link(found, "inter"),
        reduce_s_per_byte=found["reduce"][0],
        crowding=found["crowd"][0] / found["intra"][0] if found["intra"][0] else 0.0,
    )


def _row(sample: CollectiveSample, topology: str) -> list[float]:
    """What each unknown is multiplied by in the time of this sample."""
    shares = shares_of(topology, sample.layout)
    size = float(sample.num_bytes)
    # Addition is distinguished from bandwidth by how the two scale with the number of ranks.
    apart = size if topology in ("ring", "halving") else 0.0
    return [
        shares.intra_hops,
        shares.intra_bytes * size,
        shares.inter_hops,
        shares.inter_bytes * size,
        apart,
        shares.intra_bytes * size * doublings(sample.layout) * (topology == "hierarchical"),
    ]


def _link(found: dict[str, tuple[float, float]], where: str) -> Link:
    latency, latency_error = found[f"{where}.latency_s"]
    per_byte, byte_error = found[where]
    return Link(
        latency_s=latency if latency > 0 else NO_LATENCY_S,
        bytes_per_s=1.0 / per_byte if per_byte > 0 else NO_LIMIT,
        latency_error=latency_error,
        bandwidth_error=byte_error,
    )


def _least_squares(
    rows: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> tuple[list[float], list[float]]:
    """Non-negative values with rows @ values near the target, and their relative errors.

    Columns whose value would be negative are left out, the most negative first.
    """
    width = rows.shape[1]
    scale = np.abs(rows).max(axis=0)
    kept = [column for column in range(width) if scale[column] > 0]
    solved = np.zeros(0)
    while kept:
        part = rows[:, kept] / scale[kept]
        solved = np.linalg.lstsq(part, wanted, rcond=None)[0]
        worst = int(np.argmin(solved))
        if solved[worst] >= 0:
            break
        kept.pop(worst)
    values, errors = [0.0] * width, [0.0] * width
    if not kept:
        return values, errors
    part = rows[:, kept] / scale[kept]
    left = part @ solved - wanted
    free = max(1, len(rows) - len(kept))
    spread = np.linalg.pinv(part.T @ part) * float(left @ left) / free
    for place, column in enumerate(kept):
        values[column] = float(solved[place] / scale[column])
        if solved[place] > 0:
            error = float(np.sqrt(max(0.0, spread[place, place])) / solved[place])
            # As many unknowns as times are met exactly, which says nothing of either.
            errors[column] = min(_MOST_ERROR, error) if len(rows) > len(kept) else _MOST_ERROR
    return values, errors
