"""Horovod's options reach Horovod itself: its own autotune log and timeline say so."""

from __future__ import annotations

import csv
import json

import pytest

from mpi_tests.built import BUILT
from mpi_tests.launch.commands import HPCTRAIN, run

CYCLE_MS, FUSION_MIB = 3, 5  # neither is a default, nor what autotune tries first

SCRIPT = """
import os, sys
import torch
import hpctrain as hpc
from hpctrain.engines import HorovodOptions
from hpctrain.replica import HorovodTraining

options = HorovodOptions(
    cycle_time_ms={cycle}, fusion_threshold_bytes={fusion} << 20, autotune=True,
    autotune_log=sys.argv[1], autotune_warmup_samples=1, autotune_steps_per_sample=1,
    timeline=sys.argv[2])
with hpc.init(seed=1, device="cpu", num_threads=1) as world:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = HorovodTraining(fusion="horovod", options=options)
    replica = hpc.distribute(world, model, optimizer, horovod=training, nonfinite="ignore")
    for _ in range(40):  # until autotune has written something
        for _ in range(50):
            replica.backward(replica(torch.ones(2, 8)).mean())
            replica.step()
        written = world.rank == 0 and len(open(sys.argv[1]).readlines()) > 2
        if world.comm.bcast(written):
            break
left = [name for name in os.environ if name.startswith("HOROVOD_")]
print("left behind:", left)
"""


@pytest.mark.skipif("horovod" not in BUILT, reason="Horovod is not built here")
def test_options_reach_horovod(tmp_path):
    path, log, timeline = (tmp_path / name for name in ("train.py", "tune.csv", "line.json"))
    path.write_text(SCRIPT.format(cycle=CYCLE_MS, fusion=FUSION_MIB))
    done = run(*HPCTRAIN, "run", "-n", "2", path, log, timeline)
    assert done.code == 0, done.text
    assert done.out.count("left behind: []") == 2, done.text
    with log.open() as lines:
        tried = list(csv.DictReader(lines))
    assert tried, "autotune has tried nothing"
    for row in tried:
        assert float(row["cycle_time_ms"]) == CYCLE_MS
        assert float(row["tensor_fusion_threshold"]) == FUSION_MIB
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    assert "MEMCPY_IN_FUSION_BUFFER" in {event.get("name") for event in events}
