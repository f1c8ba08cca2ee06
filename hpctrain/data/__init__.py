"""Floor 3: data for all ranks: who has which sample, in which order, and how batches get there."""

from __future__ import annotations

from hpctrain.data import metrics
from hpctrain.data.gathering import gather
from hpctrain.data.reshuffling import reshuffle
from hpctrain.data.scattering import scatter
from hpctrain.data.shard import Shard
from hpctrain.data.sharing import Shared, share
from hpctrain.data.staging import stage
from hpctrain.data.storage import files

__all__ = [
    "Shard",
    "Shared",
    "files",
    "gather",
    "metrics",
    "reshuffle",
    "scatter",
    "share",
    "stage",
]
