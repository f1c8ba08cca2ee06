"""What ranks say at a step boundary survives the maximum over all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.faults.word import NUM_SLOTS, Agreed, Word, decode, encode, merge

FLAGS = ("save", "stop", "failure", "nonfinite")
times = st.none() | st.floats(0, 4000, allow_subnormal=False)
words = st.builds(
    Word,
    signal=st.none() | st.sampled_from(["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT"]),
    **dict.fromkeys(FLAGS, st.booleans()),
    step_s=times,
    worked_s=times,
    left_s=st.none() | st.floats(0, 1e7, allow_subnormal=False),
)


@given(st.lists(words, min_size=1, max_size=9))
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
    steps = [word.step_s for word in said if word.step_s is not None]
    assert agreed.step_s == (max(steps) if steps else None)
    worked = [word.worked_s for word in said if word.worked_s is not None]
    assert agreed.shortest_s == (min(worked) if worked else None)
    assert (agreed.longest_s is None) == (not worked)
    if agreed.slowest is not None:
        assert agreed.longest_s == pytest.approx(max(worked), abs=1e-6)
        assert said[agreed.slowest.rank].worked_s == pytest.approx(max(worked), abs=1e-6)
    left = [word.left_s for word in said if word.left_s is not None]
    assert agreed.left_s == (min(left) if left else None)
    assert agreed.quiet == (not signals and all(getattr(agreed, name) is None for name in FLAGS))


@given(st.integers(0, 2**20 - 1), words)
def test_the_largest_job_loses_no_bit(rank, word):
    size = 2**20
    agreed = decode(merge([encode(Word(), 0, size), encode(word, rank, size)]), size)
    assert agreed.signal == word.signal
    for told in (agreed.signal_by, agreed.save, agreed.slowest):
        assert told is None or told.rank == rank


def test_silence():
    assert decode(encode(Word(), 2, 3), 3) == Agreed()
    assert decode(encode(Word(worked_s=1e9), 0, 1), 1).longest_s == pytest.approx(2**32 / 1e6)
    with pytest.raises(ConfigError, match="signal='USR2' is no signal"):
        encode(Word(signal="USR2"), 0, 1)
