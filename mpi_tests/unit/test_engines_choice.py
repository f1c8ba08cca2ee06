"""Which engine is chosen, what Horovod is told, and the worker behind asynchronous calls."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import fields
from importlib import import_module

import pytest
import torch

from hpctrain.engines import ENGINES, HorovodOptions, HorovodState, choose
from hpctrain.engines.horovod_options import to_environment
from hpctrain.engines.worker import Worker
from hpctrain.errors import ConfigError

NCCL = HorovodState(built=True, nccl=True)
PLAIN = HorovodState(built=True)
MISSING = HorovodState(built=False, why="Horovod is not installed")


@pytest.mark.parametrize(
    ("kind", "size", "horovod", "shared", "name", "word"),
    [
        ("cpu", 1, MISSING, False, "local", "one rank"),
        ("cuda", 1, NCCL, False, "local", "one rank"),
        ("cpu", 4, NCCL, False, "mpi", "CPUs"),
        ("cuda", 4, NCCL, False, "horovod", "NCCL"),
        ("cuda", 4, PLAIN, False, "torch", "without NCCL"),
        ("cuda", 4, MISSING, False, "torch", "not installed"),
        ("cuda", 4, NCCL, True, "mpi", "share a GPU"),
        ("xpu", 4, MISSING, False, "torch", "GPUs"),
    ],
)
def test_auto(kind, size, horovod, shared, name, word):
    choice = choose("auto", device_kind=kind, size=size, horovod=horovod, shared_devices=shared)
    assert choice.name == name
    assert word in choice.reason


@pytest.mark.parametrize(
    ("name", "kind", "horovod", "shared", "words"),
    [
        ("nccl", "cpu", PLAIN, False, ["'nccl'", "auto, local, mpi, horovod, torch"]),
        ("local", "cpu", PLAIN, False, ["there are 4", "mpi"]),
        ("horovod", "cpu", MISSING, False, ["not installed", "hpctrain horovod build"]),
        ("horovod", "cuda", PLAIN, False, ["without NCCL", "horovod build --cuda"]),
        ("horovod", "cuda", NCCL, True, ["share a GPU", "engine='mpi'"]),
        ("torch", "cuda", PLAIN, True, ["share a GPU", "engine='mpi'"]),
    ],
)
def test_refusals_name_the_cure(name, kind, horovod, shared, words):
    with pytest.raises(ConfigError) as caught:
        choose(name, device_kind=kind, size=4, horovod=horovod, shared_devices=shared)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "local"])
def test_what_is_asked_for_is_taken(name):
    choice = choose(name, device_kind="cpu", size=4, horovod=PLAIN)
    assert (choice.name, choice.reason) == (name, "asked for")


def test_every_engine_has_a_factory():
    for place in ENGINES.values():
        module, function = place.split(":")
        assert callable(getattr(import_module(module), function))


def test_choosing_imports_neither_torch_nor_mpi():
    program = (
        "import sys, hpctrain.engines as e; e.choose('auto', device_kind='cpu', size=2); "
        "raise SystemExit(bool({'torch', 'mpi4py.MPI', 'horovod'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_options_become_variables():
    assert to_environment(HorovodOptions()) == {}
    options = HorovodOptions(
        fusion_threshold_bytes=1 << 20,
        cycle_time_ms=0.5,
        group_fusion=False,
        hierarchical_allreduce=True,
        autotune=True,
        autotune_log="tune.csv",
    )
    assert to_environment(options) == {
        "HOROVOD_FUSION_THRESHOLD": "1048576",
        "HOROVOD_CYCLE_TIME": "0.5",
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "tune.csv",
    }


def test_every_option_has_a_variable():
    for option in fields(HorovodOptions):
        value = "x" if option.type == "str | None" else 1
        needed = {} if option.name == "autotune" else {"autotune": True}
        options = HorovodOptions(**{option.name: value}, **needed)
        assert len(to_environment(options)) == 1 + len(needed)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"fusion_threshold_bytes": -1}, "fusion_threshold_bytes=-1"),
        ({"cycle_time_ms": 0}, "above 0"),
        ({"num_nccl_streams": 0}, "at least 1"),
        ({"autotune_log": "x"}, "without autotune=True"),
        ({"hierarchical_allreduce": True, "torus_allreduce": True}, "choose one"),
    ],
)
def test_options_that_make_no_sense_are_refused(given, word):
    with pytest.raises(ConfigError, match=word):
        HorovodOptions(**given)


def test_the_worker_keeps_the_order_and_passes_errors_on():
    worker = Worker("test", torch.device("cpu"))
    seen, gate = [], threading.Event()
    worker.run(lambda: seen.append(threading.current_thread() is threading.main_thread()))
    first = worker.submit(gate.wait)
    jobs = [worker.submit(lambda i=i: seen.append(i)) for i in range(5)]
    failing = worker.submit(lambda: 1 / 0)
    threading.Timer(0.05, gate.set).start()
    worker.run(lambda: seen.append("last"))  # behind those that wait
    assert seen == [True, 0, 1, 2, 3, 4, "last"]
    for job in (first, *jobs):
        job.wait()
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    worker.stop()
    worker.stop()
