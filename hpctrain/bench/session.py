"""Runs a plan: all cases, block by block, and makes a result of it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from hpctrain import log
from hpctrain.bench.control import Message, WorkerLaunch
from hpctrain.bench.load import LoadMeter
from hpctrain.bench.paired import Kept, choose_blocks, more_are_needed, paired_ratio, shuffled_order
from hpctrain.bench.results import SCHEMA, describe_machine
from hpctrain.errors import ConfigError

__all__ = ["BenchPlan", "Block", "Case", "Rules", "Variant", "describe_case", "run_plan"]

_START_S = 300.0
_PREPARE_S = 300.0
_MEASURE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way of doing the same work."""

    name: str
    launch: str
    """Variants of one launch share processes; those that disturb others get their own."""
    environ: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    """Variants of one kind differ in their layout alone; empty: the name."""
    num_ranks: int | None = None
    """None: as the rules say."""
    num_threads: int = 1
    """Of each rank."""

    def __post_init__(self) -> None:
        """Refuse what cannot be started."""
        for name in ("num_ranks", "num_threads"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name}={number} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kind of work, and how often a block repeats it."""

    name: str
    warmup: int
    repeats: int
    without: frozenset[str] = frozenset()
    """Variants that it does not apply to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How blocks are measured and chosen."""

    num_ranks: int
    """For variants without their own number."""
    blocks: int
    retries: int
    """How many more blocks a case may take when some are thrown away."""
    load_limit: float
    """The share of all cores that other processes may use during a valid block."""
    seed: int = 0
    bind: str = "none"
    """Whether ranks are bound to their own cores, as in `hpctrain.init`."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        for name, least in (("num_ranks", 1), ("blocks", 1), ("retries", 0), ("load_limit", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """A whole benchmark."""

    name: str
    module: str
    cases: Sequence[Case]
    variants: Sequence[Variant]
    comparisons: Sequence[tuple[str, str]]
    """Variant and baseline; pairs with an unmeasured member are left out."""
    rules: Rules
    settings: Mapping[str, object]

    def num_ranks_of(self, variant: Variant) -> int:
        """How many ranks a variant has."""
        return self.rules.num_ranks if variant.num_ranks is None else variant.num_ranks

    def variants_of(self, case: Case) -> list[Variant]:
        """Who takes part in a case."""
        return [variant for variant in self.variants if variant.name not in case.without]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Every variant once."""

    order: Sequence[str]
    seconds: Mapping[str, float]
    """For one repeat: the slowest rank's time over the repeats."""
    counts: Mapping[str, Mapping[str, float]]
    background_load: float


def run_plan(plan: BenchPlan, keep: Path | None = None) -> dict[str, object]:
    """Start all launches, measure all cases, and return a result as `schema` describes it.

    Args:
        plan: What to measure.
        keep: A file for what was measured so far, written after each case, so that a run which
            is cut off later has not lost it. Its settings then say `unfinished`.
    """
    with ExitStack() as ending:
        launches = _start(plan, ending)
        hellos = [launch.wait_until_started(_START_S) for launch in launches.values()]
        machine = describe_machine(mpi=str(hellos[0][0]["mpi"]))
        meter = LoadMeter(p for launch in launches.values() for p in launch.processes())
        series: list[dict[str, object]] = []
        ratios: list[dict[str, object]] = []
        blocks: list[dict[str, object]] = []
        for case in plan.cases:
            facts, measured, outcomes = _run_case(plan, case, launches, meter)
            loads = [block.background_load for block in measured]
            kept = choose_blocks(loads, wanted=plan.rules.blocks, limit=plan.rules.load_limit)
            parts = describe_case(plan, case, measured, kept, facts, outcomes)
            series += parts[0]
            ratios += parts[1]
            blocks += parts[2]
            log.notice(
                f"{case.name}: {len(measured)} blocks, background load {median(loads):.1%} (median)"
                + (f", {kept.num_noisy} noisy blocks kept" if kept.num_noisy else "")
            )
            if keep is not None:
                so_far = _result(plan, machine, series, ratios, blocks, unfinished=True)
                half = keep.with_name(f"{keep.name}.part")
                half.write_text(json.dumps(so_far, indent=1) + "\n", encoding="utf-8")
                half.replace(keep)
        for launch in launches.values():
            launch.disconnect()
    return _result(plan, machine, series, ratios, blocks)


def _result(
    plan: BenchPlan,
    machine: Mapping[str, object],
    series: Sequence[Mapping[str, object]],
    ratios: Sequence[Mapping[str, object]],
    blocks: Sequence[Mapping[str, object]],
    *,
    unfinished: bool = False,
) -> dict[str, object]:
    rules = asdict(plan.rules)
    del rules["num_ranks"]  # every series has its own
    return {
        "schema": SCHEMA,
        "benchmark": plan.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "settings": {**plan.settings, **rules, **({"unfinished": True} if unfinished else {})},
        "series": list(series),
        "ratios": list(ratios),
        "blocks": list(blocks),
        "num_thrown_away": sum(not block["kept"] for block in blocks),
        "num_noisy": sum(bool(block["kept"] and block["noisy"]) for block in blocks),
    }


def _start(plan: BenchPlan, ending: ExitStack) -> dict[str, WorkerLaunch]:
    """Start what the variants live in; `ending` closes it."""
    launches: dict[str, WorkerLaunch] = {}
    num_ranks = 0
    for name in dict.fromkeys(variant.launch for variant in plan.variants):
        members = [variant for variant in plan.variants if variant.launch == name]
        layouts = {(plan.num_ranks_of(m), m.num_threads) for m in members}
        if len(layouts) > 1:
            raise ConfigError(f"launch {name} cannot have several layouts: {sorted(layouts)}")
        ((ranks, threads),) = layouts
        launches[name] = WorkerLaunch(
            name,
            plan.module,
            num_ranks=ranks,
            num_threads=threads,
            bind=plan.rules.bind,
            variants=[variant.name for variant in members],
            environ={k: v for member in members for k, v in member.environ.items()},
        )
        ending.callback(launches[name].close)
        num_ranks += ranks
    log.notice(f"starting {len(launches)} launches, {num_ranks} ranks in all")
    return launches


def _run_case(
    plan: BenchPlan, case: Case, launches: Mapping[str, WorkerLaunch], meter: LoadMeter
) -> tuple[dict[str, Message], list[Block], dict[str, Message]]:
    variants = plan.variants_of(case)
    facts = _ask_all(variants, launches, {"do": "prepare", "case": case.name}, "facts")
    measured: list[Block] = []
    rules = plan.rules
    while more_are_needed(
        [block.background_load for block in measured],
        wanted=rules.blocks,
        retries=rules.retries,
        limit=rules.load_limit,
    ):
        measured.append(_run_block(plan, case, len(measured), launches, meter))
    return facts, measured, _ask_all(variants, launches, {"do": "finish"}, "outcome")


def _ask_all(
    variants: Sequence[Variant], launches: Mapping[str, WorkerLaunch], message: Message, key: str
) -> dict[str, Message]:
    """Query every variant in turn; all ranks of a variant must give the same answer."""
    answers: dict[str, Message] = {}
    for variant in variants:
        told = launches[variant.launch].ask(
            {**message, "variant": variant.name}, timeout_s=_PREPARE_S
        )
        if any(answer != told[0] for answer in told):
            raise ConfigError(f"{variant.name}: the ranks disagree after {message}: {told}")
        answers[variant.name] = told[0][key]
    return answers


def _run_block(
    plan: BenchPlan, case: Case, number: int, launches: Mapping[str, WorkerLaunch], meter: LoadMeter
) -> Block:
    by_name = {variant.name: variant for variant in plan.variants_of(case)}
    order = shuffled_order(list(by_name), seed=plan.rules.seed, case=case.name, block=number)
    seconds: dict[str, float] = {}
    counts: dict[str, dict[str, float]] = {}
    meter.restart()
    for name in order:
        message = {
            "do": "measure",
            "variant": name,
            "warmup": case.warmup,
            "repeats": case.repeats,
        }
        told = launches[by_name[name].launch].ask(message, timeout_s=_MEASURE_S)
        seconds[name] = max(answer["seconds"] for answer in told) / case.repeats
        counts[name] = {key: n / case.repeats for key, n in told[0]["counts"].items()}
    return Block(order=order, seconds=seconds, counts=counts, background_load=meter.load())


def describe_case(
    plan: BenchPlan,
    case: Case,
    measured: Sequence[Block],
    kept: Kept,
    facts: Mapping[str, Message],
    outcomes: Mapping[str, Message],
) -> tuple[list[dict[str, object]], list[dict[str, object]], list[dict[str, object]]]:
    """Series, ratios and blocks of a case, as they stand in a result. Pure."""
    good = [measured[index] for index in kept.indices]
    names = [variant.name for variant in plan.variants_of(case)]
    series: list[dict[str, object]] = []
    for variant in plan.variants_of(case):
        name = variant.name
        counts = [block.counts[name] for block in measured]
        if any(count != counts[0] for count in counts):
            raise ConfigError(f"{name}: counts a repeat differ between blocks: {counts}")
        series.append(
            {
                "case": case.name,
                "variant": name,
                "kind": variant.kind or name,
                "num_ranks": plan.num_ranks_of(variant),
                "num_threads": variant.num_threads,
                "seconds": [block.seconds[name] for block in good],
                "counts": {**facts[name], **counts[0]},
                "outcome": outcomes[name],
                "metrics": {},
            }
        )
    ratios: list[dict[str, object]] = []
    for mine, baseline in plan.comparisons:
        if mine in names and baseline in names:
            ratio = paired_ratio(
                [block.seconds[mine] for block in good],
                [block.seconds[baseline] for block in good],
            )
            pair = {"case": case.name, "variant": mine, "baseline": baseline}
            ratios.append({**pair, **asdict(ratio)})
    blocks: list[dict[str, object]] = [
        {
            "case": case.name,
            "order": list(block.order),
            "foreign_load": round(block.background_load, 4),
            "kept": index in kept.indices,
            "noisy": block.background_load > plan.rules.load_limit,
        }
        for index, block in enumerate(measured)
    ]
    return series, ratios, blocks
