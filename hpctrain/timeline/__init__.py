"""Floor 2: what every rank did when, on one clock, as a trace that browsers draw."""

from __future__ import annotations

from hpctrain.timeline.merging import MERGED, SUMMARY, merge_folder
from hpctrain.timeline.recording import Tap
from hpctrain.timeline.slowest import blame
from hpctrain.timeline.tracing import start

__all__ = [
    "MERGED",
    "SUMMARY",
    "Tap",
    "blame",
    "merge_folder",
    "start",
]
