"""Ranks raise together, and a missing rank is named instead of waited for."""

from __future__ import annotations

import time

import pytest

from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.world import agree, roll_call


def test_nothing_wrong_raises_nothing(comm):
    agree(comm, None)


def test_trouble_on_one_rank_is_raised_on_all(comm):
    last = comm.Get_size() - 1
    trouble = "the file is missing" if comm.Get_rank() == last else None
    with pytest.raises(ConfigError) as caught:
        agree(comm, trouble, error=ConfigError)
    assert str(caught.value) == f"rank {last} of {comm.Get_size()}: the file is missing"


def test_equal_trouble_is_told_once(comm):
    size = comm.Get_size()
    with pytest.raises(CollectiveError) as caught:
        agree(comm, "no data")
    ranks = "rank 0" if size == 1 else f"ranks 0-{size - 1}"
    assert str(caught.value) == f"{ranks} of {size}: no data"


@pytest.mark.parametrize("late", ["first", "last"])
def test_a_missing_rank_is_named_in_time(comm, late):
    size = comm.Get_size()
    absent = 0 if late == "first" else size - 1
    own = comm.Dup()
    if size == 1:
        roll_call(own, "alone", timeout_s=0.1)
    elif comm.Get_rank() != absent:
        started = time.monotonic()
        with pytest.raises(
            CollectiveError, match=rf"meeting: timed out after 0.5 s waiting for rank {absent} of"
        ):
            roll_call(own, "meeting", timeout_s=0.5)
        assert time.monotonic() - started < 7
    comm.Barrier()
    # `own` has an unanswered message in it now, so it is left to MPI_Finalize.
