"""What the handshake finds, from reports alone."""

from __future__ import annotations

import dataclasses

import pytest

from hpctrain.errors import ConfigError
from hpctrain.world.preflight import Report, compare, digest_config

GOOD = Report(
    host="node1",
    hpctrain="0.1",
    torch="2.13.0",
    python="3.11.7",
    mpi="MPICH 5",
    script="abc",
    config="none",
    clock_s=1000.0,
    shm_free_bytes=64 << 30,
    memory_free_bytes=64 << 30,
    local_size=2,
)


def reports(**changed):
    return [GOOD, GOOD, dataclasses.replace(GOOD, host="node2", **changed)]


def test_equal_ranks_pass():
    assert compare(reports()) == []


@pytest.mark.parametrize("field", ["hpctrain", "torch", "python", "mpi", "script", "config"])
def test_each_difference_is_named_by_rank_and_host(field):
    (finding,) = compare(reports(**{field: "other"}))
    assert finding.corrupts
    assert "other on rank 2 (node2)" in finding.text
    assert "on ranks 0-1 (node1)" in finding.text


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("clock_s", 1005.0, "clock"),
        ("shm_free_bytes", 1 << 20, "/dev/shm"),
        ("memory_free_bytes", 1 << 20, "memory"),
    ],
)
def test_shortages_are_named_and_do_not_corrupt(field, value, word):
    (finding,) = compare(reports(**{field: value}))
    assert not finding.corrupts
    assert word in finding.text
    assert "rank 2 (node2)" in finding.text


def test_the_digest_ignores_the_order_of_keys():
    assert digest_config({"a": 1, "b": [2.5]}) == digest_config({"b": [2.5], "a": 1})
    assert digest_config({"a": 1}) != digest_config({"a": 2})
    assert digest_config(None) == "none"
    with pytest.raises(ConfigError, match="plain dicts"):
        digest_config({"f": print})
