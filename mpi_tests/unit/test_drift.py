"""Digests see every flipped bit, the odd rank is found, and the message says how it differs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hpctrain.faults.sentinel import (
    describe_difference,
    digest,
    digest_all,
    find_odd,
    render,
    watched_names,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
DTYPES += [torch.uint8, torch.complex64, torch.complex128]


def sample(dtype, shape):
    generator = torch.Generator().manual_seed(3)
    size = torch.empty(0, dtype=dtype).element_size()
    values = torch.randint(0, 256, (*shape, size), generator=generator)
    if dtype is torch.bool:
        return values[..., 0] > 127
    return values.to(torch.uint8).reshape(*shape[:-1], -1).view(dtype)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    data=st.data(),
)
def test_every_single_bit_changes_the_digest(dtype, shape, data):
    tensor = sample(dtype, shape)
    changed = tensor.clone()
    octets = changed.view(-1).view(torch.uint8)
    at = data.draw(st.integers(0, len(octets) - 1))
    octets[at] ^= 1 << (0 if dtype is torch.bool else data.draw(st.integers(0, 7)))
    assert digest(tensor).tolist() == digest(tensor.clone()).tolist()
    assert digest(tensor).tolist() != digest(changed).tolist()


@settings(max_examples=30)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 1000))
def test_changes_that_cancel_in_a_sum_are_seen(one, other, amount):
    words = torch.arange(31, dtype=torch.int64) * 1_000_003
    changed = words.clone()
    changed[one] += amount
    changed[other] -= amount
    assert (digest(words).tolist() == digest(changed).tolist()) == (one == other)


def test_the_digest_depends_on_values_and_not_on_how_they_lie():
    base = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    shifted = torch.cat([torch.zeros(1), base.reshape(-1)])[1:].view(7, 6)
    wanted = digest(base).tolist()
    for same in (shifted, base.t().contiguous().t(), nn.Parameter(base)):
        assert digest(same).tolist() == wanted
    assert digest(torch.empty(0)).tolist() == [0, 0]
    assert digest(torch.tensor(1.0)).tolist() != digest(torch.tensor(-1.0)).tolist()
    assert digest_all([base, None, torch.empty(0)]) == [*wanted, -1, -1, 0, 0]


@given(st.lists(st.sampled_from("ab"), min_size=2, max_size=9))
def test_the_minority_is_odd(digests):
    odd = find_odd("w", digests)
    rare = min("ab", key=lambda name: (digests.count(name), name != digests[0]))
    if digests.count("a") != digests.count("b"):
        assert odd.ranks == tuple(r for r, one in enumerate(digests) if one == rare)
        assert odd.majority
    else:
        assert odd.reference == 0
        assert not odd.majority
    assert odd.reference not in odd.ranks


def test_differences_in_words():
    one = torch.tensor([0.5, 1.0, 2.0])
    flipped = one.clone()
    flipped.view(torch.int32)[1] ^= 1 << 23
    assert describe_difference(flipped, one) == (
        "1 of 3 elements differ, element 1 is 0.5 instead of 1.0, 1 bit apart"
    )
    assert describe_difference(one, one.clone()) == ""
    assert describe_difference(one.double(), one) == "is float64 (3,) instead of float32 (3,)"
    assert describe_difference(None, one) == "is missing on one side"


def test_the_message_names_parameter_rank_and_step():
    odd = [find_odd(name, "aaba") for name in ("fc.weight", "fc.bias")]
    details = ["", "", "1 of 3 elements differ, element 1 is 0.5 instead of 1.0, 1 bit apart", ""]
    text = render(odd, details, ["n0", "n0", "n1", "n1"], step=300, num_more=2)
    assert text == (
        "step 300: fc.weight of rank 2 of 4 differs from that of the others; rank 2 on n1: 1 of 3 "
        "elements differ, element 1 is 0.5 instead of 1.0, 1 bit apart; also fc.bias and 2 more; "
        "one flipped bit suggests faulty memory: have the node checked, and resume from a "
        "checkpoint "
        "before this step"
    )
    two = render([find_odd("w", "ab")], ["", "3 of 3 elements differ"], ["a", "b"], step=1)
    assert "w of rank 1 of 2 differs from that of rank 0 (there is no majority to show which" in two
    assert "look for updates" in two


def test_statistics_of_batches_are_not_compared():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("scale", torch.ones(1))
    model.register_buffer("cache", torch.ones(1))
    names = watched_names(model, exclude=["ca*"])
    assert names == ("0.weight", "0.bias", "1.weight", "1.bias", "scale")
