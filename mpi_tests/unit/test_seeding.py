"""The rule of the random streams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.world.seeding import Streams, derive_seed

seeds = st.integers(0, 2**63 - 1)


@given(seeds, st.text(max_size=8), st.lists(st.integers(0, 10**6), max_size=3))
def test_a_seed_depends_on_all_of_its_key_and_nothing_else(seed, stream, indices):
    one = derive_seed(seed, stream, *indices)
    assert one == derive_seed(seed, stream, *indices)
    assert 0 <= one < 2**63
    assert one != derive_seed(seed, stream, *indices, 0)
    assert one != derive_seed(seed + 1, stream, *indices)
    assert one != derive_seed(seed, stream + "x", *indices)


def test_ranks_have_streams_of_their_own_and_share_the_common_ones():
    ranks = [Streams(7, rank) for rank in range(50)]
    assert len({streams.seed_for("dropout") for streams in ranks}) == 50
    assert len({streams.seed_for("init", per_rank=False) for streams in ranks}) == 1
    assert ranks[3].numpy("data", 2).random() == Streams(7, 3).numpy("data", 2).random()
    assert ranks[3].torch("data").initial_seed() == ranks[3].seed_for("data")


def test_the_rule_is_frozen():
    # Checkpoints depend on it: a change of the rule changes every resumed run.
    assert derive_seed(7, "init") == 7605269588607525013
    assert derive_seed(7, "rank", 2, 1024) == 8877926567630096118


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ConfigError, match=str(seed)):
        Streams(seed, 0)
