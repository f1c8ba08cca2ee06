"""One clock for all ranks, one trace of all events, and the slowest step in it."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.timeline.clocks import Offset, Ping, add, correct, estimate
from hpctrain.timeline.files import Event, RankTrace, read_folder, read_rank
from hpctrain.timeline.merging import merge, merge_folder
from hpctrain.timeline.recording import Tap, TraceRecorder, rank_file
from hpctrain.timeline.slowest import find_slowest, own_times
from hpctrain.world.observing import observed, phase
from mpi_tests.trace_format import complaints

MS = 1e6
START = Offset(ns=0.0, error_ns=0.0, at_ns=0.0)
delays = st.integers(min_value=100, max_value=10**7)


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(delays, delays), min_size=1, max_size=30))
def test_the_true_offset_is_within_the_stated_error(truth, trips):
    now, pings = 10**15, []
    for there, back in trips:
        pings.append(Ping(sent_ns=now, there_ns=now + there + truth, back_ns=now + there + back))
        now += there + back + 1000
    found = estimate(pings)
    assert abs(found.ns - truth) <= found.error_ns
    assert found.error_ns <= min(there + back for there, back in trips) / 2


def test_clocks_that_drift_too_much_for_all_pings_count_by_the_quickest():
    pings = [
        Ping(sent_ns=0, there_ns=50, back_ns=100),
        Ping(sent_ns=1000, there_ns=2000, back_ns=1010),
    ]
    found = estimate(pings)
    assert (found.ns, found.error_ns) == (995, 5)


def test_errors_add_up_over_a_rank_between():
    far = add(Offset(ns=5, error_ns=1, at_ns=0), Offset(ns=-7, error_ns=2, at_ns=9))
    assert (far.ns, far.error_ns, far.at_ns) == (-2, 3, 9)


def test_drift_is_spread_evenly_between_two_measurements():
    begin, end = Offset(ns=100, error_ns=0, at_ns=1000), Offset(ns=200, error_ns=0, at_ns=2000)
    assert correct(1000, begin, end) == 900
    assert correct(1500, begin, end) == 1350
    assert correct(3000, begin, end) == 2800
    assert correct(3000, begin, None) == 2900


def test_phases_are_told_to_all_observers_even_when_they_fail():
    told = []

    class Listener:
        def begin(self, name):
            told.append(f"+{name}")

        def end(self, name):
            told.append(f"-{name}")

        def stepped(self, number):
            told.append(str(number))

    def fail(observers):
        with phase(observers, "forward"):
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail([Listener(), Listener()])
    assert told == ["+forward", "+forward", "-forward", "-forward"]
    told.clear()
    assert list(observed(iter([1, 2]), [Listener()], "input")) == [1, 2]
    assert told == ["+input", "-input"] * 3


def trace(rank, events, *, size=2, **more):
    facts = {"error_ns": 500.0, "drift_ns": 0.0, "node_rank": 0, "host": f"n{rank}"} | more
    return RankTrace(rank=rank, size=size, events=tuple(events), **facts)


def event(kind, name, begin_ms, end_ms, thread=0, **more):
    return Event(
        kind=kind, name=name, thread=thread, begin_ns=begin_ms * MS, end_ns=end_ms * MS, **more
    )


def two_ranks(*, late_step=3, late_rank=1, num_steps=5):
    """Steps of 10 ms in which rank 1 computes 20 ms longer once; the other waits for it."""
    traces = []
    for rank in range(2):
        events, now = [], 0.0
        for step in range(1, num_steps + 1):
            extra = 20.0 if step == late_step else 0.0
            compute = 6.0 + (extra if rank == late_rank else 0.0)
            wait = 2.0 + (extra if rank != late_rank else 0.0)
            events.append(event("phase", "forward", now, now + compute))
            begin, end = now + compute, now + compute + wait
            events.append(event("phase", "exchange", begin, end))
            events.append(
                event("collective", "allreduce", begin, end - 0.1, group="all", number=step)
            )
            events.append(event("phase", "update", end, end + 2.0))
            now = end + 2.0
            events.append(event("step", str(step), now, now))
        traces.append(trace(rank, events))
    return traces


def test_the_slowest_step_names_the_rank_and_the_phase_that_held_it_up():
    found = find_slowest(two_ranks())
    assert (found.step, found.rank, found.phase) == (3, 1, "forward")
    assert found.seconds == pytest.approx(0.030)
    assert found.median_s == pytest.approx(0.010)
    assert found.extra_s == pytest.approx(0.020)
    assert "rank 1 held it up, forward took 20.0 ms more" in str(found)
    network = str(replace(found, phase="exchange"))
    assert "no rank held it up: the exchange itself took 20.0 ms more" in network
    assert find_slowest(two_ranks(late_rank=0, late_step=4)).rank == 0
    assert find_slowest(two_ranks(num_steps=1)) is None
    assert find_slowest([]) is None


def test_time_inside_another_phase_is_the_inner_ones():
    events = [
        event("phase", "update", 0, 10),
        event("phase", "exchange", 2, 5),
        event("phase", "input", 20, 30),
    ]
    assert own_times(events, 0, 25 * MS) == pytest.approx(
        {"update": 0.007, "exchange": 0.003, "input": 0.005}
    )


def test_a_merged_trace_is_as_the_format_asks_and_has_arrows_to_those_who_waited():
    document = merge(two_ranks())
    assert complaints(document) == []
    starts = [r for r in document["traceEvents"] if r["ph"] == "s"]
    assert len(starts) == 5
    ends = [r for r in document["traceEvents"] if r["ph"] == "f"]
    late = next(r for r in starts if r["ts"] == pytest.approx(2 * 10_000 + 26_000))
    assert late["pid"] == 2  # from rank 1, which came last, to rank 0
    assert next(r["pid"] for r in ends if r["id"] == late["id"]) == 1
    held = [r for r in document["traceEvents"] if r["name"] == "rank 1 arrived"]
    assert [r["pid"] for r in held if r["ts"] == pytest.approx(late["ts"], abs=0.1)] == [1]
    assert document["otherData"]["clock_error_us"] == 0.5
    assert "number 3" in document["otherData"]["slowest_step"]


def test_who_left_before_the_last_one_came_did_not_wait_for_it():
    root = trace(0, [event("collective", "broadcast", 0, 1, group="all", number=1)])
    other = trace(1, [event("collective", "broadcast", 5, 6, group="all", number=1)])
    document = merge([root, other])
    assert complaints(document) == []
    assert not [r for r in document["traceEvents"] if r["ph"] in "sf"]


def test_a_collective_with_others_inside_has_no_arrow_but_they_have():
    def nested(late_ms):
        return [
            event("collective", "allreduce", late_ms, 9, group="all", number=1),
            event("collective", "allreduce", late_ms + 1, 8, group="node", number=1),
        ]

    document = merge([trace(0, nested(0)), trace(1, nested(2))])
    assert complaints(document) == []
    assert [(r["pid"], r["ts"]) for r in document["traceEvents"] if r["ph"] == "s"] == [(2, 3000.0)]


def test_what_viewers_would_not_draw_is_found():
    def spoilt(**wrong):
        document = merge(two_ranks())
        arrow = next(r for r in document["traceEvents"] if r["ph"] == "s")
        arrow.update(wrong)
        return complaints(document)

    assert "an arrow's id is a number, not 'all/1'" in spoilt(id="all/1")
    assert "pid is 0, no whole number from 1 on" in spoilt(pid=0)
    assert any("is in no slice" in said for said in spoilt(tid=9))
    assert "events are not in the order of time" in spoilt(ts=1e9)
    assert any("ends before it begins" in said for said in spoilt(name="other"))


def test_messages_in_flight_are_drawn_from_their_start_to_their_end():
    name = "allreduce bucket 0"
    events = [
        event("post", name, 1, 1),
        event("post", name, 2, 2),
        event("collective", name, 5, 6, group="all", number=1),
        event("collective", name, 7, 8, group="all", number=2),
    ]
    document = merge([trace(0, events, size=1)])
    assert complaints(document) == []
    pairs = [(r["ph"], r["ts"]) for r in document["traceEvents"] if r["ph"] in "be"]
    assert pairs == [("b", 0.0), ("b", 1000.0), ("e", 5000.0), ("e", 7000.0)]


def record(tmp_path, rank, *, offset_ns=0.0, size=2, end=True):
    file = rank_file(tmp_path, rank).open("w")
    header = {"rank": rank, "size": size, "host": "n", "node_rank": 0, "process": 1}
    recorder = TraceRecorder(file, header, Offset(ns=offset_ns, error_ns=40.0, at_ns=0.0))

    class Silent:
        def enter(self, call):
            """Nothing."""

        def leave(self):
            """Nothing."""

        def among(self, ranks, *, timeout_s=None):
            return Silent()

    tap = Tap(recorder, Silent())
    part = tap.among([0, 1])
    for step in range(1, 4):
        with phase([recorder], "forward"):
            recorder.post("allreduce bucket")
        tap.enter("allreduce bucket")
        tap.leave()
        part.enter("barrier")
        part.leave()
        recorder.stepped(step)
    recorder.flush()
    if end:
        recorder.close(Offset(ns=offset_ns, error_ns=60.0, at_ns=1e18))
    else:
        file.close()


def test_what_ranks_record_is_merged_from_their_files(tmp_path, capsys):
    record(tmp_path, 0)
    record(tmp_path, 1)
    assert main(["trace", "merge", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_ranks"], told["missing"], told["cut_off"]) == (2, [], [])
    assert told["error_us"] == 0.06
    with gzip.open(tmp_path / "trace.json.gz") as file:
        document = json.load(file)
    assert complaints(document) == []
    groups = {r["args"]["group"] for r in document["traceEvents"] if r.get("cat") == "collective"}
    assert len(groups) == 2
    assert main(["trace", "merge", str(tmp_path)]) == 0
    assert "clocks within 0.1 us" in capsys.readouterr().out


def test_a_run_that_was_killed_is_merged_as_far_as_it_came(tmp_path):
    record(tmp_path, 0)
    record(tmp_path, 2, size=3, end=False)
    path = rank_file(tmp_path, 0)
    path.write_text(path.read_text().replace('"size": 2', '"size": 3'))
    with rank_file(tmp_path, 2).open("a") as file:
        file.write('[["phase", "forw')
    merged = merge_folder(tmp_path)
    assert (merged.missing, merged.cut_off) == ((1,), (2,))
    assert "no file of ranks 1" in merged.sentence


def test_files_of_an_earlier_larger_run_are_left_out(tmp_path):
    record(tmp_path, 0, size=1)
    record(tmp_path, 3, size=4)
    assert [one.rank for one in read_folder(tmp_path)] == [0]


def test_what_is_no_trace_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="no rank recorded a trace there"):
        merge_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.jsonl is not the trace"):
        read_rank('{"some": "thing"}\n', "a.jsonl")


def test_a_recorder_keeps_a_bounded_number_of_events(monkeypatch):
    monkeypatch.setattr("hpctrain.timeline.recording._MOST_EVENTS", 3)
    file = io.StringIO()
    recorder = TraceRecorder(file, {"rank": 0, "size": 1, "host": "n", "node_rank": 0}, START)
    for step in range(5):
        recorder.stepped(step)
    recorder.flush()
    recorder._file = kept = io.StringIO()
    kept.close = lambda: None
    recorder.close(START)
    recorder.close(START)
    assert json.loads(kept.getvalue())["num_dropped"] == 2
    assert len(json.loads(file.getvalue().splitlines()[1])) == 3
