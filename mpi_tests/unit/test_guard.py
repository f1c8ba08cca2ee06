"""A rank that leaves alone says so, and one whose peers come with it says nothing."""

from __future__ import annotations

import time

from hpctrain.world import detect
from hpctrain.world.guard import remark_on_waiting


def test_a_rank_that_waits_for_others_to_end_says_why(capfd):
    launch = detect({})
    with remark_on_waiting(launch, after_s=60):
        pass
    assert capfd.readouterr().err == ""
    told, until = "", time.monotonic() + 30
    with remark_on_waiting(launch, after_s=0.01):
        while not told and time.monotonic() < until:
            time.sleep(0.01)
            told = capfd.readouterr().err
    assert "called sys.exit(0) and waits for the others to end" in told
