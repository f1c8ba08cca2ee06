"""What a rehearsal says of n ranks is what n ranks do; and what they measure makes a machine."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import hpctrain as hpc
from hpctrain.checkpoint import Store
from hpctrain.checkpoint.layout import LEAST_PART_BYTES, Item
from hpctrain.errors import ConfigError
from hpctrain.predict import RankLayout
from hpctrain.predict.fit import fit_costs
from hpctrain.predict.measuring import measure
from hpctrain.predict.profiling import Subject
from hpctrain.predict.rehearsal import Files, Loading, State, TrainingRun, rehearse
from mpi_tests.loader_plan import samples_of


@pytest.mark.parametrize(
    ("samples", "batch", "drop_last"),
    [(64, 16, False), (61, 10, False), (23, 6, True), (3, 7, False)],
)
def test_batches(world, samples, batch, drop_last):
    training = TrainingRun(num_samples=samples, global_batch=batch, drop_last=drop_last)
    loader = hpc.Loader(world, np.arange(samples), global_batch=batch, drop_last=drop_last)
    got = [len(part) for part in loader]
    assert got == list(samples_of(training, rank=world.rank, num_ranks=world.size))
    every = world.comm.allgather(got)
    loading = Loading.of(training, world.size)
    assert len(got) == loading.num_batches
    for share, place in ((loading.full, 0), (loading.last, -1)):
        counts = [each[place] for each in every]
        assert (share.fewest, share.most) == (min(counts), max(counts))
        assert (share.num_empty, share.global_samples) == (counts.count(0), sum(counts))


def test_the_loader_refuses_what_a_rehearsal_calls_an_error(world):
    training = TrainingRun(num_samples=20, global_batch=3)
    layout = RankLayout(num_ranks=world.size, ranks_per_node=world.local_size)
    state = State(weights=(Item(name="w", num_elements=1, element_bytes=4),))
    if rehearse(training, state, layout).is_sound:
        assert len(hpc.Loader(world, np.arange(20), global_batch=3)) == 7
    else:
        assert world.size > 3
        with pytest.raises(ConfigError, match="without samples in every step"):
            hpc.Loader(world, np.arange(20), global_batch=3)


def test_parts_of_a_checkpoint(world, tmp_path):
    path = world.comm.bcast(str(tmp_path), root=0)
    elements = LEAST_PART_BYTES // 4 * 2 + 5
    weights = {"w": np.zeros(elements, dtype=np.float32)}
    with_store = Store(world, path, asynchronous=False)
    with_store.save(weights, step=1, wait=True)
    (found,) = [entry for entry in with_store.directory.iterdir() if entry.is_dir()]
    manifest = json.loads((found / "manifest.json").read_text())
    with_store.close()
    state = State(weights=(Item(name="w", num_elements=elements, element_bytes=4),), state_copies=0)
    files = Files.of(state, RankLayout(num_ranks=world.size, ranks_per_node=world.local_size))
    assert len(manifest["parts"]) == len(files.writers)


def test_measurements_are_the_same_on_all_ranks_and_make_costs(world):
    model = torch.nn.Linear(16, 16)
    subject = Subject(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda: model(torch.ones(2, 16)).square().mean(),
        batch=2,
    )
    found = measure(world, ["mpi"], sizes=(4096, 1 << 20), subject=subject)
    assert world.comm.allgather(found) == [found] * world.size
    assert found.compute.ranks_on_node == world.local_size
    assert len(found.collectives) == (2 if world.size > 1 else 0)
    if world.size > 1:
        costs = fit_costs(found.collectives, "hierarchical")
        assert costs.intra.bytes_per_s > 1e6
        (trained,) = found.training
        assert (trained.num_ranks, trained.gradient_bytes) == (world.size, 4 * (16 * 16 + 16))
