"""What reports conclude: efficiency, what limits scaling, node-hours, and numbers on axes."""

from __future__ import annotations

from dataclasses import replace
from math import log10

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.bench.laws import serial_fraction
from hpctrain.errors import ConfigError
from hpctrain.log import format_bytes, format_hours
from hpctrain.report.advice import PlannedTraining, advise, describe_scaling, price
from hpctrain.report.charts import make_axis, number_text
from hpctrain.report.results import Estimate, Study, StudyPoint, understand
from mpi_tests.report_kit import failed_row, row, split, swept, weak_sweep


def about(value, noise=0.01):
    return Estimate(median=value, low=value * (1 - noise), high=value * (1 + noise))


def point(num_ranks, step_s, *, engine="mpi", batch=None, **more):
    return StudyPoint(
        engine=engine, num_ranks=num_ranks, step_s=about(step_s), global_batch=batch, **more
    )


def study(*points, mode="weak", base_s=1.0, **more):
    alone = point(1, base_s, engine="alone", batch=more.pop("batch", None))
    return Study(title="net", mode=mode, points=points, baselines=(alone,), **more)


def rules(made):
    return [finding.rule for finding in advise(made)]


def test_weak_and_strong_efficiency():
    weak = study(point(4, 1.25))
    assert weak.efficiency(weak.points[0]).median == pytest.approx(0.8)
    assert weak.speed_up(weak.points[0]).median == pytest.approx(3.2)
    strong = study(point(4, 0.5), mode="strong")
    assert strong.efficiency(strong.points[0]).median == pytest.approx(0.5)
    assert strong.speed_up(strong.points[0]).median == pytest.approx(2.0)
    assert strong.serial_fraction(strong.points[0]) == pytest.approx(1 / 3)
    assert serial_fraction(1 / (0.1 + 0.9 / 8), 8) == pytest.approx(0.1)


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(2, 64), st.integers(1, 100))
def test_with_batches_known_efficiency_is_samples_a_second_over_the_ideal(base, step, n, share):
    made = study(point(n, step, batch=n * share), base_s=base, batch=share)
    speed = n * share / step
    assert made.efficiency(made.points[0]).median == pytest.approx(speed / (n * share / base))


def test_intervals_hold_what_both_measurements_allow():
    made = study(point(2, 1.0))
    found = made.efficiency(made.points[0])
    assert found.low == pytest.approx(0.99 / 1.01)
    assert found.high == pytest.approx(1.01 / 0.99)


def test_without_a_baseline_the_fewest_ranks_are_the_base():
    made = Study(title="net", mode="weak", points=(point(8, 1.0), point(16, 1.25)))
    assert made.speed_up(made.points[1]).median == pytest.approx(1.6)
    assert "its 8 ranks" in describe_scaling(made)


def test_how_far_it_scales_in_words():
    made = study(point(2, 1.1), point(4, 1.2), point(8, 2.0))
    text = describe_scaling(made)
    assert "mpi: efficiency is 80 % or more up to 4 ranks and below beyond (50.0 % at 8)." in text
    assert "an efficiency of 50.0 %" in text
    kept = describe_scaling(study(point(2, 1.1), point(4, 1.2)))
    assert "80 % or more at every measured number of ranks, 2, 4." in kept
    assert "efficiency is below 80 % at 2 ranks" in describe_scaling(study(point(2, 3.0)))
    assert "no scaling" in describe_scaling(study(point(1, 1.0)))
    slower = describe_scaling(study(point(1, 1.0), point(2, 1.5), mode="strong"))
    assert "fastest point is mpi on 1 rank:" in slower
    assert "80 % or more up to 1 rank and below beyond (33.3 % at 2)." in slower
    assert "No point" in describe_scaling(study(StudyPoint(engine="mpi", num_ranks=2, failure="x")))


@pytest.mark.parametrize(
    ("part", "seconds", "rule"),
    [
        ("exchange", 0.3, "communication"),
        ("input", 0.1, "input"),
        ("straggling", 0.1, "straggling"),
        ("update", 0.5, "update"),
    ],
)
def test_each_part_that_costs_much_is_named_with_a_cure(part, seconds, rule):
    parts = {"forward": 0.3, "backward": 0.6, part: seconds}
    found = advise(study(point(8, 1.2, split_s=parts)))
    assert [finding.rule for finding in found] == [rule]
    share = seconds / (0.9 + seconds)
    assert f"{100 * share:.0f} %" in found[0].what
    assert found[0].weight == pytest.approx(share)
    assert found[0].attempt
    few = {"forward": 0.3, "backward": 0.6, part: 0.02}
    assert rules(study(point(8, 0.95, split_s=few), base_s=0.94)) == []


def test_what_costs_most_is_said_first_and_a_faster_engine_is_named():
    slow = {"forward": 0.3, "backward": 0.3, "exchange": 0.5, "input": 0.1}
    quick = {"forward": 0.3, "backward": 0.3}
    made = study(
        point(8, 1.2, engine="torch", split_s=slow), point(8, 0.6, split_s=quick), base_s=0.55
    )
    found = advise(made)
    assert [finding.rule for finding in found] == ["communication", "input"]
    assert "The mpi engine is faster here" in found[0].attempt


def test_computing_that_slows_down_with_ranks_on_a_node_is_contention():
    def made(nodes):
        return study(
            point(1, 1.0, split_s={"forward": 0.4, "backward": 0.6}),
            point(8, 1.5, split_s={"forward": 0.6, "backward": 0.9}, num_nodes=nodes),
        )

    assert rules(made(1)) == ["contention"]
    assert "1.50 times as long" in advise(made(1))[0].what
    assert rules(made(2)) == []


def test_strong_scaling_tells_growing_overhead_from_a_serial_part():
    def strong(fractions):
        points = [point(n, f + (1 - f) / n) for n, f in fractions]
        return study(*points, mode="strong")

    assert rules(strong([(2, 0.1), (4, 0.1), (8, 0.1)])) == ["serial part"]
    assert rules(strong([(2, 0.02), (4, 0.05), (8, 0.1)])) == ["growing overhead"]
    assert rules(strong([(2, 0.0), (4, 0.0)])) == []


def test_one_process_with_all_cores_that_is_faster_is_said():
    node = point(1, 1.0, engine="node", batch=64, num_threads=8)
    slower = study(point(8, 1.2, batch=64), mode="layout", whole_nodes=(node,))
    assert "does not pay." in advise(slower)[0].what
    noisy = study(point(8, 1.01, batch=64), mode="layout", whole_nodes=(node,))
    assert "does not clearly pay" in advise(noisy)[0].what
    assert rules(study(point(8, 0.8, batch=64), mode="layout", whole_nodes=(node,))) == []
    told = replace(point(8, 1.0), over_node=about(0.5))
    assert "2.00 times as fast" in advise(study(told, mode="layout", whole_nodes=(node,)))[0].what


def test_noise_failures_and_more_than_ideal_are_said():
    wide = replace(point(2, 1.0), step_s=Estimate(median=1.0, low=0.8, high=1.3))
    assert rules(study(wide)) == ["noise"]
    broken = StudyPoint(engine="mpi", num_ranks=4, failure="exit code 3")
    (found,) = advise(study(point(2, 1.0), broken))
    assert found.rule == "failed"
    assert "exit code 3" in found.what
    assert rules(study(point(2, 0.9))) == ["superlinear"]
    assert rules(study(point(1, 0.9))) == ["noise"]


def test_sweeps_are_read_as_they_are_written():
    (made,) = understand(weak_sweep(), "x").studies
    assert (made.title, made.mode, made.unit) == ("transformer", "weak", "step")
    assert made.engines == ("mpi", "torch", "horovod")
    assert made.baselines[0].engine == "alone"
    assert made.whole_nodes[0].global_batch == 1024
    last = made.of_engine("torch")[-1]
    assert sum(last.split_s.values()) == pytest.approx(last.step_s.median, rel=0.01)
    assert last.split_s["straggling"] == pytest.approx(0.0128)
    assert made.failed[0].failure.startswith("exit code 1")
    assert rules(made)[:2] == ["communication", "straggling"]


def test_points_without_anything_but_a_time_are_read():
    bare = row("mpi", 2, 0.1)
    for name in [n for n in bare if n.startswith(("samples", "step_s_"))]:
        del bare[name]
    bare["launch_s"] = bare.pop("step_s")
    raw = swept([row("alone", 1, 0.1, role="alone", **split(0.09, 0.0)), failed_row("x", 4, "no")])
    raw["scale"]["points"].append(bare)
    raw["scale"]["measured"] = "launches"
    (made,) = understand(raw, "x").studies
    assert made.unit == "launch"
    assert made.measured[0].samples_per_s is None
    assert made.measured[0].step_s.median == 0.1


def test_time_and_node_hours():
    made = study(
        point(4, 1.1, batch=256, num_nodes=1),
        point(8, 1.2, batch=512, num_nodes=2),
        point(16, 2.0, batch=1024, num_nodes=4),
        batch=64,
    )
    asks = price(made, PlannedTraining(num_samples=512 * 3000, reserve=0.5, runs=2))
    assert [ask.point.num_ranks for ask in asks] == [1, 4, 8, 16]
    chosen = next(ask for ask in asks if ask.is_proposed)
    assert chosen.point.num_ranks == 8  # the fastest within 1.25 times the fewest node-hours
    assert chosen.hours == pytest.approx(1.0)
    assert chosen.node_hours == pytest.approx(2 * 2 * 1.5)
    assert chosen.core_hours == pytest.approx(8 * 2 * 1.5)
    assert price(study(point(4, 1.0)), PlannedTraining(num_samples=1)) == []
    for wrong in (
        {"num_samples": 0},
        {"num_samples": 1, "reserve": -1},
        {"num_samples": 1, "runs": 0},
    ):
        with pytest.raises(ConfigError):
            PlannedTraining(**wrong)
    assert [format_hours(h) for h in (0.01, 0.5, 20, 240)] == ["36 s", "30 min", "20 h", "10 days"]


@given(st.lists(st.floats(-1e9, 1e9).filter(lambda v: v == 0 or abs(v) > 1e-9), min_size=1))
def test_linear_axes_show_all_values_and_write_few_distinct_numbers(values):
    axis = make_axis(values, "linear")
    places = [axis.place(value) for value in values]
    assert min(places) >= -1e-9
    assert max(places) <= 1 + 1e-9
    assert 2 <= len(axis.ticks) <= 9
    texts = [text for _, text in axis.ticks]
    assert len(set(texts)) == len(texts)


@given(st.lists(st.floats(1e-6, 1e9), min_size=1))
def test_logarithmic_axes_show_all_values(values):
    axis = make_axis(values, "log10")
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)
    assert all(float(log10(value)).is_integer() for value, _ in axis.ticks)


def test_numbers_are_written_as_people_do():
    assert [t for _, t in make_axis([1, 2, 4, 8, 3000], "log2").ticks] == [
        "1",
        "2",
        "4",
        "8",
        "3000",
    ]
    assert len(make_axis([2.0**k for k in range(20)], "log2").ticks) <= 7
    assert [t for _, t in make_axis([2**10, 2**20], "bytes").ticks] == ["1 KiB", "1 MiB"]
    assert [t for _, t in make_axis([0.98, 3.7], "log2").ticks] == ["1", "2", "4"]
    top = make_axis([0.5, 1.02], "linear", is_percent=True)
    assert top.ticks[-1][1] == "100 %"
    assert [number_text(v) for v in (0, 0.01234, 5.678, 123.4, 12345, 2.5e6)] == (
        ["0", "0.0123", "5.68", "123", "12.3 k", "2.5 M"]
    )
    assert [format_bytes(v) for v in (1, 1536, 3 << 30)] == ["1 B", "1.5 KiB", "3.0 GiB"]
