"""What to change, and how many nodes to request, from predictions. Pure; simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from hpctrain.errors import ConfigError
from hpctrain.log import format_bytes
from hpctrain.predict.costs import RankLayout
from hpctrain.predict.exchange import default_exchange
from hpctrain.predict.machine import Machine
from hpctrain.predict.model import Prediction, predict
from hpctrain.predict.profile import Profile
from hpctrain.tables import count_of
from hpctrain.wire import NONE

__all__ = ["Advice", "Cost", "advise", "cost_of"]

_SIZES = tuple(1 << power for power in range(20, 29))
_MOST_ACCUMULATED = 64
_WIRE = "bf16"
"""What is looked at: the range of float32, so that nothing else has to change."""
_WORTH = 0.02
"""Gains below this are within the accuracy of a prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of training this many samples on this many ranks."""

    num_ranks: int
    num_nodes: int
    hours: float
    node_hours: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to change at the largest requested number of ranks, and what to request."""

    num_ranks: int
    """The number of ranks at which fusion, accumulation and compression were examined."""
    bucket_bytes: int | None
    """The best fusion size; None: leave it as it is."""
    bucket_gain: float
    """By how much a step gets shorter, relative."""
    accumulate: int | None
    """The fewest backward passes per step that reach the target efficiency; None: none do."""
    wire: str | None
    """The wire between nodes that was looked at; None: this engine has none for these ranks."""
    compression_gain: float
    """By how much it shortens a step, relative; 0: by nothing."""
    efficient_ranks: int | None
    """The most of the requested numbers of ranks that are still efficient; None: none are."""
    ranks_to_ask: int | None
    """The same, or more ranks that are faster for no more node-hours, such as on the same nodes."""
    nodes_to_ask: int | None
    limit: str
    """What limits scaling, in words."""
    costs: tuple[Cost, ...]

    def lines(self, efficiency: float) -> list[str]:
        """The advice in plain words."""
        at = f"at {self.num_ranks} ranks"
        lines = [f"{at} {self.limit}"]
        if self.bucket_bytes is not None:
            size = format_bytes(self.bucket_bytes)
            lines.append(
                f"fusion: bucket_bytes of {size} shortens a step by {self.bucket_gain:.0%}"
            )
        else:
            lines.append("fusion: the size in use is within 2 % of the best")
        if self.accumulate is None:
            lines.append(f"accumulation: even {_MOST_ACCUMULATED} passes miss {efficiency:.0%}")
        elif self.accumulate > 1:
            lines.append(
                f"accumulation: {self.accumulate} passes a step reach {efficiency:.0%}, with a "
                f"global batch {self.accumulate} times as large"
            )
        else:
            lines.append(f"accumulation: not needed for {efficiency:.0%}")
        if self.wire is not None:
            gain = self.compression_gain
            worth = f"shortens a step by {gain:.0%}" if gain >= _WORTH else "gains nothing here"
            lines.append(f'compression: wire="{self.wire}" between nodes {worth}')
        if self.ranks_to_ask is None:
            lines.append(f"nodes: none of these numbers of ranks reaches {efficiency:.0%}")
        else:
            told = f"the most of these that keep {efficiency:.0%}"
            if self.ranks_to_ask != self.efficient_ranks:
                few = f"{self.efficient_ranks} rank{'s' * (self.efficient_ranks != 1)}"
                told = f"faster for no more node-hours than {few}, {told}"
            lines.append(f"nodes: ask for {self.nodes_to_ask} ({self.ranks_to_ask} ranks), {told}")
        lines += [
            f"cost: {cost.num_nodes} nodes, {cost.hours:.3g} h, {cost.node_hours:.3g} node-hours"
            for cost in self.costs
        ]
        return lines

    def as_json(self) -> dict[str, object]:
        """Plain values, marked as simulated."""
        return {"simulated": True, **asdict(self)}


def cost_of(prediction: Prediction, num_samples: int) -> Cost:
    """Hours and node-hours of training this many samples."""
    hours = num_samples / prediction.samples_per_s / 3600
    return Cost(
        num_ranks=prediction.num_ranks,
        num_nodes=prediction.num_nodes,
        hours=hours,
        node_hours=hours * prediction.num_nodes,
    )


def advise(
    profile: Profile,
    machine: Machine,
    predictions: Sequence[Prediction],
    *,
    efficiency: float = 0.8,
    num_samples: int = 0,
) -> Advice:
    """Look around the predictions for what would be better.

    Args:
        profile: What they were made from.
        machine: What they were made from.
        predictions: Of the numbers of ranks in question.
        efficiency: What is still worth asking for.
        num_samples: Samples to train in all; 0: no costs.
    """
    if not 0 < efficiency <= 1:
        raise ConfigError(f"efficiency={efficiency} must be above 0 and at most 1")
    if not predictions:
        raise ConfigError("there are no predictions to advise on")
    count_of(num_samples, "num_samples", least=0)
    last = max(predictions, key=lambda each: each.num_ranks)
    profile = profile.at_batch(last.batch)
    good = [each for each in predictions if each.efficiency.value >= efficiency]
    efficient = max(good, key=lambda each: each.num_ranks, default=None)
    chosen = None if efficient is None else _undominated(efficient, predictions)
    size, gain = _best_size(profile, machine, last)
    wired = _with_wire(profile, machine, last)
    return Advice(
        num_ranks=last.num_ranks,
        bucket_bytes=size,
        bucket_gain=gain,
        accumulate=_least_accumulation(profile, machine, last, efficiency),
        wire=None if wired is None else wired.exchange.wire,
        compression_gain=0.0 if wired is None else _gain_of(wired, last),
        efficient_ranks=efficient.num_ranks if efficient else None,
        ranks_to_ask=chosen.num_ranks if chosen else None,
        nodes_to_ask=chosen.num_nodes if chosen else None,
        limit=_limit(last),
        costs=tuple(cost_of(each, num_samples) for each in predictions) if num_samples else (),
    )


def _undominated(chosen: Prediction, predictions: Sequence[Prediction]) -> Prediction:
    """The fastest of what is faster for no more node-hours than the choice, or the choice."""
    price = chosen.num_nodes / chosen.samples_per_s
    better = [
        each
        for each in predictions
        if each.samples_per_s > chosen.samples_per_s
        and each.num_nodes / each.samples_per_s <= price
    ]
    return max(better, key=lambda each: each.samples_per_s, default=chosen)


def _again(profile: Profile, machine: Machine, like: Prediction, **changes: object) -> Prediction:
    exchange = replace(like.exchange, **changes)  # type: ignore[arg-type]
    return predict(profile, machine, like.num_ranks, exchange=exchange, is_strong=like.is_strong)


def _gain(profile: Profile, machine: Machine, like: Prediction, **changes: object) -> float:
    return _gain_of(_again(profile, machine, like, **changes), like)


def _gain_of(other: Prediction, like: Prediction) -> float:
    return max(0.0, 1 - other.step_s.value / like.step_s.value)


def _with_wire(profile: Profile, machine: Machine, like: Prediction) -> Prediction | None:
    """The same with 16 bits between nodes; None: `distribute` does not do that here."""
    if like.num_nodes == 1 or like.exchange.wire != NONE or like.exchange.wire_ratio < 1:
        return None
    try:
        chosen = default_exchange(
            like.exchange.engine,
            RankLayout(num_ranks=like.num_ranks, ranks_per_node=machine.ranks_per_node),
            gradient_bytes=profile.gradient_bytes,
            on_gpu=machine.memory_bytes_per_device > 0,
            wire=_WIRE,
        )
    except ConfigError:
        return None
    changes = {"overlap": chosen.overlap, "bucket_bytes": chosen.bucket_bytes}
    return _again(profile, machine, like, wire=chosen.wire, **changes)


def _best_size(profile: Profile, machine: Machine, like: Prediction) -> tuple[int | None, float]:
    if not like.exchange.overlap or like.num_ranks == 1:
        return None, 0.0
    gains = {size: _gain(profile, machine, like, bucket_bytes=size) for size in _SIZES}
    best = max(gains, key=lambda size: gains[size])
    return (best, gains[best]) if gains[best] >= _WORTH else (None, 0.0)


def _least_accumulation(
    profile: Profile, machine: Machine, like: Prediction, efficiency: float
) -> int | None:
    passes = like.exchange.accumulate
    while passes <= _MOST_ACCUMULATED:
        if _again(profile, machine, like, accumulate=passes).efficiency.value >= efficiency:
            return passes
        passes *= 2
    return None


def _limit(last: Prediction) -> str:
    lost = {
        "communication that backward does not hide": last.exposed_s.value,
        "memory that the ranks of a node share": last.contention_s,
        "waiting for the slowest rank": last.straggling_s,
    }
    if last.is_strong:
        repeated = "the update, which does not get shorter with a rank's share,"
        lost[repeated] = last.update_s * (1 - 1 / last.num_ranks)
    most = max(lost, key=lambda name: lost[name])
    share = lost[most] / last.step_s.value
    if share < _WORTH:
        return "nothing limits scaling by more than 2 % of a step"
    return f"{most} costs most: {share:.0%} of a step"
