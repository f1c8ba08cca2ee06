"""The benchmarks run, and what they count is exact."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import psutil
import pytest

from hpctrain.bench.command import RESULTS
from hpctrain.bench.comparing import compare_counts
from hpctrain.bench.control import WorkerLaunch
from hpctrain.bench.results import validate
from hpctrain.errors import LaunchError
from mpi_tests.built import BUILT
from mpi_tests.full import FULL, slow
from mpi_tests.launch.benchmark_results import LIMIT_S, PYTHON, result_of
from mpi_tests.launch.commands import ROOT, clean_environment, run


def test_step_overhead_runs_its_variants_and_counts_exactly(tmp_path):
    """Each variant has a launch of its own; every day one of each sort, and all with FULL."""
    fusion = {"hpctrain-horovod-fusion"} if "horovod" in BUILT else set()
    engines, peers, plain = {"hpctrain-mpi"}, {"ddp"}, {"compute", "compute-beside-idle"}
    if FULL:
        engines = {f"hpctrain-{name}" for name in BUILT} | {"hpctrain-mpi-replicated"}
        peers = {"ddp", "ddp-zero"} | ({"horovod"} if "horovod" in BUILT else set())
        plain |= {"compute-again"}
    chosen = [] if FULL else ["--variants", ",".join(engines | fusion | peers | plain)]
    result = result_of("step_overhead", tmp_path / "result.json", *chosen)
    series = {item["variant"]: item for item in result["series"]}
    assert set(series) == engines | fusion | peers | plain
    assert len(result["blocks"]) == 2
    assert all(sorted(block["order"]) == sorted(series) for block in result["blocks"])
    for name in engines:
        counts = series[name]["counts"]
        # one dtype, no overlap on one node: one message with all gradients, no Python in backward
        assert counts["messages"] == 1, name
        assert counts["hooks"] == 0, name
        gradients = 20 * (256 * 256 + 256) * 4
        assert gradients <= counts["bytes"] <= gradients + 1024, name
    for name in fusion:  # each of the 40 parameters travels on its own until Horovod fuses it
        assert series[name]["counts"]["messages"] >= 40
    assert all(series[name]["counts"] == {} for name in plain | peers)
    # and what is committed is what a step costs: no more messages, hooks or bytes than that
    compared = compare_counts(json.loads((RESULTS / "counts.json").read_text()), result)
    assert {row.variant for row in compared if row.verdict == "same"} == engines | fusion
    assert {row for row in compared if row.verdict in ("more", "less")} == set()
    # all of them did train together: equal weights on the ranks, and the same loss everywhere
    losses = [series[name]["outcome"]["loss"] for name in engines | fusion | peers]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    compared = {(r["variant"], r["baseline"]) for r in result["ratios"]}
    assert ("hpctrain-mpi", "ddp") in compared
    assert {variant for variant, baseline in compared if baseline == "compute"} == set(series) - {
        "compute"
    }


@slow
def test_collectives_run_on_the_engines(tmp_path):
    variants = ["memcpy", "mpi-allocated", *(BUILT if FULL else ["mpi"])]
    words = ["--sizes", "1 KiB,1 MiB", "--variants", ",".join(variants)]
    result = result_of("collectives", tmp_path / "result.json", *words)
    found = {(item["case"], item["variant"]) for item in result["series"]}
    assert found == {(s, v) for s in ("1 KiB", "1 MiB") for v in variants}
    for item in result["series"]:
        if item["variant"] != "memcpy":
            metrics = item["metrics"]
            assert metrics["busbw GB/s"] == pytest.approx(metrics["algbw GB/s"])  # two ranks
            assert metrics["% of memcpy"] > 0


@slow
def test_precision_trains_alike_with_and_without_hpctrain(tmp_path):
    words = [
        "--device",
        "cpu",
        "--variants",
        "amp-fp32,amp-bf16,amp-fp16,hpctrain-bf16,hpctrain-fp16",
    ]
    result = result_of("precision", tmp_path / "result.json", *words)
    losses = {(item["case"], item["variant"]): item["outcome"]["loss"] for item in result["series"]}
    for case in ("transformer", "resnet"):
        for precision in ("bf16", "fp16"):
            mine, raw = (losses[case, f"{way}-{precision}"] for way in ("hpctrain", "amp"))
            assert mine == pytest.approx(raw, rel=1e-3)
    compared = {(ratio["variant"], ratio["baseline"]) for ratio in result["ratios"]}
    assert {("hpctrain-fp16", "amp-fp16"), ("hpctrain-bf16", "amp-bf16")} <= compared


@slow
def test_loaders_are_measured_and_hand_out_what_they_should(tmp_path):
    result_of_part = tmp_path / "result_loader.json"
    variants = "dataloader,loader,loader-keyed"
    words = ["--parts", "loader", "--variants", variants, "--json", tmp_path / "result.json"]
    done = run(*PYTHON, "benchmarks.data", "--quick", *words, timeout_s=LIMIT_S)
    assert done.code == 0, done.text
    result = json.loads(result_of_part.read_text())
    assert validate(result) == []
    found = {(s["case"].split()[0], s["variant"]): s["outcome"] for s in result["series"]}
    for width, num in (("64", 50_001), ("3072", 8_001)):
        exact = {"handed out": num, "different": num}
        assert found[width, "loader"] == found[width, "loader-keyed"] == exact
        # two ranks, an odd number: torch's sampler fills up with one sample that came already
        assert found[width, "dataloader"] == {"handed out": num + 1, "different": num}


@slow
def test_movement_is_a_part_of_the_data_benchmark(tmp_path):
    """Times mean nothing here; what was moved, and what memory it took, does."""
    variants = "memcpy,mpi-send,scatter,share"
    words = ["--parts", "movement", "--variants", variants, "--json", tmp_path / "result.json"]
    done = run(*PYTHON, "benchmarks.data", "--quick", *words, timeout_s=LIMIT_S)
    assert done.code == 0, done.text
    result = json.loads((tmp_path / "result_movement.json").read_text())
    assert validate(result) == []
    found = {item["variant"]: item["metrics"] for item in result["series"]}
    assert list(found) == variants.split(",")
    assert all(metrics["moved GB/s"] > 0 for metrics in found.values())
    assert {(r["variant"], r["baseline"]) for r in result["ratios"]} >= {("scatter", "mpi-send")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "nobody"], "variant 'nobody' is unknown; choose from compute"),
        (["--workloads", "huge"], "workload 'huge' is unknown"),
        (["--blocks", "0", "--variants", "compute"], "blocks=0 must be at least 1"),
        (["--quick", "--save"], "--quick results are not worth saving"),
    ],
)
def test_mistakes_are_named(words, message):
    done = run(*PYTHON, "benchmarks.step_overhead", *words)
    assert done.code == 2, done.text
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_killed_benchmark_leaves_no_stopped_ranks_behind():
    words = ["benchmarks.step_overhead", "--variants", "compute,compute-beside-idle"]
    with subprocess.Popen(
        [*PYTHON, *words, "--blocks", "100000"],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        top = psutil.Process(process.pid)
        try:
            family = wait_for_a_stopped_rank(top)
        finally:
            process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []


def wait_for_a_stopped_rank(top: psutil.Process) -> list[psutil.Process]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        family = top.children(recursive=True)
        if any(status_of(process) == psutil.STATUS_STOPPED for process in family):
            return family
        time.sleep(0.1)
    raise AssertionError("no rank was ever stopped")


def status_of(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return ""


def test_a_launch_that_waits_uses_no_cpu_and_works_afterwards():
    variant = "horovod" if "horovod" in BUILT else "ddp"
    launch = WorkerLaunch(
        variant,
        "benchmarks.step_overhead",
        num_ranks=2,
        variants=[variant],
        environ={},
    )
    try:
        ranks = [psutil.Process(hello["pid"]) for hello in launch.wait_until_started(LIMIT_S)]
        deadline = time.monotonic() + LIMIT_S
        while any(rank.status() != psutil.STATUS_STOPPED for rank in ranks):
            assert time.monotonic() < deadline, [rank.status() for rank in ranks]
            time.sleep(0.01)
        before = [rank.cpu_times()[:2] for rank in ranks]
        time.sleep(1.0)  # a span of time to be idle in, not a wait for something
        assert [rank.cpu_times()[:2] for rank in ranks] == before
        ask = {"variant": variant, "case": "256-sgd", "warmup": 1, "repeats": 2}
        launch.ask({**ask, "do": "prepare"}, timeout_s=LIMIT_S)
        answers = launch.ask({**ask, "do": "measure"}, timeout_s=LIMIT_S)
        assert all(answer["seconds"] > 0 for answer in answers)
        first, second = launch.ask({**ask, "do": "finish"}, timeout_s=LIMIT_S)
        assert first == second
    finally:
        launch.close()
    assert not any(rank.is_running() for rank in ranks)


def test_a_rank_that_fails_is_told_with_its_traceback():
    launch = WorkerLaunch(
        "broken",
        "benchmarks.step_overhead",
        num_ranks=2,
        variants=["compute"],
        environ={},
    )
    try:
        launch.wait_until_started(LIMIT_S)
        with pytest.raises(LaunchError, match="KeyError: 'huge'"):
            launch.ask({"do": "prepare", "variant": "compute", "case": "huge"}, timeout_s=LIMIT_S)
    finally:
        launch.close()


@slow
def test_large_batches_are_trained_by_every_recipe(tmp_path):
    result = result_of("large_batch", tmp_path / "result.json", "--variants", "sgd 32,lars 1024")
    small, large = result["series"]
    assert (small["variant"], large["variant"]) == ("sgd 32", "lars 1024")
    assert small["counts"]["steps"] == 1437 * 2 // 32
    assert large["counts"]["steps"] == 1437 * 2 // 1024
    assert len(small["outcome"]["accuracies"]) == len(result["blocks"]) == 2
    assert small["outcome"]["accuracies"][0] != small["outcome"]["accuracies"][1]  # seeds differ
    assert small["metrics"]["test accuracy %"] > 50  # two epochs have taught something
    assert small["metrics"]["points from sgd 32"] == 0


def test_what_was_measured_before_a_run_is_cut_off_is_kept(tmp_path):
    path = tmp_path / "result.json"
    words = ["--variants", "compute", "--workloads", "256-sgd,512-adamw", "--json", str(path)]
    command = [*PYTHON, "benchmarks.step_overhead", "--quick", *words]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        until = time.monotonic() + LIMIT_S
        while not path.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.terminate()
        process.wait(timeout=60)
    result = json.loads(path.read_text())
    assert validate(result) == []
    assert result["settings"].get("unfinished") is True
    assert {item["case"] for item in result["series"]} == {"256-sgd"}
