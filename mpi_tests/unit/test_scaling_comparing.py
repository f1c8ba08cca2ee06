"""Comparing results: slower beyond noise, exact counts, and the layouts that are remembered."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.bench.command import RESULTS
from hpctrain.bench.comparing import compare_counts, compare_times, counts_of, read_counts
from hpctrain.bench.layouts import BestLayout, LayoutBook, best_layout, find_layout
from hpctrain.bench.sweep import Folder, Measured, Sweep, SweepSettings, layout_points
from hpctrain.cli import main
from hpctrain.errors import ConfigError

MACHINE = {
    **dict.fromkeys(("id", "cpu", "arch", "system", "python", "mpi", "torch", "mpi4py"), "x"),
    **{"cores": 4, "memory_gib": 8.0, "horovod": None, "commit": None, "modified": False},
}
TIMES = st.lists(st.floats(0.5, 2.0), min_size=2, max_size=9)


def make_result(**seconds):
    count = len(next(iter(seconds.values())))
    series = [
        {
            **{"case": "c", "variant": name, "kind": name, "num_ranks": 2, "num_threads": 1},
            **{"seconds": list(times), "outcome": {}, "metrics": {}},
            "counts": {"messages": 1, "bytes": 64},
        }
        for name, times in seconds.items()
    ]
    block = {"case": "c", "order": list(seconds), "foreign_load": 0.0, "kept": True, "noisy": False}
    return {
        **{"schema": 2, "benchmark": "b", "date": "2026-11-15", "machine": MACHINE},
        **{"settings": {}, "series": series, "ratios": [], "blocks": [block] * count},
        **{"num_thrown_away": 0, "num_noisy": 0},
    }


@given(old=TIMES, factor=st.floats(0.2, 5.0))
def test_slower_means_that_the_intervals_are_apart(old, factor):
    new = [factor * each for each in old]
    (row,) = compare_times(make_result(a=old), make_result(a=new))
    assert row.low <= row.ratio <= row.high
    if row.verdict == "slower":
        assert factor > 1.03
        assert row.low > 1
    if row.verdict == "faster":
        assert factor < 0.97
        assert row.high < 1
    if factor > 4.1:  # beyond all noise that there can be in these
        assert row.verdict == "slower"
    (back,) = compare_times(make_result(a=new), make_result(a=old))
    assert {row.verdict, back.verdict} in ({"same"}, {"slower", "faster"})


@given(times=TIMES)
def test_a_result_is_never_slower_than_itself(times):
    result = make_result(a=times, b=times)
    assert {row.verdict for row in compare_times(result, result)} == {"same"}


def test_points_of_one_result_alone_are_listed_and_other_machines_refused():
    old, new = make_result(a=[1.0] * 2, b=[1.0] * 2), make_result(b=[1.0] * 2, c=[1.0] * 2)
    found = {row.variant: row.verdict for row in compare_times(old, new)}
    assert found == {"a": "missing", "b": "same", "c": "missing"}
    other = {**new, "machine": {**MACHINE, "cpu": "y"}}
    with pytest.raises(ConfigError, match="cannot be compared"):
        compare_times(old, other)
    with pytest.raises(ConfigError, match="cannot be compared"):
        compare_times(old, {**new, "benchmark": "other"})


def test_one_repeat_gives_no_interval_and_no_verdict(tmp_path, capsys):
    names = []
    for name, times in (("old", [1.0]), ("new", [5.0])):
        (tmp_path / name).write_text(json.dumps(make_result(a=times)))
        names.append(str(tmp_path / name))
    assert main(["bench", "compare", *names]) == 0
    said = capsys.readouterr()
    assert "5.000 " in said.out
    assert "[" not in said.out.partition("5.000")[2]
    assert "1 of 1 points were measured once" in said.err
    assert "--repeats 3" in said.err
    (row,) = compare_times(make_result(a=[1.0, 1.0]), make_result(a=[5.0]))
    assert row.verdict == "unrepeated"


def test_a_count_that_grew_is_a_regression_and_less_is_none():
    old = counts_of([make_result(a=[1.0])])
    new = make_result(a=[1.0])
    assert {row.verdict for row in compare_counts(old, new)} == {"same"}
    new["series"][0]["counts"] = {"messages": 2, "hooks": 0, "bytes": 32}
    found = {row.name: row.verdict for row in compare_counts(old, new)}
    assert found == {"messages": "more", "bytes": "less", "hooks": "missing"}
    with pytest.raises(ConfigError, match="neither a result"):
        read_counts({"series": [1]})


def test_the_verb_exits_with_1_when_something_is_worse(tmp_path, capsys):
    old, new = make_result(a=[1.0, 1.01]), make_result(a=[1.5, 1.6])
    paths = [tmp_path / "old.json", tmp_path / "new.json", tmp_path / "counts.json"]
    for path, result in zip(paths, (old, new), strict=False):
        path.write_text(json.dumps(result))
    names = [str(path) for path in paths]
    assert main(["bench", "compare", *names[:2]]) == 1
    assert "1 of 1 points are slower beyond noise" in capsys.readouterr().err
    assert main(["bench", "compare", names[1], names[0]]) == 0
    assert main(["bench", "compare", "--write-counts", names[2], names[0]]) == 0
    assert main(["bench", "compare", "--counts", names[2], names[1]]) == 0
    worse = copy.deepcopy(new)
    worse["series"][0]["counts"]["messages"] = 7
    paths[1].write_text(json.dumps(worse))
    assert main(["bench", "compare", "--counts", names[2], names[1]]) == 1
    paths[1].write_text("{}")
    assert main(["bench", "compare", *names[:2]]) == 2


def test_results_without_a_common_point_or_a_sensible_tolerance_are_refused(tmp_path, capsys):
    names = []
    for name in ("a", "b"):
        (tmp_path / name).write_text(json.dumps(make_result(**{name: [1.0]})))
        names.append(str(tmp_path / name))
    for options in ([], ["--counts"]):
        assert main(["bench", "compare", *options, *names]) == 2
        assert "have no point in common" in capsys.readouterr().err
    assert main(["bench", "compare", "--tolerance", "-1", names[0], names[0]]) == 2
    assert "--tolerance -1 must be 0 or more" in capsys.readouterr().err


def test_the_counts_that_are_kept_are_of_every_engine():
    kept = read_counts(json.loads((RESULTS / "counts.json").read_text()))
    variants = {variant for _, variant in kept}
    assert {"hpctrain-mpi", "hpctrain-torch", "hpctrain-horovod"} <= variants
    assert all(counts["messages"] == 1 for (_, v), counts in kept.items() if "fusion" not in v)


def row(ranks, over, low, role="ranks"):
    names = {"state": "ok", "role": role, "num_ranks": ranks, "num_threads": 4 // ranks}
    return {**names, "over_node": over, "over_node_low": low, "over_node_high": 2 * over - low}


def test_ranks_are_best_only_where_they_beat_one_process_beyond_noise():
    node = row(1, 1.0, 1.0, role="node")
    best, why = best_layout([node, row(2, 1.2, 1.1), row(4, 1.1, 1.05)])
    assert best["num_ranks"] == 2
    assert why == "1.20 [1.10, 1.30] times as fast as one process with 4 threads"
    best, why = best_layout([node, row(2, 1.05, 0.98), row(4, 0.7, 0.6)])
    assert best is node
    assert "no layout of ranks is faster by more than noise; 2 ranks were 1.05 [0.98, 1.12]" in why
    once = {key: row(2, 2.77, 2.77)[key] for key in (*node, "over_node")}
    del once["over_node_low"], once["over_node_high"]
    best, why = best_layout([node, once])
    assert best is node
    assert why.endswith("2 ranks were 2.77 times, measured once")
    with pytest.raises(ConfigError, match="could not be measured: it broke"):
        best_layout([{**node, "state": "failed", "why": "it broke"}, row(2, 1.2, 1.1)])


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_layout_is_remembered_only_where_it_was_repeated(repeats, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script = tmp_path / "train.py"
    script.touch()
    sweep = Sweep(
        target=str(script),
        is_module=False,
        arguments=(),
        label="train.py",
        settings=SweepSettings(mode="strong", repeats=repeats),
        points=tuple(layout_points(2, values={})),
        kind="layout",
    )
    folder = Folder(tmp_path / "sweep")
    folder.begin(sweep)
    for name, repeat in sweep.order():  # whole launches; ranks take half as long as one process
        seconds = 4.0 / sweep.point(name).num_ranks + 0.001 * repeat
        load = 0.5 if repeat else 0.0
        done = Measured(point=name, repeat=repeat, wall_s=seconds, foreign_load=load)
        folder.write(folder.key(sweep, name, repeat), done)
    words = ["--cores", "2", "--repeats", str(repeats), "--dir", str(folder.path), str(script)]
    assert main(["bench", "layout", *words]) == 0
    said = capsys.readouterr()
    known = LayoutBook(tmp_path / "state" / "hpctrain").read()
    if repeats == 1:
        assert known == []
        assert "none is chosen or remembered; measure with --repeats" in said.err
        assert "[" not in said.out
    else:
        assert [(one.num_ranks, one.num_rounds, one.num_disturbed) for one in known] == [(2, 2, 1)]


def test_a_layout_is_found_by_script_and_machine_and_says_what_changed(tmp_path):
    book = LayoutBook(tmp_path / "state")
    assert book.read() == []
    known = {"target": "/a/train.py", "machine": "m", "digest": "d", "why": "w", "date": "x"}
    known["num_rounds"] = 3
    for arguments, ranks in ((("--big",), 4), ((), 1), ((), 2)):
        book.add(BestLayout(arguments=arguments, num_ranks=ranks, num_threads=1, **known))
    assert len(book.read()) == 2  # the newer one stands for the older

    def find(**changed):
        asked = {"target": "/a/train.py", "arguments": (), "machine": "m", "digest": "d"}
        return find_layout(book.read(), **{**asked, **changed})

    layout, differences = find()
    assert (layout.num_ranks, differences) == (2, [])
    assert find(arguments=("--big",))[0].num_ranks == 4
    assert "other arguments: none" in find(arguments=("--small",))[1][0]
    assert find(digest="other")[1] == ["the script has changed since it was measured"]
    with pytest.raises(ConfigError, match="it was measured on another kind of machine"):
        find(machine="other")
    with pytest.raises(ConfigError, match=r"bench layout other\.py` first"):
        find(target="/b/other.py")
    doubtful = {**known, "target": "/c/x.py", "num_disturbed": 2}
    book.add(BestLayout(arguments=(), num_ranks=2, num_threads=1, **doubtful))
    (said,) = find(target="/c/x.py")[1]
    assert said.startswith("2 of 3 rounds were disturbed by other processes")
    book.add(BestLayout(arguments=(), num_ranks=2, num_threads=1, **{**doubtful, "num_rounds": 0}))
    assert find(target="/c/x.py")[1] == ["how often it was measured is not recorded"]
    book.path.write_text("broken")
    with pytest.raises(ConfigError, match="move it away"):
        book.read()
