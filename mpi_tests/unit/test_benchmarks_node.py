"""The benchmarks of one node, as far as they are arithmetic and text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import barrier, layout, memory, step_overhead
from benchmarks.memory_parts import data_kib
from hpctrain.bench import command, results
from hpctrain.bench.session import BenchPlan, Case, Rules, Variant
from hpctrain.errors import ConfigError

# Layouts


@given(st.integers(1, 128))
def test_every_layout_uses_all_cores(num_cores):
    ranks = layout.divisors(num_cores)[1:]
    variants = layout.make_variants(layout.KINDS, ranks, num_cores=num_cores)
    assert all(v.num_ranks * v.num_threads == num_cores for v in variants)
    assert len({v.launch for v in variants}) == len(variants), "each has processes of its own"
    alone = (layout.BASELINE, layout.KEPT)
    assert [(v.kind, v.num_ranks) for v in variants[:2]] == [(kind, 1) for kind in alone]
    for kind in layout.KINDS[2:]:
        assert [v.num_ranks for v in variants if v.kind == kind] == ranks


def test_peers_have_their_memory_as_torch_has_it_unless_they_are_said_to_keep_it():
    variants = layout.make_variants((*layout.KINDS, "ddp-zero"), [2], num_cores=2)
    kept = {v.kind for v in variants if v.environ["HPCTRAIN_KEEP_MEMORY"] == "1"}
    assert kept == {*layout.OURS, "one-process-kept", "ddp-kept"}


def test_ranks_that_do_not_divide_the_cores_are_refused():
    with pytest.raises(ConfigError, match="3 ranks do not divide 16 cores; choose 2, 4, 8, 16"):
        layout.make_variants(layout.KINDS, [2, 3], num_cores=16)


def test_the_batches_are_those_of_the_workloads():
    from benchmarks.workloads import NODE_WORKLOADS

    assert {name: w.batch for name, w in NODE_WORKLOADS.items()} == layout.BATCHES
    assert all(w.whole_batch and w.options["fused"] for w in NODE_WORKLOADS.values())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_divide_one_batch(num_ranks):
    import torch

    from benchmarks.workloads import NODE_WORKLOADS

    for workload in NODE_WORKLOADS.values():
        parts = [workload.data(rank, num_ranks) for rank in range(num_ranks)]
        whole = workload.data(0, 1)
        assert len(whole[0]) == workload.batch
        for mine, all_of_it in zip(zip(*parts, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(mine), all_of_it)


def item(kind: str, num_ranks: int, seconds: list[float]) -> dict[str, object]:
    return {
        "case": "mlp",
        "variant": f"{kind}-{num_ranks}x{4 // num_ranks}",
        "kind": kind,
        "num_ranks": num_ranks,
        "num_threads": 4 // num_ranks,
        "seconds": seconds,
    }


def make_result() -> dict[str, object]:
    return {
        "settings": {"best_of_kind": True},
        "series": [
            item("one-process", 1, [0.010, 0.010, 0.010]),
            item("hpctrain-mpi", 2, [0.009, 0.008, 0.010]),
            item("hpctrain-mpi", 4, [0.001, 0.012, 0.012]),
            item("ddp", 2, [0.018, 0.020, 0.016]),
            item("ddp", 4, [0.030, 0.030, 0.030]),
        ],
        "ratios": [],
    }


def test_best_layouts_meet_each_other_block_by_block():
    (ratio,) = layout.best_pairs(make_result())
    assert (ratio["variant"], ratio["baseline"]) == ("hpctrain-mpi-2x2", "ddp-2x2")
    assert (ratio["low"], ratio["median"], ratio["high"]) == pytest.approx((0.4, 0.5, 0.625))


def test_a_table_tells_the_best_layout_of_each_kind():
    result = make_result()
    result["ratios"] = [
        {
            "case": "mlp",
            "variant": "hpctrain-mpi-2x2",
            "baseline": "one-process-1x4",
            "median": 0.9,
            "low": 0.8,
            "high": 1.0,
            "num_blocks": 3,
        }
    ]
    headers, rows = results.best_rows(result)
    assert headers[2:] == ["best: ranks x threads", "ms", "ratio to one-process-1x4"]
    assert [row[1:] for row in rows] == [
        ["one-process", "1 x 4", "10.0", "1"],
        ["hpctrain-mpi", "2 x 2", "9.00", "0.900 [0.800, 1.000]"],
        ["ddp", "2 x 2", "18.0", ""],
    ]


# Barriers


def test_barriers_of_one_number_of_ranks_share_a_launch():
    variants = barrier.make_variants(barrier.KINDS, [2, 4])
    assert [v.num_ranks for v in variants] == [2] * 4 + [4] * 4
    assert {(v.launch, v.num_ranks) for v in variants} == {("2 ranks", 2), ("4 ranks", 4)}


def test_who_has_nothing_to_do_in_a_case_is_left_out():
    idle = Case(name="idle", warmup=0, repeats=1, without=frozenset({"a"}))
    plan = BenchPlan(
        name="x",
        module="m",
        cases=[idle],
        variants=[Variant(name=name, launch="l") for name in "ab"],
        comparisons=[],
        rules=Rules(num_ranks=2, blocks=1, retries=0, load_limit=1.0),
        settings={},
    )
    assert [v.name for v in plan.variants_of(idle)] == ["b"]


# Memory


def test_a_divided_update_holds_its_state_once():
    whole = {kind: memory.formula(kind, 4, 10) for kind in memory.FORMULAS}
    assert whole["compute"] == {"weights": 40, "gradients": 40, "update": 80}
    assert whole["hpctrain-mpi-replicated"] == {"weights": 40, "gradients": 40, "update": 80}
    assert whole["hpctrain-mpi-sharded"] == {"weights": 40, "gradients": 40, "update": 30}
    assert whole["ddp"] == whole["compute"]
    assert whole["ddp-zero"] == {"weights": 40, "gradients": 40, "update": 20}


SMAPS = """\
aaaa00000000-aaaa00001000 rw-p 00000000 00:00 0                          [heap]
Rss:                  10 kB
Pss:                   8 kB
Pss_Dirty:             8 kB
ffff00000000-ffff00002000 r-xp 00000000 08:01 77                         /usr/lib/libtorch.so
Pss:                 500 kB
ffff10000000-ffff10002000 rw-p 00000000 00:00 0 
Pss:                  30 kB
ffff20000000-ffff20002000 rw-s 00000000 00:1a 9                          /dev/shm/hpctrain-1-ab (deleted)
Pss:                 100 kB
ffff30000000-ffff30002000 rw-s 00000000 08:01 9                          /tmp/hpctrain-1-ab (deleted)
Pss:                1000 kB
"""  # noqa: E501


def test_libraries_are_no_data():
    assert data_kib(SMAPS) == 8 + 30 + 100 + 1000


def test_the_memory_of_this_process_is_seen():
    from pathlib import Path

    before = data_kib(Path("/proc/self/smaps").read_text())
    held = bytearray(b"x") * (512 << 20)  # much more than what else happens to be allocated
    after = data_kib(Path("/proc/self/smaps").read_text())
    assert after - before == pytest.approx(len(held) / 1024, rel=0.05)


# What they share


def test_numbers_are_read_once_and_in_order():
    assert command.numbers("ranks", "4, 2,4") == [2, 4]
    for text in ("", "0", "two", "2,-4", "1.5"):
        with pytest.raises(ConfigError, match="whole numbers of at least 1"):
            command.numbers("ranks", text)


@pytest.mark.parametrize("field", ["num_ranks", "num_threads"])
def test_layouts_out_of_range_are_refused(field):
    with pytest.raises(ConfigError, match=f"{field}=0 must be at least 1"):
        Variant(name="a", launch="a", **{field: 0})


def test_results_of_the_first_schema_are_read_as_todays():
    old = {
        "schema": 1,
        "settings": {"num_ranks": 2, "threads_per_rank": 1, "blocks": 3},
        "series": [{"case": "c", "variant": "v"}],
    }
    assert results.upgrade(old) == {
        "schema": results.SCHEMA,
        "settings": {"blocks": 3},
        "series": [{"case": "c", "variant": "v", "kind": "v", "num_ranks": 2, "num_threads": 1}],
    }
    assert results.upgrade([]) == []


def test_the_peers_of_the_sharded_update_are_compared():
    compared = set(step_overhead.COMPARISONS)
    peers = ("compute", "ddp", "ddp-zero", "horovod", "hpctrain-mpi-replicated")
    assert {("hpctrain-mpi", peer) for peer in peers} <= compared
