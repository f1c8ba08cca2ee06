"""The clock of a step: every moment belongs to one phase, and what ranks timed is put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.replica.sweep import RankTimes, StepClock, StepTime, summarize
from hpctrain.world.observing import PHASES


class Hands:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def step(clock, hands, times, *, micro_batches=1, samples=8):
    """One step as a script makes it; `times` by phase."""
    for _ in range(micro_batches):
        hands.now_s += times["input"]
        clock.begin("forward")
        hands.now_s += times["forward"]
        clock.begin("backward")
        clock.count(samples)
        hands.now_s += times["backward"]
        around = clock.begin("exchange")
        hands.now_s += times["exchange"]
        clock.pause()
        clock.begin(around)
        clock.pause()
    hands.now_s += times["update"] / 2  # clipping by hand
    clock.begin("update")
    hands.now_s += times["update"] / 2
    clock.pause()
    return clock.finish()


@given(
    values=st.lists(st.floats(0.001, 10), min_size=5, max_size=5), micro_batches=st.integers(1, 4)
)
def test_every_moment_belongs_to_one_phase(values, micro_batches):
    hands = Hands()
    clock = StepClock(now=hands)
    times = dict(zip(PHASES, values, strict=True))
    assert step(clock, hands, times) is None  # the first contains what came before it
    began = hands.now_s
    taken = step(clock, hands, times, micro_batches=micro_batches)
    assert taken.step_s == pytest.approx(hands.now_s - began)
    for phase in PHASES[:-1]:
        assert taken.split_s[phase] == pytest.approx(times[phase] * micro_batches)
    assert taken.split_s["update"] == pytest.approx(times["update"])
    assert taken.num_samples == 8 * micro_batches
    assert taken.sees_forward


def test_a_model_that_is_called_directly_has_its_input_in_forward():
    hands = Hands()
    clock = StepClock(now=hands)
    clock.finish()
    hands.now_s += 3
    clock.begin("backward")
    clock.count(None)
    hands.now_s += 1
    clock.pause()
    clock.begin("update")
    clock.pause()
    taken = clock.finish()
    assert (taken.split_s["input"], taken.split_s["forward"]) == (0, 3)
    assert not taken.sees_forward
    assert taken.num_samples is None


def test_a_step_with_an_evaluation_does_not_count_and_the_next_one_does():
    hands = Hands()
    clock = StepClock(now=hands)
    times = dict.fromkeys(PHASES, 1.0)
    step(clock, hands, times)
    clock.spoil()
    assert step(clock, hands, times) is None
    assert step(clock, hands, times).step_s == 5


def taken(busy, exchange, samples=4):
    split = dict.fromkeys(PHASES, 0.0) | {"backward": busy, "exchange": exchange}
    return StepTime(step_s=busy + exchange, split_s=split, num_samples=samples, sees_forward=True)


def test_ranks_together_tell_straggling_samples_and_a_split_that_adds_up():
    late = [taken(3.0, 1.0)] * 8
    early = [taken(1.0, 3.0)] * 9  # one step more, as in the middle of an end
    ranks = [
        RankTimes(steps=tuple(each), memory_bytes=7, num_threads=2) for each in (early, early, late)
    ]
    report = summarize(ranks)
    assert report["step_s"] == [4.0] * 8
    assert report["straggling_s"] == 2.0
    assert report["samples_per_step"] == 12
    assert sum(report["split_s"].values()) == pytest.approx(4.0)
    assert report["split_s"]["exchange"] == pytest.approx((3 + 3 + 1) / 3)
    assert report["memory_bytes"] == [7, 7, 7]


def test_no_steps_and_no_samples_are_told_as_such():
    nothing = summarize([RankTimes(steps=(), memory_bytes=1, num_threads=1)])
    assert (nothing["step_s"], nothing["split_s"], nothing["samples_per_step"]) == ([], {}, None)
    uncounted = RankTimes(steps=(taken(1, 1, samples=None),), memory_bytes=1, num_threads=1)
    assert summarize([uncounted])["samples_per_step"] is None


def timed(samples):
    """One rank's steps, each as long as it has samples."""
    steps = [
        StepTime(
            step_s=0.01 * n,
            split_s=dict.fromkeys(PHASES, 0.002 * n),
            num_samples=n,
            sees_forward=True,
        )
        for n in samples
    ]
    return RankTimes(steps=tuple(steps), memory_bytes=1, num_threads=1)


def test_smaller_last_batches_are_not_averaged_into_the_batch():
    epoch = [128] * 5 + [88]
    report = summarize([timed(epoch * 3), timed(epoch * 3)])
    assert report["samples_per_step"] == 256  # was 242.7
    assert report["step_s"] == [1.28] * 15
    assert sum(report["split_s"].values()) == pytest.approx(1.28)
    assert summarize([timed([64, 40, 40] * 4)])["samples_per_step"] == 64  # even_last
    lengths = list(range(10, 30))  # batches by length have no usual size: all of them count
    assert summarize([timed(lengths)])["samples_per_step"] == pytest.approx(19.5)
    assert len(summarize([timed(lengths)])["step_s"]) == 20
