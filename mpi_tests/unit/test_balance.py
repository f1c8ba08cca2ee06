"""Things dealt largest first, and waiting by looking again: the one mechanism for each."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.balance import largest_first
from hpctrain.errors import TimedOutError
from hpctrain.world.polling import finish, poll


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_everything_is_dealt_once_and_parts_differ_by_the_largest_thing_at_most(sizes, num_parts):
    parts = largest_first(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in parts)
    loads = [sum(sizes[index] for index in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_equal_things_go_in_order():
    assert largest_first([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
    assert largest_first([1, 9, 2, 8], 2) == [[0, 1], [2, 3]]


def test_polling_sees_what_is_done_and_ends_in_time():
    looks = iter([False, False, True])
    assert poll(lambda: next(looks), timeout_s=60)
    began = time.monotonic()
    assert not poll(lambda: False, timeout_s=0.05)
    assert 0.05 < time.monotonic() - began < 30


class _Pending:
    cancelled = False

    def Test(self):
        return False

    def Cancel(self):
        self.cancelled = True


def test_a_message_that_does_not_come_is_cancelled_and_its_rank_named():
    pending = _Pending()
    with pytest.raises(TimedOutError, match=r"timed out after 0.01 s waiting for rank 3 to send"):
        finish([pending], "rank 3 to send rows", timeout_s=0.01)
    assert pending.cancelled
