"""Clocks of all ranks against rank 0's, and what a traced training leaves behind."""

from __future__ import annotations

import dataclasses
import gzip
import json
from time import perf_counter_ns

import torch

import hpctrain as hpc
from hpctrain.timeline.clocks import measure
from hpctrain.timeline.files import read_folder
from mpi_tests.trace_format import complaints


def test_ranks_of_one_machine_have_one_clock(world):
    """Here the true difference is known: all processes read the kernel's one monotonic clock."""
    found = measure(world)
    assert abs(found.ns) <= found.error_ns
    assert found.error_ns < 50e6
    assert (found.error_ns == 0.0) == (world.rank == 0)


def test_a_clock_that_is_ahead_is_found_to_be_so(world, monkeypatch):
    ahead = 10**9 * world.rank
    monkeypatch.setattr(
        "hpctrain.timeline.clocks.perf_counter_ns", lambda: perf_counter_ns() + ahead
    )
    found = measure(world)
    assert abs(found.ns - ahead) <= found.error_ns + 1


def test_a_traced_training_is_one_timeline_of_all_ranks(world, tmp_path):
    folder = world.comm.bcast(tmp_path, root=0)
    launch = dataclasses.replace(world.launch, trace_dir=str(folder))
    undo = type(world._undo)()
    traced = dataclasses.replace(
        world, launch=launch, observers=[], _undo=undo, _ended=type(world._ended)()
    )
    torch.manual_seed(3)
    model = torch.nn.Linear(5, 3)
    rate = torch.optim.SGD(model.parameters(), lr=0.1)
    more = {"overlap": True, "bucket_bytes": 16} if world.size > 1 else {}
    replica = hpc.distribute(traced, model, rate, **more)
    loader = hpc.Loader(traced, torch.ones(8 * world.size, 5), global_batch=2 * world.size)
    for batch in loader:
        replica.backward(replica(batch).sum(), num_samples=len(batch))
        replica.step()
    undo.close()
    world.comm.Barrier()
    assert traced.observers == []
    traces = read_folder(folder)
    assert [trace.rank for trace in traces] == list(range(world.size))
    for trace in traces:
        assert trace.is_whole
        phases = [event.name for event in trace.events if event.kind == "phase"]
        counts = {name: phases.count(name) for name in phases}
        steps = {"forward": 4, "backward": 4, "exchange": 4, "update": 4}
        assert counts == {"input": 5, **steps}
        assert [e.name for e in trace.events if e.kind == "step"] == ["1", "2", "3", "4"]
    with gzip.open(folder / "trace.json.gz") as file:
        document = json.load(file)
    assert complaints(document) == []
    kinds = {record["ph"] for record in document["traceEvents"]}
    assert kinds >= ({"X", "M", "b", "e", "s", "f"} if world.size > 1 else {"X", "M"})
