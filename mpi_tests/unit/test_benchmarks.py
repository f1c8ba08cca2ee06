"""The benchmark harness, as far as it is arithmetic and text."""

from __future__ import annotations

import copy
import importlib
import json
import math
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import step_overhead, tables
from hpctrain.bench import collectives, command, results
from hpctrain.bench.load import Reading, background_load, busy_ticks
from hpctrain.bench.paired import (
    choose_blocks,
    interval_ranks,
    more_are_needed,
    paired_ratio,
    shuffled_order,
)
from hpctrain.bench.results import describe_machine, machine_id
from hpctrain.bench.session import BenchPlan, Block, Case, Rules, Variant, describe_case
from hpctrain.cli import main
from hpctrain.errors import ConfigError

TIMES = st.floats(1e-6, 1e3)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=40)


# Ratios


@pytest.mark.parametrize(
    ("count", "first", "last", "coverage"),
    [  # tables of the sign test
        (1, 0, 0, 0.0),
        (2, 0, 1, 0.5),
        (5, 0, 4, 0.9375),
        (6, 0, 5, 0.96875),
        (10, 1, 8, 0.978515625),
        (15, 3, 11, 0.96484375),
        (20, 5, 14, 0.958610534667969),
    ],
)
def test_intervals_of_the_median_are_those_of_the_sign_test(count, first, last, coverage):
    assert interval_ranks(count, 0.95)[:2] == (first, last)
    assert interval_ranks(count, 0.95)[2] == pytest.approx(coverage, abs=1e-12)


@given(st.integers(1, 200), st.floats(0.5, 0.999))
def test_an_interval_covers_what_is_asked_and_is_the_narrowest_that_does(count, confidence):
    first, last, coverage = interval_ranks(count, confidence)
    assert 0 <= first <= last == count - 1 - first
    if first > 0:
        assert coverage >= confidence
    narrower = 1 - 2 * sum(math.comb(count, i) for i in range(first + 2)) / 2**count
    assert narrower < confidence or first + 1 > last - 1


@given(PAIRS)
def test_the_median_of_paired_ratios_lies_in_its_interval(pairs):
    mine, theirs = zip(*pairs, strict=True)
    ratio = paired_ratio(mine, theirs)
    assert ratio.low <= ratio.median <= ratio.high
    assert ratio.median == median(a / b for a, b in pairs)
    assert ratio.num_blocks == len(pairs)


@given(PAIRS, st.data())
def test_what_slows_a_whole_block_changes_nothing(pairs, data):
    slow = data.draw(st.lists(st.sampled_from([1.0, 2.0, 8.0]), min_size=len(pairs)))
    before = paired_ratio(*zip(*pairs, strict=True))
    scaled = [(a * f, b * f) for (a, b), f in zip(pairs, slow, strict=False)]
    assert paired_ratio(*zip(*scaled, strict=True)) == before


def test_a_known_ratio_is_found_in_noisy_times():
    baseline = [1.0, 1.5, 0.9, 4.0, 1.1, 1.2]
    ratio = paired_ratio([1.25 * t for t in baseline], baseline)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.25, 1.25, 1.25))


@pytest.mark.parametrize(("mine", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_what_cannot_be_paired_is_refused(mine, theirs):
    with pytest.raises(ConfigError):
        paired_ratio(mine, theirs)


# Blocks


@given(st.integers(0, 99), st.integers(0, 99))
def test_orders_are_shuffled_repeatable_and_complete(seed, block):
    names = ["a", "b", "c", "d"]
    order = shuffled_order(names, seed=seed, case="x", block=block)
    assert sorted(order) == names
    assert order == shuffled_order(names, seed=seed, case="x", block=block)


def test_every_variant_comes_first_about_equally_often():
    first = [shuffled_order("abcd", seed=0, case="x", block=i)[0] for i in range(400)]
    assert all(70 < first.count(name) < 130 for name in "abcd")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.data())
def test_quiet_blocks_count_and_then_the_least_disturbed(loads, data):
    wanted = data.draw(st.integers(1, len(loads)))
    limit = 0.3
    kept = choose_blocks(loads, wanted=wanted, limit=limit)
    assert len(set(kept.indices)) == wanted
    assert list(kept.indices) == sorted(kept.indices)
    quiet = [i for i, load in enumerate(loads) if load <= limit]
    assert kept.num_noisy == max(0, wanted - len(quiet))
    assert set(kept.indices) >= set(quiet[:wanted])
    left = [loads[i] for i in range(len(loads)) if i not in kept.indices and loads[i] > limit]
    if kept.num_noisy and left:
        assert max(loads[i] for i in kept.indices) <= min(left)


def test_blocks_are_repeated_up_to_a_bound():
    rule = {"wanted": 2, "retries": 2, "limit": 0.1}
    assert more_are_needed([], **rule)
    assert more_are_needed([0.5, 0.05], **rule)
    assert not more_are_needed([0.05, 0.5, 0.1], **rule)
    assert more_are_needed([0.5, 0.5, 0.5], **rule)
    assert not more_are_needed([0.5, 0.5, 0.5, 0.5], **rule)


# Load

STAT = "cpu  100 10 50 900 30 5 6 7 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 5\n"


def test_busy_time_leaves_out_waiting_and_interrupts_and_counts_stolen_time():
    assert busy_ticks(STAT) == 100 + 10 + 50 + 7
    with pytest.raises(ConfigError):
        busy_ticks("intr 5\n")


def test_background_load_is_what_is_not_ours():
    before = Reading(wall_s=10.0, busy_s=100.0, own_s=5.0)
    after = Reading(wall_s=12.0, busy_s=103.0, own_s=7.0)
    assert background_load(before, after, num_cores=2) == pytest.approx(0.25)
    ours_alone = Reading(wall_s=12.0, busy_s=103.0, own_s=8.01)
    assert background_load(before, ours_alone, num_cores=2) == 0.0
    with pytest.raises(ConfigError):
        background_load(before, before, num_cores=2)


# Results


def machine() -> dict[str, object]:
    return {**describe_machine(mpi="MPICH 5"), "torch": "2", "mpi4py": "4", "commit": "c" * 40}


def make_result(num_noisy: int = 0) -> dict[str, object]:
    loads = [0.0, 0.5, 0.01, 0.4 if num_noisy else 0.02]
    plan = BenchPlan(
        name="step_overhead",
        module="m",
        cases=[Case(name="small", warmup=1, repeats=2)],
        variants=[Variant(name=name, launch="x") for name in ("compute", "mpi", "ddp")],
        comparisons=[("mpi", "compute"), ("ddp", "compute"), ("mpi", "ddp"), ("mpi", "absent")],
        rules=Rules(num_ranks=2, blocks=3, retries=1, load_limit=0.05),
        settings={"blocks": 3},
    )
    blocks = [
        Block(
            order=["ddp", "mpi", "compute"],
            seconds={"compute": 0.010 * i, "mpi": 0.011 * i, "ddp": 0.014 * i},
            counts={"compute": {}, "mpi": {"messages": 1.0}, "ddp": {}},
            background_load=load,
        )
        for i, load in enumerate(loads, start=1)
    ]
    kept = choose_blocks(loads, wanted=3, limit=0.05)
    facts = {"compute": {}, "mpi": {"bytes": 12}, "ddp": {}}
    series, ratios, described = describe_case(
        plan, plan.cases[0], blocks, kept, facts, {name: {} for name in facts}
    )
    return {
        "schema": results.SCHEMA,
        "benchmark": plan.name,
        "date": "2026-01-02",
        "machine": machine(),
        "settings": dict(plan.settings),
        "series": series,
        "ratios": ratios,
        "blocks": described,
        "num_thrown_away": 1,
        "num_noisy": num_noisy,
    }


def test_a_case_is_described_by_its_quiet_blocks():
    result = make_result()
    assert results.validate(json.loads(json.dumps(result))) == []
    assert [block["kept"] for block in result["blocks"]] == [True, False, True, True]
    assert result["series"][1]["seconds"] == pytest.approx([0.011, 0.033, 0.044])
    assert result["series"][1]["counts"] == {"bytes": 12, "messages": 1.0}
    assert [r["median"] for r in result["ratios"]] == pytest.approx([1.1, 1.4, 11 / 14])
    assert len(result["ratios"]) == 3, "what was not measured is not compared"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], 99),
        (["date"], "yesterday"),
        (["machine", "cores"], "two"),
        (["machine", "modified"], 1),
        (["series", 0, "seconds"], [0.1]),
        (["series", 0, "seconds", 0], -1.0),
        (["series", 0, "counts"], None),
        (["ratios", 0, "low"], 3.0),
        (["ratios", 0, "variant"], "nobody"),
        (["ratios", 0, "median"], True),
        (["blocks", 0, "kept"], False),
        (["num_noisy"], 1),
        (["blocks"], {}),
    ],
)
def test_a_result_that_is_not_as_the_schema_says_is_refused(path, value):
    result = copy.deepcopy(make_result())
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert results.validate(result) != []


def test_a_missing_part_is_named():
    result = make_result()
    for name in list(result):
        assert results.validate({k: v for k, v in result.items() if k != name}) == [
            f"result: {name} is missing"
        ]
    assert results.validate([]) == ["a result is an object"]


def test_a_result_names_no_host_and_no_path(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "secret-host")
    text = json.dumps(describe_machine(mpi="MPICH 5"))
    assert "secret-host" not in text
    assert "/" not in text.replace("(R)", "")


@given(
    st.sampled_from(["x86_64", "aarch64"]),
    st.integers(1, 256),
    st.dates(),
    st.lists(st.integers(1, 64), min_size=1),
)
def test_file_names_are_read_back(arch, cores, day, ranks):
    name = machine_id(arch, cores)
    result = {"benchmark": "step_overhead", "date": day.isoformat(), "machine": {"id": name}}
    result["series"] = [{"num_ranks": n} for n in ranks]
    tail = f"-{ranks[0]}ranks" if len(set(ranks)) == 1 and ranks[0] > 2 else ""
    parsed = results.parse_file_name(results.file_name(result))
    assert parsed == ("step_overhead", day.isoformat(), name + tail)


# Tables


def test_tables_show_ratios_counts_and_intervals():
    headers, rows = results.series_rows(make_result())
    assert headers == ["case", "variant", "ms", "ratio to compute", "bytes", "messages"]
    assert rows[1] == ["small", "mpi", "33.0", "1.100 [1.100, 1.100]", "12", "1"]
    assert rows[0][3:] == ["1", "", ""]
    assert results.comparison_rows(make_result())[1] == [
        ["small", "mpi / ddp", "0.786 [0.786, 0.786]"]
    ]


def test_pages_are_filled_between_their_marks_and_only_there():
    page = (
        "a\n<!-- table: step_overhead -->\nold\n<!-- end -->\nb\n<!-- table: no -->\n<!-- end -->"
    )
    filled = tables.fill(page, {"step_overhead": [make_result()]})
    assert filled.startswith("a\n<!-- table: step_overhead -->\n2026-01-02, ")
    assert "old" not in filled
    assert "| small | mpi | 33.0 |" in filled
    assert "<!-- end -->\nb\n<!-- table: no -->\nNo result has been committed yet." in filled
    assert tables.fill(filled, {"step_overhead": [make_result()]}) == filled
    with pytest.raises(ConfigError):
        tables.fill("<!-- table: x -->\n", {})


def test_the_newest_result_of_each_machine_is_shown():
    names = ["a-2026-01-02-x86_64-8cores.json", "a-2026-01-03-x86_64-8cores.json"]
    names += ["a-2025-01-01-aarch64-2cores.json", "notes.json", "b-2026-01-01-m.json"]
    assert tables.newest(names) == {"a": [names[2], names[1]], "b": [names[4]]}


def test_disturbed_or_misnamed_results_are_not_shown(tmp_path):
    result = make_result(num_noisy=1)
    path = tmp_path / results.file_name(result)
    path.write_text(json.dumps(result))
    with pytest.raises(ConfigError, match="disturbed"):
        tables.read_results(tmp_path)
    path.unlink()
    (tmp_path / "step_overhead-2020-01-01-m.json").write_text(json.dumps(make_result()))
    with pytest.raises(ConfigError, match="belongs into"):
        tables.read_results(tmp_path)


def test_committed_results_are_valid_and_pages_show_them(monkeypatch):
    monkeypatch.setattr("sys.argv", ["tables", "--check"])
    assert tables.main() == 0


# The benchmarks themselves


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_bandwidths_are_in_the_fields_terms(num_ranks):
    found = collectives.bandwidths(4_000_000, 0.002, 0.001, num_ranks)
    assert found["algbw GB/s"] == pytest.approx(2.0)
    assert found["busbw GB/s"] == pytest.approx(2.0 * 2 * (num_ranks - 1) / num_ranks)
    assert found["% of memcpy"] == pytest.approx(100 * found["busbw GB/s"] / 4.0)


def test_sizes_go_from_1_kib_to_256_mib():
    sizes = [command.parse_size(text) for text in collectives.SIZES]
    assert sizes == sorted([*(1024 * 4**i for i in range(10)), 100 << 20])
    assert [collectives.repeats_for(size) for size in (1024, 4 << 20, 256 << 20)] == [300, 64, 2]


def test_variants_that_disturb_others_have_launches_of_their_own():
    shared = {"plain", "mpi", "hpctrain-horovod", "ddp"}
    alone = [v.launch for v in step_overhead.VARIANTS if v.launch not in shared]
    assert len(set(alone)) == len(alone)
    assert {"horovod", "torch"} == set(alone)
    beside_ddp = {v.name for v in step_overhead.VARIANTS if v.launch == "ddp"}
    assert beside_ddp == {"ddp", "ddp-zero"}
    sharing = {v.launch: v.name for v in step_overhead.VARIANTS if "horovod" in v.name}
    assert set(sharing) == {"horovod", "hpctrain-horovod"}, "Horovod never sits beside others"
    raw = next(v for v in step_overhead.VARIANTS if v.name == "horovod")
    assert raw.environ == {"OMPI_MCA_mpi_yield_when_idle": "1"}


def test_the_workloads_are_those_that_can_be_asked_for():
    from benchmarks.workloads import WORKLOADS

    assert tuple(WORKLOADS) == step_overhead._WORKLOADS


def test_unknown_names_list_the_valid_ones():
    assert command.choose("variant", "b, a", ["a", "b", "c"]) == ["a", "b"]
    with pytest.raises(ConfigError, match=r"variant .x. is unknown; choose from a, b"):
        command.choose("variant", "a,x", ["a", "b"])
    with pytest.raises(ConfigError):
        command.choose("variant", ",", ["a", "b"])


@pytest.mark.parametrize("field", ["num_ranks", "blocks", "retries", "load_limit"])
def test_rules_out_of_range_are_refused(field):
    rules = {"num_ranks": 2, "blocks": 2, "retries": 0, "load_limit": 0.1, field: -1}
    with pytest.raises(ConfigError, match=field):
        Rules(**rules)


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in Path(tables.__file__).parent.glob("[a-z]*.py"))
)
def test_every_module_finds_what_it_imports(name):
    assert importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("kind", ["overhead", "data", "checkpoint"])
def test_measuring_hpctrain_itself_needs_its_repository(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hpctrain.cli.bench.ROOT", tmp_path)
    assert main(["bench", kind]) == 2
    said = capsys.readouterr().err
    assert "needs its repository" in said
    assert "python -m benchmarks." in said


def test_collectives_are_measured_without_the_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hpctrain.cli.bench.ROOT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "collectives", "--help"])
    assert ended.value.code == 0
    assert "--sizes" in capsys.readouterr().out
