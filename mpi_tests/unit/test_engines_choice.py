"""Which engine is chosen, what Horovod is told, and the worker behind asynchronous calls."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import hpctrain
from hpctrain.engines import (
    Engine,
    HorovodOptions,
    HorovodState,
    capabilities_of,
    choose,
    communicating_names,
    engine_names,
)
from hpctrain.engines.horovod_options import probe_horovod, to_environment
from hpctrain.engines.mpi import Worker
from hpctrain.engines.registry import BUILT_IN, GROUP, load_engine
from hpctrain.errors import ConfigError
from mpi_tests.built import OUTSIDE

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


@pytest.mark.parametrize("name", communicating_names())
def test_what_is_asked_for_is_taken(name):
    choice = choose(name, device_kind="cpu", size=4, horovod=PLAIN)
    assert (choice.name, choice.reason) == (name, "asked for")


def test_every_engine_has_a_class_that_says_the_same_of_itself():
    for name in BUILT_IN:
        if name == "horovod" and not probe_horovod().built:
            continue
        cls = load_engine(name)
        assert issubclass(cls, Engine)
        assert (cls.name, cls.capabilities) == (name, capabilities_of(name))


def test_an_engine_of_another_package_is_found_by_its_entry_point(monkeypatch):
    assert "outside" not in engine_names()
    monkeypatch.syspath_prepend(str(OUTSIDE))
    assert engine_names()[-1] == communicating_names()[-1] == "outside"
    choice = choose("outside", device_kind="cpu", size=4)
    assert (choice.name, choice.reason) == ("outside", "asked for")
    assert load_engine("outside").capabilities == capabilities_of("outside")
    assert capabilities_of("outside").topology == "halving"
    with pytest.raises(ConfigError, match="serves cpu, and the ranks compute on cuda"):
        choose("outside", device_kind="cuda", size=4)
    with pytest.raises(ConfigError, match=r"choose one of auto, local, mpi, .*, outside"):
        choose("inside", device_kind="cpu", size=4)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("no_such_module:Engine", "cannot be imported"),
        ("math:pi", "must be a subclass of"),
        ("outside_engine:OutsideEngine", "has name='outside'"),
    ],
)
def test_an_entry_point_that_is_no_engine_is_refused(tmp_path, monkeypatch, value, word):
    info = tmp_path / "broken_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nbroken = {value}\nmpi = math:pi\n")
    monkeypatch.syspath_prepend(str(OUTSIDE))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "broken" in engine_names()  # naming it imports nothing
    with pytest.raises(ConfigError, match=word):
        choose("broken", device_kind="cpu", size=2)
    assert choose("mpi", device_kind="cpu", size=2).name == "mpi"  # ours keeps its name


def test_the_configuration_and_the_predictor_know_it(monkeypatch):
    program = (
        "from hpctrain.tables import keys_of;"
        "from hpctrain.train.config.running import EngineChoice;"
        "from hpctrain.predict import RankLayout, default_exchange;"
        "words = {key.name: key.words for key in keys_of(EngineChoice)};"
        "assert words['name'] == ('auto', 'local', 'mpi', 'horovod', 'torch', 'outside'), words;"
        "layout = RankLayout(num_ranks=4, ranks_per_node=4);"
        "print(default_exchange('outside', layout, gradient_bytes=1 << 26, on_gpu=False).overlap)"
    )
    paths = os.pathsep.join([str(OUTSIDE), *sys.path])
    monkeypatch.setenv("PYTHONPATH", paths)
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"


def engine_lists(tree):
    """Where a list of engines' names is written down."""
    others = set(BUILT_IN) - {"mpi"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            words = {each.value for each in node.elts if isinstance(each, ast.Constant)}
            if "mpi" in words and words & others:
                yield node.lineno


def test_nothing_outside_the_room_knows_which_engines_there_are():
    package = Path(hpctrain.__file__).parent
    classes = {line.place.partition(":")[2] for line in BUILT_IN.values()} - {"HorovodEngine"}
    for path in package.rglob("*.py"):
        if package / "engines" not in path.parents:
            text = path.read_text()
            assert not [name for name in classes if name in text], path
            assert not list(engine_lists(ast.parse(text))), path


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
