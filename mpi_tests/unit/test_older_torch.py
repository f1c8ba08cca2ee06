"""A refusal that names a newer torch skips a test; nothing else does."""

from __future__ import annotations

import pytest

from mpi_tests.older_torch import refusal_in

WORDS = "shard= on CPUs needs torch >= 2.7 (a Stream), and this is torch 2.6.0; use a newer one"


def behind(error):
    """An error whose cause is another."""
    raised = ValueError("pattern did not match")
    raised.__cause__ = error
    return raised


@pytest.mark.parametrize("error", [ValueError(WORDS), behind(RuntimeError(f"first\n{WORDS}\nx"))])
def test_a_refusal_is_found_where_torch_is_older(error):
    assert refusal_in(error, (2, 6)) == WORDS
    assert refusal_in(error, (2, 7)) is None  # there the feature must work
    assert refusal_in(error, (2, 13)) is None


def test_other_failures_stay_failures():
    assert refusal_in(AssertionError("1 == 2"), (2, 6)) is None
    assert refusal_in(ValueError("this is torch 2.6.0"), (2, 6)) is None
