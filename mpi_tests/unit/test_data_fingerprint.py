"""Digests of samples: equal where samples are equal, different where they differ."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.alike import ReadReport, trouble_with_readings, trouble_with_streams
from hpctrain.data.fingerprint import digest_sample, is_read, show_sample
from hpctrain.data.stream import Opening

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False).filter(lambda x: x != 0),
    st.text(),
    st.binary(),
    st.lists(st.integers(0, 255), max_size=3).map(lambda v: np.array(v, np.uint8)),
    st.lists(st.integers(0, 255), max_size=3).map(lambda v: torch.tensor(v, dtype=torch.uint8)),
)
SAMPLES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


def canonical(sample):
    """The same content as text, by another way."""
    if isinstance(sample, torch.Tensor):
        return f"T{sample.dtype}{sample.tolist()}"
    if isinstance(sample, np.ndarray):
        return f"A{sample.dtype}{sample.tolist()}"
    if isinstance(sample, dict):
        return "{" + ",".join(f"{k!r}:{canonical(v)}" for k, v in sorted(sample.items())) + "}"
    if isinstance(sample, list):
        return "[" + ",".join(map(canonical, sample)) + "]"
    return f"{type(sample).__name__}{sample!r}"


@given(SAMPLES, SAMPLES)
def test_digests_are_equal_where_samples_are(one, other):
    assert digest_sample(one) == digest_sample(one)
    assert (digest_sample(one) == digest_sample(other)) == (canonical(one) == canonical(other))


@dataclass
class Sample:
    x: object
    y: object


class Unknown:
    def __init__(self, value):
        self.value = value


class Image:
    """What Pillow's images have."""

    mode, size = "L", (1, 2)

    def __init__(self, content):
        self.content = content

    def tobytes(self):
        return self.content


def test_layout_in_memory_does_not_count_and_content_does():
    array = np.arange(6.0).reshape(2, 3)
    assert digest_sample(array) == digest_sample(np.asfortranarray(array))
    assert digest_sample(array) != digest_sample(array.astype("f4"))
    assert digest_sample(array) != digest_sample(array.reshape(3, 2))
    assert digest_sample(torch.arange(4).bfloat16()) != digest_sample(torch.ones(4).bfloat16())
    assert digest_sample(torch.tensor(3.0)) != digest_sample(torch.tensor(4.0))
    empty, one = torch.zeros(0, 3)[:, :0], torch.arange(6.0).reshape(2, 3).t()[1:2, :1]
    assert digest_sample(empty) != digest_sample(one) == digest_sample(one.clone())
    turned = torch.tensor([1 + 2j, 3 - 1j])
    assert digest_sample(turned.conj()) == digest_sample(turned.conj().resolve_conj())
    assert digest_sample(turned.conj()) != digest_sample(turned)
    assert digest_sample({"a": 1, "b": 2}) == digest_sample({"b": 2, "a": 1})
    assert digest_sample(("a", "bc")) != digest_sample(("ab", "c"))
    assert digest_sample(Sample(1, 2)) != digest_sample(Sample(2, 1))
    assert digest_sample(Image(b"ab")) != digest_sample(Image(b"ac"))
    assert digest_sample(np.array(["a", None], object)) != digest_sample(
        np.array(["b", None], object)
    )


def test_what_nobody_can_read_counts_by_its_type_and_says_so():
    assert digest_sample(Unknown(1)) == digest_sample(Unknown(2))
    assert not is_read(Unknown(1))
    assert not is_read({"a": [Unknown(1)]})
    assert not is_read(torch.eye(2).to_sparse())
    for known in ({"a": Unknown(1), "b": "text"}, Sample(1, 2), Image(b""), np.float32(1), b""):
        assert is_read(known)


def test_digests_are_the_same_in_every_process():
    """Whatever the hash seed: sets and dicts have an order of their own in each."""
    code = (
        "from hpctrain.data.fingerprint import digest_sample as d;"
        "print(d({'keys': {'a', 'b', 'c', 'dd'}, 'x': ('y', 1.5)}).hex())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_samples_are_shown_in_a_few_words():
    assert show_sample(torch.tensor([1, 2])) == "Tensor (2,) [1, 2]"
    assert show_sample(np.zeros((8, 8))) == "ndarray (8, 8)"
    assert show_sample({"number": 3, "name": "x"}) == "{'number': 3, 'name': 'x'}"
    assert len(show_sample("x" * 1000)) < 60
    assert show_sample(Unknown(1)) == "Unknown"


def opened(*samples):
    return Opening(tuple(map(digest_sample, samples)), show_sample(samples[:1]), True)


@pytest.mark.parametrize(
    ("openings", "split", "words"),
    [
        ([opened(0, 1), opened(0, 1)], None, None),
        ([opened(0, 1), opened(0, 2)], None, ["sample 1", "rank 1 of 2", "split='already'"]),
        ([opened(0, 1), opened(0)], None, ["sample 1", "rank 1 of 2"]),
        ([opened(0), opened(1), opened(0), opened(2)], None, ["ranks 1,3 of 4", "on rank 0"]),
        ([opened(0, 1), opened(2, 3)], "already", None),
        ([opened(0), opened()], "already", ["rank 1 of 2 has no samples"]),
        ([opened(), opened()], "already", None),
        ([opened(0, 1), opened(0, 1)], "already", ["would be used 2 times"]),
        ([opened(0, 0), opened(0, 0)], "already", None),  # one constant says nothing
        ([opened(0), opened(1)], "same", None),
    ],
)
def test_streams_that_do_not_go_together_are_named(openings, split, words):
    trouble = trouble_with_streams(openings, split)
    assert (trouble is None) == (words is None)
    for word in words or ():
        assert word in trouble


def read(num_read, *samples):
    return ReadReport(num_read, b"".join(map(digest_sample, samples)))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        # What differs first is named, with the ranks that have it.
        ([read(20, 1, 2), read(20, 1, 3)], ["sample 19 on rank 1 of 2"]),
        (
            [read(20, 1, 2), read(20, 1, 3), read(20, 4, 2), read(20, 1, 2)],
            ["sample 18 on rank 2 of 4"],
        ),
        ([read(20, 1, 2), read(19, 4)], ["sample 18 on rank 1 of 2"]),
        # Shorter ones have ended.
        ([read(21, 1, 2), read(20, 1)], ["rank 1 of 2 ended early", "20 on rank 1", "rank 0 has"]),
        ([read(20, 1), read(21, 1, 2)], ["rank 0 of 2 ended early", "20 on rank 0", "read 21"]),
        ([read(20), read(21), read(9)], ["ranks 0,2 of 3 ended early", "20 on rank 0, 9 on rank"]),
    ],
)
def test_readings_that_differ_are_named(told, words):
    trouble = trouble_with_readings(told)
    for word in (*words, "split='already'"):
        assert word in trouble


@pytest.mark.parametrize(
    "make",
    [
        lambda values: values,
        lambda values: torch.from_numpy(values),
        lambda values: values.tobytes(),
        lambda values: {"x": [values.reshape(8, -1).T]},
    ],
)
def test_a_digest_of_pieces_sees_other_samples_and_costs_little(make):
    rows = np.random.default_rng(1).integers(0, 255, (2, 1_000_000), np.uint8)
    found = [digest_sample(make(row), most_bytes=1 << 16) for row in rows]
    assert found[0] != found[1]
    assert found[0] == digest_sample(make(rows[0].copy()), most_bytes=1 << 16)
    assert found[0] != digest_sample(make(rows[0]))  # of all bytes
    for place in (0, -1):
        changed = rows[0].copy()
        changed[place] += 1
        assert digest_sample(make(changed), most_bytes=1 << 16) != found[0]
    short = rows[0][: 1 << 14]
    assert digest_sample(make(short), most_bytes=1 << 16) == digest_sample(make(short))
