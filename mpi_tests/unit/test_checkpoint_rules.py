"""Names, manifests, layout and retention of checkpoints: pure rules."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.directory import Entry, Keep, choose_removals, is_abandoned
from hpctrain.checkpoint.format import (
    FileSpec,
    Manifest,
    checkpoint_name,
    is_leftover,
    number_of,
    parse_manifest,
    partial_name,
    render_manifest,
    step_of,
    trash_name,
)
from hpctrain.checkpoint.layout import (
    LEAST_PART_BYTES,
    MOST_PARTS,
    MOST_PER_NODE,
    Item,
    choose_ranks,
    divide,
    writer_of,
)
from hpctrain.errors import CheckpointError, ConfigError

counts = st.integers(0, 2**40)
files = st.builds(
    FileSpec,
    name=st.text(max_size=10),
    num_bytes=counts,
    blocks=st.lists(st.from_regex(r"[0-9a-f]{8}", fullmatch=True), max_size=3).map(tuple),
    data_start=counts,
)
manifests = st.builds(
    Manifest,
    number=counts,
    step=counts,
    saved_at=st.floats(0, 1e10),
    num_ranks=st.integers(1, 5000),
    versions=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    tree=files,
    parts=st.lists(files, max_size=3).map(tuple),
    own=st.none() | st.lists(st.tuples(counts, counts, counts), max_size=3).map(tuple),
    metrics=st.dictionaries(st.text(max_size=5), st.floats(), max_size=3),
    note=st.none() | st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)),
)


@settings(max_examples=50)
@given(manifests)
def test_manifests_come_back(manifest):
    assert repr(parse_manifest(render_manifest(manifest), "x")) == repr(manifest)


@settings(max_examples=50)
@given(manifests, st.data())
def test_a_manifest_notices_every_change(manifest, data):
    text = render_manifest(manifest)
    place = data.draw(st.integers(0, len(text) - 1))
    bit = data.draw(st.integers(0, 6))
    flipped = text[:place] + chr(ord(text[place]) ^ (1 << bit)) + text[place + 1 :]
    for wrong in (flipped, text[:place], text + "\n"):
        with pytest.raises(CheckpointError):
            parse_manifest(wrong, "x")


@given(counts, counts)
def test_names(number, step):
    name = checkpoint_name(number, step)
    assert (number_of(name), step_of(name), is_leftover(name)) == (number, step, False)
    for other in (partial_name(number, step, "0af3"), trash_name(name, "12")):
        assert (number_of(other), step_of(other), is_leftover(other)) == (number, None, True)
    assert number_of("notes") is step_of(".hidden") is None


nodes = st.lists(st.integers(1, 12), min_size=1, max_size=9)


@given(nodes, st.integers(0, 2**38), st.none() | st.integers(1, 20), st.randoms())
def test_writers_are_few_and_on_all_nodes(sizes, num_bytes, per_node, random):
    node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(node_of)
    writers = choose_ranks(node_of, num_bytes, per_node)
    assert writers[0] == 0
    assert len(set(writers)) == len(writers)
    on = [sum(node_of[rank] == node for rank in writers) for node in range(len(sizes))]
    if per_node is not None:
        assert on == [min(per_node, size) for size in sizes]
    else:
        assert len(writers) <= max(1, min(MOST_PARTS, num_bytes // LEAST_PART_BYTES))
        assert max(on) <= MOST_PER_NODE
        assert max(on) - min(on) <= 1 or min(on) == min(sizes[i] for i in range(len(sizes)))
    targets = writer_of(node_of, writers)
    for rank, part in enumerate(targets):
        assert on[node_of[rank]] == 0 or node_of[writers[part]] == node_of[rank]


items = st.lists(
    st.tuples(st.integers(0, 3 * LEAST_PART_BYTES), st.sampled_from([1, 2, 4, 8])), max_size=30
)


@given(items, st.integers(1, 9))
def test_parts_are_complete_and_balanced(sizes, num_parts):
    known = [
        Item(name=f"t{i}", num_elements=n // width, element_bytes=width)
        for i, (n, width) in enumerate(sizes)
    ]
    parts = divide(known, num_parts)
    assert len(parts) == num_parts
    assert parts == divide(list(reversed(known)), num_parts)  # whatever their order
    pieces = sorted((p for part in parts for p in part), key=lambda p: (p.name, p.start))
    for item in known:
        mine = [piece for piece in pieces if piece.name == item.name]
        bounds = [mine[0].start, *(piece.stop for piece in mine)]
        assert bounds[0] == 0
        assert bounds[-1] == item.num_elements
        assert all(a.stop == b.start for a, b in itertools.pairwise(mine))
        assert mine[0].is_whole == (len(mine) == 1)
    loads = [sum(piece.num_bytes for piece in part) for part in parts]
    share = max(LEAST_PART_BYTES, math.ceil(sum(loads) / num_parts))
    assert max(loads) <= sum(loads) / num_parts + share
    for part in parts:
        widths = [piece.element_bytes for piece in part]
        assert widths == sorted(widths, reverse=True)
    keys = [piece.key for piece in pieces]
    assert len(set(keys)) == len(keys)


def candidate(*, number, saved_at=0.0, metrics=None, is_valid=True):
    return Entry(
        path=Path(checkpoint_name(number, 1)),
        number=number,
        step=1,
        trouble=None if is_valid else "damaged",
        saved_at=saved_at,
        metrics=metrics or {},
    )


candidates = st.lists(
    st.builds(
        candidate,
        number=st.integers(1, 10**6),
        saved_at=st.floats(0, 1e6),
        metrics=st.dictionaries(st.just("loss"), st.floats(), max_size=1),
        is_valid=st.booleans(),
    ),
    max_size=20,
    unique_by=lambda entry: entry.number,
)
keeps = st.builds(
    Keep,
    last=st.integers(1, 4),
    best=st.none() | st.sampled_from(["min:loss", "max:loss"]),
    best_count=st.integers(1, 3),
    every_hours=st.none() | st.floats(0.1, 100),
)


@given(candidates, keeps)
def test_retention_keeps_what_is_promised(found, keep):
    gone = set(choose_removals(found, keep))
    valid = sorted((c for c in found if c.trouble is None), key=lambda c: c.number)
    stay = [c for c in valid if c.number not in gone]
    assert stay[-keep.last :] == valid[-keep.last :]
    assert bool(stay) == bool(valid)
    if keep.best is not None:
        measured = [
            c.metrics["loss"] for c in valid if not math.isnan(c.metrics.get("loss", math.nan))
        ]
        ranked = sorted(measured, reverse=keep.best == "max:loss")[: keep.best_count]
        kept = [c.metrics["loss"] for c in stay if "loss" in c.metrics]
        assert all(value in kept for value in ranked)
    if len(valid) < keep.last:
        assert not gone  # damaged ones too: who knows what can be saved of them
    again = [c for c in found if c.number not in gone]
    assert choose_removals(again, keep) == []


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=60), st.floats(0.5, 10))
def test_one_every_so_many_hours_while_the_run_goes_on(gaps, hours):
    keep = Keep(last=1, every_hours=hours)
    present: list[Entry] = []
    now, times = 0.0, []
    for number, gap in enumerate(gaps, 1):
        now += gap
        times.append(now)
        present.append(candidate(number=number, saved_at=3600 * now))
        gone = set(choose_removals(present, keep))
        present = [c for c in present if c.number not in gone]
    kept = [c.saved_at / 3600 for c in present]
    assert kept[0] == pytest.approx(times[0])
    longest = max(gaps)
    for before, after in itertools.pairwise(kept):
        assert after - before < hours + longest + 1e-6
    assert len(kept) <= (now - times[0]) / hours + 2


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"last": 0}, "last=0"),
        ({"last": True}, "last=True"),
        ({"best": "loss"}, "min:METRIC"),
        ({"best": "least:loss"}, "min:METRIC"),
        ({"best": "min:"}, "min:METRIC"),
        ({"best_count": 0}, "best_count=0"),
        ({"every_hours": 0}, "every_hours=0"),
        ({"every_hours": math.nan}, "every_hours=nan"),
    ],
)
def test_keep_is_checked(wrong, what):
    with pytest.raises(ConfigError, match=what):
        Keep(**wrong)


def test_whose_leftovers_may_go():
    me = {"host": "a", "process": 5, "started": 1.0, "job": "77"}

    def abandoned(owner, age_s=10.0, alive=False):
        return is_abandoned(owner, me, age_s=age_s, is_alive=lambda process, started: alive)

    assert abandoned({**me})
    assert abandoned({**me, "process": 6})
    assert not abandoned({**me, "process": 6}, alive=True)
    assert abandoned({**me, "host": "b", "process": 6})  # the job was started again
    assert not abandoned({**me, "host": "b", "process": 6, "job": "78"})
    assert not abandoned({**me, "host": "b", "process": 6, "job": None})
    assert not abandoned(None)
    assert abandoned(None, age_s=700)
    assert not abandoned({**me, "host": "b", "job": "78"}, age_s=700)
    assert abandoned({**me, "host": "b", "job": "78"}, age_s=1e6)
