"""Floor 3: data for all ranks: who has which sample, in which order, and how batches get there."""

from __future__ import annotations
