"""Walltime and memory: every usual form is read, everything unclear is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.batch_systems.flux import format_duration
from hpctrain.batch_systems.lsf import format_minutes
from hpctrain.batch_systems.units import (
    format_clock,
    format_memory,
    parse_duration,
    parse_memory,
)
from hpctrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("2h30m", 9000), ("02:30:00", 9000), ("90 min", 5400), ("1-00:00:01", 86401)],
        *[("1.5 h", 5400), ("45s", 45), ("2 days", 172800), (" 1H 5Min ", 3900)],
        *[("1000:00:00", 3600000), ("0h 1m", 60)],
    ],
)
def test_walltimes_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            "30",
            "1:30",
            "0",
            "0h",
            "-5",
            "-1h",
            "00:61:00",
            "00:00:60",
            "00:00:00",
            "1-25:00:00",
        ],
        *[
            "2h2h",
            "h",
            "1.3s",
            "9999999h",
            "2h\n1h",
            "2h;rm",
            "\uff11h",
            "1e3s",
            "5 parsecs",
            "1:2:3:4",
        ],
    ],
)
def test_unclear_walltimes_are_refused(text):
    with pytest.raises(ConfigError, match="walltime"):
        parse_duration(text)


@given(st.integers(1, 366 * 86400))
def test_every_dialect_says_the_same_time(seconds):
    assert parse_duration(format_clock(seconds)) == seconds
    assert parse_duration(format_duration(seconds)) == seconds
    hours, minutes = format_minutes(seconds).split(":")
    assert seconds <= 3600 * int(hours) + 60 * int(minutes) < seconds + 60
    assert int(minutes) < 60


@pytest.mark.parametrize(
    ("text", "mib"),
    [("64G", 65536), ("64 GiB", 65536), ("64gb", 65536), ("512M", 512), ("2T", 2 << 20)],
)
def test_memory_is_read(text, mib):
    assert parse_memory(text) == mib


@pytest.mark.parametrize("text", ["", "64", "1.5G", "0G", "-1G", "1Gi", "5K", "G", "1 G B", "64P"])
def test_unclear_memory_is_refused(text):
    with pytest.raises(ConfigError, match="memory"):
        parse_memory(text)


@given(st.integers(1, 1 << 30))
def test_memory_is_written_as_a_whole_number(mib):
    text = format_memory(mib)
    assert text[:-1].isdecimal()
    assert parse_memory(text) == mib


@given(st.text())
def test_whatever_is_given_is_read_or_refused(text):
    for parse in (parse_duration, parse_memory):
        with contextlib.suppress(ConfigError):
            assert parse(text) > 0
