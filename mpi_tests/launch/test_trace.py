"""`hpctrain run --trace`: one timeline of all ranks, which names the step that was slowest."""

from __future__ import annotations

import gzip
import json

from mpi_tests.launch.commands import HPCTRAIN, run
from mpi_tests.trace_format import complaints

SCRIPT = """
import time, torch, hpctrain as hpc
from hpctrain.world.observing import phase

with hpc.init(seed=1) as world:
    model = torch.nn.Linear(4, 2)
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1, 9):
        value = replica(torch.ones(3, 4)).sum()
        if step == 6 and world.rank == 1:
            with phase(world.observers, "input"):
                time.sleep(0.45)
        replica.backward(value)
        replica.step()
"""


def test_a_traced_run_names_its_slowest_step_and_who_held_it_up(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "trace"
    done = run(*HPCTRAIN, "run", "-n", "2", "--trace", folder, script, timeout_s=120)
    assert done.code == 0, done.text
    assert "the slowest step is number 6" in done.err
    assert "rank 1 held it up, input took 4" in done.err
    with gzip.open(folder / "trace.json.gz") as file:
        document = json.load(file)
    assert complaints(document) == []
    facts = json.loads((folder / "trace-summary.json").read_text())
    assert (facts["num_ranks"], facts["missing"], facts["cut_off"]) == (2, [], [])
    assert (facts["slowest"]["step"], facts["slowest"]["rank"]) == (6, 1)
    assert 0.4 <= facts["slowest"]["seconds"] < 5
    page = tmp_path / "page.html"
    told = run(*HPCTRAIN, "report", folder, "-o", page)
    assert told.code == 0, told.text
    assert "slowest step is number 6" in page.read_text()
