"""Control words and shares: what ranks conclude from sums, and what loaders tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.replica.control_words import ControlWords, check_sums, digest_options, own_words
from hpctrain.world.shares import Shares


def words(rank=0, *, sequence=0, present=True, counted=0.0, plain=False, options=0, **more):
    return own_words(
        rank=rank,
        weight=1.0,
        calls=1.0,
        present=present,
        counted=counted,
        plain=plain,
        sequence=sequence,
        options=options,
        **{"finding": None, **more},
    )


def added(ranks, dtype=torch.float32):
    """As they travel: in float32 at the worst."""
    total = torch.zeros(len(ControlWords._fields), dtype=dtype)
    for one in ranks:
        total += torch.tensor(one, dtype=dtype)
    return ControlWords(*total.tolist())


@given(st.integers(0, 10**6), st.integers(1, 300))
def test_ranks_in_the_same_step_agree(sequence, size):
    ranks = [words(rank, sequence=sequence) for rank in range(size)]
    check_sums(ranks[0], added(ranks), size=size, step=0)


@given(st.lists(st.integers(-7, 7), min_size=2, max_size=40), st.integers(7, 10**6))
def test_ranks_in_different_steps_are_noticed_by_every_rank(offsets, sequence):
    ranks = [words(rank, sequence=sequence + offset) for rank, offset in enumerate(offsets)]
    sums = added(ranks)
    for mine in ranks:
        if len(set(offsets)) == 1:
            check_sums(mine, sums, size=len(ranks), step=3)
        else:
            with pytest.raises(CollectiveError, match=r"not in the same step.*has made 3"):
                check_sums(mine, sums, size=len(ranks), step=3)


def test_ranks_that_ran_out_of_data_are_in_no_step():
    ranks = [words(0, sequence=5), words(1, sequence=2, present=False), words(2, sequence=5)]
    for mine in ranks:
        check_sums(mine, added(ranks), size=3, step=5)


def test_who_was_interrupted_or_counted_otherwise():
    ranks = [words(0), words(1)._replace(interrupted=1.0), words(2)]
    with pytest.raises(CollectiveError, match="interrupted on 1 of 3 ranks"):
        check_sums(ranks[0], added(ranks), size=3, step=0)
    ranks = [words(0, counted=1.0), words(1)]
    with pytest.raises(ConfigError, match="this rank did not give it"):
        check_sums(ranks[1], added(ranks), size=2, step=0)


def test_ranks_with_different_kinds_of_backward_are_refused():
    ranks = [words(0, plain=True), words(1), words(2, present=False)]
    with pytest.raises(ConfigError, match="on 1 of 2 ranks"):
        check_sums(ranks[0], added(ranks), size=3, step=0)
    both = [words(0, plain=True), words(1, plain=True), words(2, present=False)]
    check_sums(both[2], added(both), size=3, step=0)


def test_a_finding_names_its_rank():
    sums = added([words(0), words(1), words(2, finding="the loss is nan")])
    assert (sums.nonfinite, sums.nonfinite_rank) == (1.0, 2.0)


def note(shares, num_samples, global_samples=4):
    shares.note(num_samples=num_samples, global_samples=global_samples, size=2)


def test_a_share_is_of_the_batch_in_hand():
    shares = Shares()
    assert shares.take() == 1.0
    for num_samples, share in ((3, 1.5), (1, 0.5), (2, 1.0)):
        note(shares, num_samples)
        assert shares.take() == shares.take() == share
    shares.forget()
    assert shares.take() == 1.0


def test_even_batches_may_wait_and_be_left_out():
    shares = Shares()
    for _ in range(5):
        note(shares, 2)
    assert [shares.take() for _ in range(3)] == [1.0] * 3
    shares.end_epoch()
    assert shares.take() == 1.0
    assert shares.num_batches == 5


@pytest.mark.parametrize("given", [(2, 1), (1, 2), (3, 2, 2)])
def test_which_of_several_uneven_batches_is_not_guessed(given):
    shares = Shares()
    for num_samples in given:
        note(shares, num_samples)
    with pytest.raises(ConfigError, match=rf"{len(given)} were returned.*num_samples"):
        shares.take()


def test_a_loop_that_looks_ahead_is_noticed_before_an_uneven_batch():
    shares = Shares()
    note(shares, 2)
    note(shares, 2)
    assert shares.take() == 1.0
    note(shares, 1)
    with pytest.raises(ConfigError, match="unknown which"):
        shares.take()


def test_an_epoch_with_uneven_batches_leaves_none_in_hand():
    shares = Shares()
    note(shares, 1)
    assert shares.take() == 0.5
    shares.end_epoch()
    with pytest.raises(ConfigError, match="0 were returned"):
        shares.take()


@pytest.mark.parametrize("loads", [(1, 0), (0, 1, 0), (2, 1, 1, 0)])
def test_a_state_that_was_loaded_on_some_ranks_only_is_noticed_by_every_rank(loads):
    ranks = [words(rank, loads=number) for rank, number in enumerate(loads)]
    for mine in ranks:
        with pytest.raises(ConfigError, match=r"loaded into the optimizer.*on some ranks and not"):
            check_sums(mine, added(ranks), size=len(ranks), step=0)
    alike = [words(rank, loads=max(loads)) for rank in range(3)]
    check_sums(alike[0], added([*alike, words(3, present=False)]), size=4, step=0)


def test_learning_rates_are_compared():
    ranks = [words(rank, options=digest([{"lr": 0.1 * (1 + rank)}])) for rank in range(2)]
    with pytest.raises(ConfigError, match="learning rates"):
        check_sums(ranks[0], added(ranks), size=2, step=0)


def digest(groups, parameters=(), number=0):
    return digest_options(groups, parameters, number=number)


def test_the_digest_of_options():
    group = {"lr": 0.1, "betas": (0.9, 0.99), "params": [torch.zeros(1)], "fused": None}
    assert digest([group]) == digest([dict(group, params=[torch.ones(2)])])
    for other in ({"lr": 0.2}, {"betas": (0.9, 0.98)}, {"maximize": True}, {"fused": True}):
        assert digest([group | other]) != digest([group])
    for kind in (torch.tensor, np.float32, int, float):
        assert digest([{"lr": kind(1)}]) != digest([{"lr": kind(2)}])
    trained, frozen = torch.zeros(1, requires_grad=True), torch.zeros(1)
    assert digest([group], [trained, frozen]) != digest([group], [trained, trained])
    # Four bits are compared: a difference that they miss once is not missed again and again.
    missed = [
        digest([{"lr": 1.0}], number=n) % 16 == digest([{"lr": 2.0}], number=n) % 16
        for n in range(64)
    ]
    assert 0 < sum(missed) < 16
