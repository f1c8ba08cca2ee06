"""What ranks say at a step boundary survives the maximum over all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.faults.boundary import NUM_SLOTS, Agreed, BoundaryMessage, decode, encode, merge

FLAGS = ("save", "stop", "failure")
messages = st.builds(
    BoundaryMessage,
    signal=st.none() | st.sampled_from(["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT"]),
    **dict.fromkeys(FLAGS, st.booleans()),
    left_s=st.none() | st.floats(0, 1e7, allow_subnormal=False),
)


@given(st.lists(messages, min_size=1, max_size=9))
def test_all_ranks_know_who_said_what(said):
    size = len(said)
    slots = [encode(word, rank, size) for rank, word in enumerate(said)]
    assert all(len(one) == NUM_SLOTS for one in slots)
    agreed = decode(merge(slots), size)
    for name in FLAGS:
        ranks = [rank for rank, word in enumerate(said) if getattr(word, name)]
        told = getattr(agreed, name)
        assert (told.rank if told else None) == (ranks[0] if ranks else None)
    signals = [(rank, word.signal) for rank, word in enumerate(said) if word.signal]
    told = (agreed.signal_by.rank, agreed.signal) if agreed.signal_by else None
    assert told == (signals[0] if signals else None)
    left = [word.left_s for word in said if word.left_s is not None]
    assert agreed.left_s == (min(left) if left else None)
    nothing = not signals and not any(getattr(word, name) for word in said for name in FLAGS)
    assert (agreed == Agreed(left_s=agreed.left_s)) == nothing


@given(st.integers(0, 2**20 - 1), messages)
def test_the_largest_job_loses_no_bit(rank, message):
    size = 2**20
    agreed = decode(merge([encode(BoundaryMessage(), 0, size), encode(message, rank, size)]), size)
    assert agreed.signal == message.signal
    for told in (agreed.signal_by, agreed.save, agreed.failure):
        assert told is None or told.rank == rank


def test_silence():
    assert decode(encode(BoundaryMessage(), 2, 3), 3) == Agreed()
    with pytest.raises(ConfigError, match="signal='USR2' is not the name of a signal"):
        encode(BoundaryMessage(signal="USR2"), 0, 1)
