"""Sweeps: which points they have, what becomes of them on disk, and what a result says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.bench.local import explain_mismatch, explain_other_device
from hpctrain.bench.outcome import make_result
from hpctrain.bench.results import validate
from hpctrain.bench.summary import describe_laws, point_rows, repeat_command, split_rows
from hpctrain.bench.sweep import (
    Folder,
    Measured,
    Sweep,
    SweepSettings,
    fill_arguments,
    interleave,
    layout_points,
    plan_points,
)
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.sweep_request import Bench, SweepRequest, parse_request
from hpctrain.train.building import build_models, build_optimizer
from hpctrain.train.config import parse_config
from hpctrain.world.world import ScriptDefaults

MACHINE = {
    **dict.fromkeys(("id", "cpu", "arch", "system", "python", "mpi", "torch", "mpi4py"), "x"),
    **{"cores": 4, "memory_gib": 8.0, "horovod": None, "commit": None, "modified": False},
}
CONFIG = """
[model]
build = "torch.nn:Linear"
args = { in_features = 10, out_features = 5 }
[data]
build = "numpy:zeros"
[train]
global_batch = 96
epochs = 1
loss = "mse_loss"
[optimizer]
lr = 0.1
weight_decay = 0.1
exclude_norms = true
"""
SPLIT = {"input": 0.1, "forward": 0.3, "backward": 0.4, "exchange": 0.1, "update": 0.1}


def make_sweep(mode="weak", vary=(), arguments=(), **settings):
    points = plan_points(mode=mode, ranks=[1, 2, 4], engines=["mpi"], num_cores=8, vary=vary)
    return Sweep(
        target="train.py",
        is_module=False,
        arguments=tuple(arguments),
        settings=SweepSettings(mode=mode, **settings),
        points=tuple(points),
    )


def measure(sweep, step_s, *, samples=True, reads=("batch", "fused", "precision")):
    """Launches whose steps take as long as `step_s(point)` says, a little more each repeat."""
    found = {}
    for name, repeat in sweep.order():
        point = sweep.point(name)
        seconds = step_s(point) * (1 + 0.001 * repeat)
        report = {
            "num_ranks": point.num_ranks,
            "step_s": [seconds] * 5,
            "split_s": {phase: part * seconds for phase, part in SPLIT.items()},
            "sees_forward": True,
            "straggling_s": 0.01,
            "samples_per_step": 32.0 * point.factor if samples else None,
            "memory_bytes": [1 << 20] * point.num_ranks,
            "engine": point.engine,
            "device": "cpu",
            "mpi": "MPI",
            "reads": list(reads),
            "global_batch": 32 * point.factor if "batch" in reads else None,
            "counts": {"messages": 1.0, "hooks": 0.0, "bytes": 4096},
            "num_parameters": 2_000_000,
            "optimizer": "AdamW",
            "is_fused": True,
            "replica": [],
        }
        found[name, repeat] = Measured(
            point=name, repeat=repeat, wall_s=9.0, foreign_load=0.01, report=report
        )
    return found


def result_of(sweep, measured):
    result = make_result(
        sweep, measured, machine=MACHINE, date="2026-11-15", command="hpctrain bench"
    )
    assert validate(result) == []
    return result


def rows_of(result):
    return {row["name"]: row for row in result["scale"]["points"]}


@given(
    ranks=st.lists(st.integers(1, 64), min_size=1, max_size=5),
    cores=st.integers(1, 64),
    mode=st.sampled_from(["weak", "strong"]),
)
def test_every_point_once_with_baselines_and_shares(ranks, cores, mode):
    points = plan_points(mode=mode, ranks=ranks, engines=["auto", "torch"], num_cores=cores)
    assert len({point.name for point in points}) == len(points)
    alone = points[0]
    assert (alone.role, alone.engine, alone.num_ranks, alone.factor) == ("alone", "local", 1, 1)
    for point in points:
        if point.role == "ranks":
            assert point.num_threads == alone.num_threads
            assert point.factor == (point.num_ranks if mode == "weak" else 1)
    node = [point for point in points if point.role == "node"]
    assert len(node) == (cores > alone.num_threads)
    assert all(point.num_threads == cores for point in node)


@given(cores=st.integers(1, 64))
def test_layouts_use_all_cores(cores):
    found = layout_points(cores, values={})
    assert all(point.num_ranks * point.num_threads == cores for point in found)
    assert [point.role for point in found].count("node") == 1


@given(names=st.lists(st.text(min_size=1), unique=True, max_size=6), repeats=st.integers(1, 5))
def test_launches_are_interleaved_and_the_same_whenever_asked(names, repeats):
    order = interleave(names, repeats=repeats, seed=3)
    assert order == interleave(names, repeats=repeats, seed=3)
    for repeat in range(repeats):
        block = order[repeat * len(names) : (repeat + 1) * len(names)]
        assert sorted(name for name, r in block if r == repeat) == sorted(names)


@pytest.mark.parametrize("axis", ["precision", "a=1,,2", "batch=1,2", "no key=1"])
def test_an_axis_that_is_not_understood_is_refused(axis):
    with pytest.raises(ConfigError, match="is not valid"):
        plan_points(mode="weak", ranks=[2], engines=["auto"], num_cores=2, vary=[axis])


def test_weak_scaling_counts_efficiency_by_samples_of_an_undistributed_process():
    sweep = make_sweep(repeats=6)
    result = result_of(sweep, measure(sweep, lambda p: 0.1 if p.role != "ranks" else 0.125))
    rows = rows_of(result)
    assert rows["alone 1x2"]["efficiency"] == pytest.approx(1)
    assert rows["mpi 4x2"]["efficiency"] == pytest.approx(0.8)
    assert rows["mpi 4x2"]["speedup"] == pytest.approx(3.2)
    assert rows["mpi 4x2"]["over_node"] == pytest.approx(0.8)  # one process is as good
    assert rows["mpi 4x2"]["samples_per_s"] == pytest.approx(32 * 4 / 0.125, rel=0.01)
    assert rows["mpi 4x2"]["speedup_per_sequential_s"] == pytest.approx(32, rel=0.01)
    assert rows["mpi 4x2"]["speedup_per_million_parameters"] == pytest.approx(1.6)
    assert rows["mpi 4x2"]["split_s"]["exchange"] == pytest.approx(0.0125, rel=0.01)
    assert result["scale"]["notes"] == []


def test_strong_scaling_finds_amdahl_and_where_efficiency_falls():
    sweep = make_sweep(mode="strong", repeats=3)
    serial = 0.1
    times = measure(sweep, lambda p: 1.0 * (serial + (1 - serial) / p.num_ranks))
    law = result_of(sweep, times)["scale"]["laws"][0]
    assert (law["kind"], law["best"], law["is_clear"]) == ("mpi", "Amdahl", True)
    assert law["falls_below"] == pytest.approx(3.5, rel=0.02)
    assert [each["num_ranks"] for each in law["karp_flatt"]] == [2, 4]
    reach, said, _ = describe_laws(result_of(sweep, times))
    assert reach == "mpi: efficiency is 80 % or more up to 2 ranks and below beyond (76.9 % at 4)."
    assert said.startswith(
        "mpi: Amdahl's law describes the data best, with a serial fraction of 0.1"
    )


def test_the_command_that_repeats_a_sweep_makes_the_same_one():
    sweep = make_sweep(mode="strong", vary=["p=a,b"], arguments=["--x", "1 2"], batch=8, retries=3)
    said = repeat_command(sweep, directory=Path("here"), output=Path("out.json"))
    assert said == (
        "hpctrain bench scale --ranks 1,2,4 --mode strong --engines mpi --threads 2 --vary p=a,b "
        "--repeats 3 --steps 20 --batch 8 --retries 3 --dir here --json out.json "
        "train.py --x '1 2'"
    )
    own = ("/a/run.toml", "--set", "a=1", "--set", "train.global_batch={batch}")
    found = replace(sweep, kind="layout", label="run.toml", arguments=own, is_module=True)
    found = replace(found, points=tuple(layout_points(4, values={})))
    said = repeat_command(found, directory=Path("d"), output=None)
    assert said == (
        "hpctrain bench layout --ranks 2,4 --cores 4 --repeats 3 --steps 20 --batch 8 --retries 3 "
        "--dir d run.toml --set a=1"
    )


def test_too_few_points_are_not_fitted_and_one_repeat_shows_no_trend():
    sweep = make_sweep(mode="strong", repeats=3)
    two = replace(sweep, points=tuple(p for p in sweep.points if p.num_ranks < 4))
    result = result_of(two, measure(two, lambda p: 1.0 / p.num_ranks))
    (law,) = result["scale"]["laws"]
    assert (law["best"], law["fits"], law["falls_below"]) == (None, [], None)
    _, said = describe_laws(result)
    assert said.startswith("mpi: too few points to fit a scaling law; measure at least two")
    once = make_sweep(mode="strong", repeats=1)
    result = result_of(once, measure(once, lambda p: 0.1 * p.num_ranks + 0.9 / p.num_ranks))
    _, first, second = describe_laws(result)
    assert "too few points" in first
    assert second.endswith("measured once, so a trend cannot be distinguished from noise.")


def test_a_failed_point_is_a_row_that_says_why_and_the_others_stay():
    sweep = make_sweep(repeats=2)
    measured = measure(sweep, lambda p: 0.1)
    broken = Measured(point="mpi 2x2", repeat=1, wall_s=3.0, why="exit code 5: no memory")
    measured["mpi 2x2", 1] = broken
    del measured["mpi 1x2", 0]
    result = result_of(sweep, measured)
    rows = rows_of(result)
    assert rows["mpi 2x2"]["why"] == "exit code 5: no memory"
    assert rows["mpi 1x2"]["why"] == "1 of 2 launches are missing"
    assert rows["mpi 4x2"]["state"] == "ok"
    assert {item["variant"] for item in result["series"]} == {"alone 1x2", "node 1x8", "mpi 4x2"}
    shown = point_rows(result)[1]
    assert ["mpi 2x2", "failed: exit code 5: no memory"] in [row[:2] for row in shown]
    assert len(split_rows(result)[1]) == 3


def test_what_the_script_does_not_read_is_said():
    sweep = make_sweep(repeats=2)
    result = result_of(sweep, measure(sweep, lambda p: 0.1, samples=False, reads=()))
    notes = " ".join(result["scale"]["notes"])
    assert "does not read world.bench.global_batch" in notes
    assert "passes no num_samples" in notes
    assert rows_of(result)["mpi 4x2"]["efficiency"] == pytest.approx(1)  # each rank did its own


def test_a_fused_optimizer_is_advised_where_it_can_be_had():
    sweep = make_sweep(repeats=2)
    measured = measure(sweep, lambda p: 0.1)
    for launch in measured.values():
        launch.report["is_fused"] = False
    (note,) = result_of(sweep, measured)["scale"]["notes"]
    assert "fused=world.bench.value('fused', False)" in note
    configured = replace(sweep, label="train.toml")
    (note,) = result_of(configured, measured)["scale"]["notes"]
    assert "has none for this device" in note
    assert "world.bench" not in note
    for (name, _), launch in measured.items():
        launch.report["is_fused"] = sweep.point(name).role == "node"
    (note,) = result_of(configured, measured)["scale"]["notes"]
    assert "other points do not; optimizer.args.fused = true gives it to all" in note


@pytest.mark.parametrize(
    ("settings", "is_fused"),
    [
        (["optimizer.name=AdamW"], True),
        (["optimizer.name=SGD"], True),
        (["optimizer.name=AdamW", "optimizer.args.fused=false"], False),  # said so
        (["optimizer.name=RMSprop"], False),  # has none
        (["optimizer.name=AdamW", "optimizer.args.foreach=true"], False),  # torch refuses
    ],
)
def test_a_configuration_has_a_fused_optimizer_where_a_sweep_asks_for_it(settings, is_fused):
    config = parse_config(CONFIG, settings)
    model = build_models(config)["model"]
    made = build_optimizer(config, model, prefers_fused=True)
    assert [bool(group.get("fused")) for group in made.param_groups] == (
        [is_fused] * len(made.param_groups)
    )
    assert not any(g.get("fused") for g in build_optimizer(config, model).param_groups)


def test_a_script_without_replica_is_measured_by_its_launches():
    sweep = make_sweep(repeats=2)
    measured = {
        key: Measured(point=key[0], repeat=key[1], wall_s=4.0 + sweep.point(key[0]).num_ranks)
        for key in sweep.order()
    }
    result = result_of(sweep, measured)
    assert result["scale"]["measured"] == "launches"
    assert "whole launches were timed" in result["scale"]["notes"][0]
    rows = rows_of(result)
    assert rows["mpi 4x2"]["efficiency"] == pytest.approx(5 / 8)
    # One process has no more work than another, unless the sweep hands it the batch.
    assert rows["node 1x8"]["speedup"] == pytest.approx(1)
    handed = make_sweep(repeats=2, batch=16, arguments=["--batch-size", "{batch}"])
    rows = rows_of(result_of(handed, measured))
    assert rows["node 1x8"]["speedup"] == pytest.approx(4)
    without_samples = measure(handed, lambda p: 0.1, samples=False, reads=())
    rows = rows_of(result_of(handed, without_samples))
    assert rows["node 1x8"]["speedup"] == rows["mpi 4x2"]["speedup"] == pytest.approx(4)


def test_settings_that_vary_are_compared_with_the_first_of_their_axis():
    sweep = make_sweep(vary=["precision=fp32,bf16"], repeats=2)
    half = measure(sweep, lambda p: 0.05 if p.values["precision"] == "bf16" else 0.1)
    result = result_of(sweep, half)
    pairs = {(r["variant"], r["baseline"]): r["median"] for r in result["ratios"]}
    assert pairs["mpi 4x2 precision=bf16", "mpi 4x2 precision=fp32"] == pytest.approx(0.5)
    assert pairs["mpi 4x2 precision=bf16", "alone 1x2 precision=bf16"] == pytest.approx(1)
    told = [line for line in describe_laws(result) if line.startswith("mpi 4x2 precision=bf16")]
    assert "precision=bf16 is 2.00 [2.00, 2.00] times as fast as precision=fp32" in told[0]


def test_values_that_nobody_reads_and_engines_that_were_not_used_are_found():
    sweep = make_sweep(vary=["precision=fp32,bf16"])
    point = sweep.points[2]
    report = {"reads": ["batch"], "engine": "mpi", "step_s": [0.1]}
    assert "does not read precision" in explain_mismatch(sweep, point, report)
    report["reads"].append("precision")
    assert explain_mismatch(sweep, point, report) == ""
    assert "chooses engine torch itself" in explain_mismatch(
        sweep, point, {**report, "engine": "torch"}
    )
    assert "within the warm-up" in explain_mismatch(sweep, point, {**report, "step_s": []})
    words = make_sweep(vary=["precision=fp32,bf16"], arguments=["--p", "{precision}"])
    assert explain_mismatch(words, words.points[2], None) == ""


def test_arguments_are_filled_and_other_braces_left_alone():
    sweep = make_sweep(arguments=["--n={ranks}", "--b", "{batch}", '{"a": {b}}'], batch=8)
    point = sweep.point("mpi 4x2")
    assert fill_arguments(sweep, point)[0] == ("--n=4", "--b", "32", '{"a": {b}}')
    with pytest.raises(ConfigError, match="give --batch"):
        fill_arguments(make_sweep(arguments=["{batch}"]), point)


def test_a_sweep_goes_on_where_it_was_and_tries_again_what_failed(tmp_path):
    sweep, folder = make_sweep(repeats=2), Folder(tmp_path / "s")
    folder.begin(sweep)
    assert folder.open() == sweep
    first, second, *_ = order = folder.pending(sweep)
    assert order == sweep.order()
    folder.write(folder.key(sweep, *first), Measured(point=first[0], repeat=first[1], wall_s=1.0))
    broken = Measured(point=second[0], repeat=second[1], wall_s=1.0, why="no")
    folder.write(folder.key(sweep, *second), broken)
    assert folder.pending(sweep) == order[1:]
    assert folder.measured(sweep)[second] == broken
    folder.begin(sweep)
    with pytest.raises(ConfigError, match="another sweep: repeats: 2 there, 3 here; choose"):
        folder.begin(make_sweep(repeats=3))
    fewer = replace(sweep, arguments=("-x y",), points=sweep.points[:2])
    with pytest.raises(ConfigError, match="arguments: none there, '-x y' here; it has the points"):
        folder.begin(fewer)
    with pytest.raises(ConfigError, match="has no sweep"):
        Folder(tmp_path).open()


def test_a_script_asks_its_sweep_and_outside_one_gets_its_own():
    asked = SweepRequest(
        report="r", batch=None, factor=4, values={"fused": "on", "lr": "0.1", "n": "x"}
    )
    assert parse_request(asked.text()) == asked
    bench = Bench(asked)
    assert bench.global_batch(32) == 128
    assert bench.value("fused", False) is True
    assert bench.value("lr", 1.0) == 0.1
    assert bench.value("other", "a") == "a"
    assert bench.reads == {"batch", "fused", "lr", "other"}
    with pytest.raises(ConfigError, match="not of the type int"):
        bench.value("n", 3)
    with pytest.raises(ConfigError, match="not of the type bool"):
        bench.value("lr", True)
    outside = ScriptDefaults()
    assert (outside.global_batch(32), outside.value("fused", False)) == (32, False)
    assert not outside.is_active
    with pytest.raises(LaunchError, match="unset it"):
        parse_request('{"nosuch": 1}')


def test_launches_on_another_device_are_not_mixed():
    def launch(device, why=""):
        report = None if device is None else {"device": device}
        return Measured(point="alone 1x1", repeat=0, wall_s=1.0, why=why, report=report)

    before = [launch(None), launch("CPU", why="failed"), launch("cuda:0 NVIDIA H200")]
    assert explain_other_device(launch("cuda:3 NVIDIA H200"), before) == ""
    assert explain_other_device(launch(None), before) == ""
    words = explain_other_device(launch("CPU"), before)
    assert words.startswith("it computed on CPU, and alone 1x1 on cuda NVIDIA H200;")
