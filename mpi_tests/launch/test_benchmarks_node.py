"""The benchmarks of one node run, and what they find is right where it is no matter of time."""

from __future__ import annotations

import os
from itertools import product

import pytest

from mpi_tests.full import FULL, slow
from mpi_tests.launch.benchmark_results import PYTHON, result_of
from mpi_tests.launch.commands import run


@slow
def test_all_layouts_train_alike(tmp_path):
    result = result_of("layout", tmp_path / "result.json", "--cores", "2")
    series = {item["variant"]: item for item in result["series"]}
    ours = ["hpctrain-mpi-2x1", "hpctrain-mpi-one-copy-2x1"]
    others = ["one-process-kept-1x2", "ddp-2x1", "ddp-kept-2x1"]
    assert list(series) == ["one-process-1x2", others[0], *ours, *others[1:]]
    assert all(item["num_ranks"] * item["num_threads"] == 2 for item in series.values())
    # the same samples in whatever layout: the same loss
    losses = [item["outcome"]["loss"] for item in series.values()]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-4)
    compared = {(r["variant"], r["baseline"]) for r in result["ratios"]}
    assert compared == {
        *((name, "one-process-1x2") for name in list(series)[1:]),
        *product(ours, others),
    }


@slow
def test_gathering_is_compared_with_copies_of_the_output(tmp_path):
    result = result_of("gathering", tmp_path / "result.json", "--variants", "memcpy,mpi")
    assert {(item["case"], item["variant"]) for item in result["series"]} == {
        (case, variant)
        for case in ("allgather", "allgather_into", "reduce_scatter")
        for variant in ("memcpy", "mpi")
    }


@slow
def test_sharded_models_train_alike_however_they_are_gathered(tmp_path):
    result = result_of("sharded_step", tmp_path / "result.json")
    series = {item["variant"]: item for item in result["series"]}
    trained = [name for name in series if not name.startswith("compute")]
    losses = [series[name]["outcome"]["loss"] for name in trained]
    assert len(losses) == 7
    assert losses == pytest.approx([losses[0]] * 7, rel=1e-4)
    # units are two layers and the root, which stays from forward to backward
    assert [series[k]["counts"]["messages"] for k in ("gradients", "parameters")] == [6, 8]


@slow
def test_divided_layers_train_alike_over_either_backend(tmp_path):
    result = result_of("tensor_step", tmp_path / "result.json")
    series = {item["variant"]: item for item in result["series"]}
    names = ("compute", "hpctrain", "hpctrain-split", "gloo")
    losses = [series[name]["outcome"]["loss"] for name in names]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)


@slow
def test_barriers_are_compared_below_and_above_the_number_of_cores(tmp_path):
    many = max(3, len(os.sched_getaffinity(0)) + 1)
    result = result_of("barrier", tmp_path / "result.json", "--ranks", f"2,{many}")
    found = {(item["case"], item["kind"], item["num_ranks"]) for item in result["series"]}
    waiting = ("mpi", "spinning", "sleeping")
    cases = {"nothing to do": waiting, "one rank works": ("nobody-waits", *waiting)}
    cases["all ranks work"] = cases["one rank works"]
    assert found == {(c, k, n) for c, kinds in cases.items() for k in kinds for n in (2, many)}
    assert all(
        item["metrics"]["us a barrier"] > 0
        for item in result["series"]
        if item["case"] == "nothing to do"
    )


def test_a_node_holds_the_state_of_a_divided_update_once(tmp_path):
    formulas = {"hpctrain-mpi-sharded": 3 * 32} | ({"compute": 4 * 32} if FULL else {})
    words = ["--ranks", "2", "--variants", ",".join(formulas)]
    result = result_of("memory", tmp_path / "result.json", *words)
    series = {item["kind"]: item for item in result["series"]}
    model = 2 * 2048 * 2048 * 4
    assert all(item["outcome"]["model_bytes"] == model for item in series.values())
    found = {name: item["metrics"]["update by formula"] for name, item in series.items()}
    assert found == formulas
    for item in series.values():
        # allocators round up: 16 MiB become 18
        assert item["metrics"]["all / formula"] == pytest.approx(1.05, abs=0.15), item


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layout", "--cores", "16", "--ranks", "3"], "3 ranks do not divide"),
        (["layout", "--variants", "horovod"], "variant 'horovod' is unknown; choose from one-"),
        (["barrier", "--ranks", "none"], "ranks 'none' must be whole numbers of at least 1"),
    ],
)
def test_mistakes_are_named(words, message):
    done = run(*PYTHON, f"benchmarks.{words[0]}", *words[1:])
    assert done.code == 2, done.text
    assert message in done.err


@pytest.mark.skipif(not FULL, reason="takes too long for every day")
def test_checkpoint_measures_what_saving_costs(tmp_path):
    result = result_of("checkpoint", tmp_path / "result.json")
    found = {(ratio["variant"], ratio["baseline"]) for ratio in result["ratios"]}
    assert {("save", "memcpy"), ("steps-saving", "steps"), ("save-and-wait", "disk")} <= found
    blocked = [item for item in result["series"] if item["case"] == "blocked"]
    assert all(item["metrics"]["state MiB"] == 256 for item in blocked)
