"""What limits scaling and what to try; what a training costs and what to request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpctrain.bench import LIMIT, describe_reach, percent
from hpctrain.errors import ConfigError
from hpctrain.report.results import Estimate, Study, StudyPoint

__all__ = [
    "Bottleneck",
    "PlannedTraining",
    "Quote",
    "advise",
    "choose_quote",
    "describe_scaling",
    "price",
]

_COMPUTE = ("forward", "backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """Something that costs time, and a way to get it back."""

    rule: str
    weight: float
    """The share of a step that it costs: the most expensive is listed first."""
    what: str
    attempt: str


def advise(study: Study) -> list[Bottleneck]:
    """All findings on a study, the most costly first."""
    rules = _ANY_RULES if study.mode == "layout" else (*_ANY_RULES, *_SCALING_RULES)
    found = [finding for rule in rules for finding in rule(study)]
    return sorted(found, key=lambda finding: -finding.weight)


def describe_scaling(study: Study) -> str:
    """The fastest point, and how far each engine scales."""
    best = study.best()
    if best is None:
        return "No point of this sweep was measured."
    speed_up, efficiency = study.speed_up(best), study.efficiency(best)
    most = max(point.num_ranks for point in study.measured)
    if speed_up is None or efficiency is None or most == 1:
        return "Only one number of ranks was measured: there is no scaling to report yet."
    sure = (
        f"interval {percent(efficiency.low)} to {percent(efficiency.high)}"
        if efficiency.is_repeated
        else "measured once, so without an interval"
    )
    rate = f", {best.samples_per_s:.0f} samples/s" if best.samples_per_s else ""
    text = (
        f"The fastest point is {best.engine} on {_ranks(best)}{rate}: {speed_up.median:.2f} "
        f"times the speed of {_base_words(study, best)}, an efficiency of "
        f"{percent(efficiency.median)} ({sure})."
    )
    for engine in study.engines:
        reach = study.reach(engine)
        if reach["kept_at"] or reach["missed_at"]:
            text += f" {engine}: {describe_reach(reach)}."
    return text


def _ranks(point: StudyPoint) -> str:
    return f"{point.num_ranks} rank{'s' * (point.num_ranks > 1)}"


def _base_words(study: Study, point: StudyPoint) -> str:
    base = study.base_of(point)
    if base is None or base in study.baselines:
        return "one process without distribution"
    return f"its {_ranks(base)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _largest(study: Study) -> list[StudyPoint]:
    """Every engine's point with the most ranks, if its parts were timed."""
    ends = [study.of_engine(engine)[-1:] for engine in study.engines]
    return [point for end in ends for point in end if point.split_s and point.num_ranks > 1]


def _share(point: StudyPoint, *parts: str) -> float:
    total = sum(point.split_s.values())
    return sum(point.split_s.get(part, 0.0) for part in parts) / total if total > 0 else 0.0


def _communication(study: Study) -> Iterator[Bottleneck]:
    for point in _largest(study):
        share = _share(point, "exchange")
        if share >= 0.1:
            yield Bottleneck(
                rule="communication",
                weight=share,
                what=f"{point.engine} on {point.num_ranks} ranks waits {_percent(share)} of every "
                "step for gradients that backward does not hide.",
                attempt="Give each rank more samples a step or accumulate=2 and more, so that "
                "there is more to compute for each exchange; try overlap=True with other "
                'bucket_bytes; between nodes, wire="bf16" halves the bytes.'
                + _other_engine(study, point),
            )


def _other_engine(study: Study, point: StudyPoint) -> str:
    rivals = [
        rival
        for rival in study.measured
        if rival.num_ranks == point.num_ranks and rival.engine != point.engine
    ]
    quicker = [
        rival
        for rival in rivals
        if rival.step_s
        and point.step_s
        and rival.step_s.is_repeated
        and rival.step_s.high < point.step_s.low
    ]
    if not quicker:
        return ""
    best = min(quicker, key=lambda rival: rival.step_s.median if rival.step_s else 0.0)
    return f" The {best.engine} engine is faster here, beyond the noise."


def _input(study: Study) -> Iterator[Bottleneck]:
    for point in _largest(study):
        share = _share(point, "input")
        if share >= 0.05:
            yield Bottleneck(
                rule="input",
                weight=share,
                what=f"{point.engine} on {point.num_ranks} ranks waits {_percent(share)} of every "
                "step for its data.",
                attempt="Let the loader read ahead (prefetch=2) or give it num_workers; stage the "
                "data on the node's own disk or share them in memory (hpctrain.share).",
            )


def _straggling(study: Study) -> Iterator[Bottleneck]:
    for point in _largest(study):
        share = _share(point, "straggling")
        if share >= 0.05:
            yield Bottleneck(
                rule="straggling",
                weight=share,
                what=f"On {point.num_ranks} ranks of {point.engine} the slowest rank is "
                f"{_percent(share)} of a step behind the median one, and all wait for it.",
                attempt="Run `hpctrain doctor --all-nodes` to find a slow node or core; bind ranks "
                '(bind="numa"); check that batches cost the same on all ranks.',
            )


def _update(study: Study) -> Iterator[Bottleneck]:
    for point in _largest(study):
        share = _share(point, "update")
        if share >= 0.2:
            yield Bottleneck(
                rule="update",
                weight=share,
                what=f"The optimizer takes {_percent(share)} of a step of {point.engine} on "
                f"{point.num_ranks} ranks.",
                attempt='Use its fused form (fused=True); let ranks divide it (update="sharded" on '
                "the mpi engine); step less often with accumulate.",
            )


def _contention(study: Study) -> Iterator[Bottleneck]:
    """Computing itself slows down when more ranks share a node's memory."""
    for engine in study.engines:
        timed = [point for point in study.of_engine(engine) if point.split_s]
        if len(timed) < 2:
            continue
        first, last = timed[0], timed[-1]
        before, after = (_compute_per_sample(study, point) for point in (first, last))
        if before > 0 and after > 1.1 * before and last.num_nodes == first.num_nodes:
            share = _share(last, *_COMPUTE) * (1 - before / after)
            yield Bottleneck(
                rule="contention",
                weight=share,
                what=f"A sample's forward and backward alone take {after / before:.2f} times as "
                f"long on {last.num_ranks} ranks of {engine} as on {first.num_ranks}: the ranks of "
                "a node compete for its memory, caches or cores.",
                attempt="Use fewer ranks with more threads each: `hpctrain bench layout` finds the "
                "best layout of this node.",
            )


def _compute_per_sample(study: Study, point: StudyPoint) -> float:
    """Seconds of computing for one rank's samples, weak or strong."""
    seconds = sum(point.split_s.get(part, 0.0) for part in _COMPUTE)
    if point.global_batch:
        return seconds * point.num_ranks / point.global_batch
    return seconds if study.mode == "weak" else seconds * point.num_ranks


def _whole_node(study: Study) -> Iterator[Bottleneck]:
    best = study.best()
    one = None if best is None else study.node_of(best)
    if one is None or best is None or best.num_nodes > 1:
        return
    slower = _times_as_fast(one, best)
    if slower is None or slower.median <= 1.0:
        return
    clearly = slower.is_repeated and slower.low > 1.0
    unclear = "the intervals overlap" if slower.is_repeated else "it was measured once"
    yield Bottleneck(
        rule="whole node",
        weight=1 - 1 / slower.median,
        what=f"One process with all cores of the node is {slower.median:.2f} times as fast as the "
        "best distributed point: on one node, distributing this model "
        + ("does not pay." if clearly else f"does not clearly pay; {unclear}."),
        attempt="Train in one process here, and distribute where there are more nodes, or a "
        "larger model or batch.",
    )


def _times_as_fast(one: StudyPoint, other: StudyPoint) -> Estimate | None:
    """How much more work `one` does in the same time; None: they cannot be compared."""
    if other.over_node is not None:
        measured = other.over_node
        return Estimate(median=1 / measured.median, low=1 / measured.high, high=1 / measured.low)
    if one.step_s is None or other.step_s is None:
        return None
    if not one.global_batch or not other.global_batch:
        return None
    return other.step_s.over(one.step_s).scaled(one.global_batch / other.global_batch)


def _serial(study: Study) -> Iterator[Bottleneck]:
    if study.mode != "strong":
        return
    for engine in study.engines:
        series, trend = study.serial_trend(engine)
        last = series[-1].fraction if series else 0.0
        if last <= 0.02:
            continue
        ranks = study.of_engine(engine)[-1].num_ranks
        if trend == "rises":
            yield Bottleneck(
                rule="growing overhead",
                weight=last / 10,
                what=f"The serial fraction (Karp-Flatt) of {engine} rises from "
                f"{series[0].fraction:.3f} to {last:.3f} at {ranks} ranks: overhead grows with the "
                "ranks.",
                attempt="Look at exchange and straggling in the breakdown; fewer, larger "
                "messages (bucket_bytes) help where latency is what grows.",
            )
        elif trend == "level":
            yield Bottleneck(
                rule="serial part",
                weight=last / 10,
                what=f"The serial fraction (Karp-Flatt) of {engine} is level, {last:.3f} at {ranks}"
                " ranks: a part of the step is not divided among the ranks.",
                attempt="Find work that every rank repeats: augmentation, the optimizer "
                '(update="sharded"), logging or evaluation in the loop.',
            )


def _superlinear(study: Study) -> Iterator[Bottleneck]:
    for point in study.measured:
        efficiency = study.efficiency(point)
        base = study.base_of(point)
        if efficiency is None or point is base or efficiency.low <= 1.02:
            continue
        if not efficiency.is_repeated:
            continue
        if point.num_ranks == 1:
            yield Bottleneck(
                rule="noise",
                weight=0.003,
                what=f"{point.engine} on 1 rank has {_percent(efficiency.median)} of the speed of "
                "the same process undistributed, and has nothing to divide: the baseline was "
                "disturbed, so every efficiency here is wrong.",
                attempt="Repeat on a quiet machine, with more --repeats.",
            )
        else:
            yield Bottleneck(
                rule="superlinear",
                weight=0.0,
                what=f"{point.engine} on {point.num_ranks} ranks is more than ideal "
                f"({_percent(efficiency.median)}): the optimizer's work is divided as well, or the "
                "data of a rank fit into its caches.",
                attempt="This is a real gain, not an error; the baseline does not have it.",
            )
            return


def _noise(study: Study) -> Iterator[Bottleneck]:
    wide = [
        point
        for point in study.measured
        if point.step_s and point.step_s.high - point.step_s.low > 0.2 * point.step_s.median
    ]
    if wide:
        worst = max(wide, key=lambda p: (p.step_s.high / p.step_s.low) if p.step_s else 0.0)
        yield Bottleneck(
            rule="noise",
            weight=0.001,
            what=f"{len(wide)} of {len(study.measured)} points have intervals wider than 20 % of "
            f"their median, {worst.engine} on {_ranks(worst)} the widest: small "
            "differences mean nothing here.",
            attempt="Repeat on a quiet machine, with more --repeats.",
        )


def _failures(study: Study) -> Iterator[Bottleneck]:
    for point in study.failed:
        yield Bottleneck(
            rule="failed",
            weight=0.002,
            what=f"{point.engine} on {_ranks(point)} was not measured: {_first_line(point)}",
            attempt="Run the same sweep again: it measures what is missing.",
        )


def _first_line(point: StudyPoint) -> str:
    """Why it failed; the rest of it is in the result and in the launch's log."""
    return point.failure.partition("\n")[0]


_ANY_RULES: tuple[Callable[[Study], Iterator[Bottleneck]], ...] = (_whole_node, _noise, _failures)
_SCALING_RULES: tuple[Callable[[Study], Iterator[Bottleneck]], ...] = (
    _communication,
    _input,
    _straggling,
    _update,
    _contention,
    _serial,
    _superlinear,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTraining:
    """What is to be trained."""

    num_samples: float
    """Samples over all epochs."""
    reserve: float = 0.25
    """Reserve on top of the computed need, for queues, restarts and mistakes."""
    runs: int = 1
    """How many trainings: seeds, searches, ablations."""

    def __post_init__(self) -> None:
        """Refuse what cannot be priced."""
        if self.num_samples <= 0:
            raise ConfigError(f"--samples {self.num_samples:g} must be above 0")
        if self.reserve < 0:
            raise ConfigError(f"--reserve {self.reserve:g} must not be below 0")
        if self.runs < 1:
            raise ConfigError(f"--runs {self.runs} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quote:
    """What one point would cost."""

    point: StudyPoint
    hours: float
    """Of one training, without the reserve."""
    node_hours: float
    """Of all trainings, with the reserve."""
    core_hours: float
    is_proposed: bool = False
    """Whether it is the recommended one."""


def price(study: Study, planned: PlannedTraining) -> list[Quote]:
    """Every measured point of a study, priced, one process on a node among them; one is proposed.

    Only what was measured is priced: `hpctrain plan` predicts the rest.
    """
    alone = [point for point in study.asides if point.step_s is not None]
    every = [*alone, *sorted(study.measured, key=lambda p: (p.num_ranks, p.engine))]
    asks = []
    for point in every:
        speed = point.samples_per_s
        if speed is None:
            continue
        hours = planned.num_samples / speed / 3600
        total = hours * planned.runs * (1 + planned.reserve)
        asks.append(
            Quote(
                point=point,
                hours=hours,
                node_hours=total * point.num_nodes,
                core_hours=total * point.num_ranks * point.num_threads,
            )
        )
    chosen = choose_quote([(ask.hours, ask.node_hours) for ask in asks])
    return [replace(ask, is_proposed=place == chosen) for place, ask in enumerate(asks)]


def choose_quote(costs: Sequence[tuple[float, float]]) -> int | None:
    """Which of several (hours, node-hours) to request: the fastest that does not cost much more.

    Efficiency counts against what is paid for, and that is nodes: up to 1 / 0.8 times the fewest
    node-hours are accepted for a shorter training. So nothing that is both faster and cheaper than
    the choice is left aside.
    """
    if not costs:
        return None
    most = min(node_hours for _, node_hours in costs) / LIMIT
    good = [place for place, (_, node_hours) in enumerate(costs) if node_hours <= most]
    return min(good, key=lambda place: costs[place])
