"""More than 31 bits can count: shares and columns over 2 GiB, really moved (`make test-all`)."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

import hpctrain as hpc
from mpi_tests.full import FULL

ROW_BYTES = 1 << 20
NUM_ROWS = 4608  # 4.5 GiB: over 2 GiB for each of two ranks
NEEDED_BYTES = 14 << 30

pytestmark = pytest.mark.skipif(not FULL, reason="takes 14 GiB of memory; set MPI_TESTS_FULL=1")


def content(rows):
    """What is in every byte of a row."""
    return (np.asarray(rows) * 31 % 251).astype(np.uint8)


def assert_rows(data, rows):
    """Both ends of each row, and all of a few."""
    assert len(data) == len(rows)
    assert np.array_equal(data[:, 0], content(rows))
    assert np.array_equal(data[:, -1], content(rows))
    for place in range(0, len(rows), 500):
        assert np.all(data[place] == content(rows[place]))


@pytest.fixture
def room(world):
    """Two ranks, and a machine with enough memory."""
    free = world.comm.bcast(psutil.virtual_memory().available, root=0)
    shm = world.comm.bcast(psutil.disk_usage("/dev/shm").free, root=0)
    if world.size != 2 or free < NEEDED_BYTES or shm < NUM_ROWS * ROW_BYTES * 1.1:
        pytest.skip(f"wants two ranks and 14 GiB; {world.size} and {free >> 30} GiB are here")


def test_shares_over_two_gib_go_out_and_come_back(world, room):
    data = None
    if world.rank == 0:
        data = np.repeat(content(np.arange(NUM_ROWS))[:, None], ROW_BYTES, axis=1)
    shard = hpc.scatter(world, data, keep_whole=False)
    del data
    assert shard.num_rows * ROW_BYTES > 2**31
    assert_rows(shard.data, shard.indices)
    hpc.reshuffle(world, shard)
    assert_rows(shard.data, shard.indices)
    whole = hpc.gather(world, shard.data, shard.indices, chunk_bytes=3 << 30)
    if world.rank == 0:
        assert_rows(whole, np.arange(NUM_ROWS))
    else:
        assert whole is None


def test_one_copy_of_more_than_four_gib(world, room):
    data = None
    if world.rank == 0:
        data = np.repeat(content(np.arange(NUM_ROWS))[:, None], ROW_BYTES, axis=1)
    shared = hpc.share(world, data)
    del data
    assert_rows(shared.data, np.arange(NUM_ROWS))
