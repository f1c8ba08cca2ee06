"""Floor 3: data for all ranks: who has which sample, in which order, and how batches get there.

Names are loaded on first use: the arithmetic of batches needs neither torch nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.data.adopting import is_stream
    from hpctrain.data.batches import Batching, part_of
    from hpctrain.data.chunks import split_bytes
    from hpctrain.data.gathering import gather
    from hpctrain.data.loader import Loader
    from hpctrain.data.partition import cyclic
    from hpctrain.data.plan import Seat, plan_parts
    from hpctrain.data.reshuffling import reshuffle
    from hpctrain.data.scattering import CHUNK_BYTES, scatter
    from hpctrain.data.settling import Arguments, settle
    from hpctrain.data.shard import Shard
    from hpctrain.data.sharing import Shared, share
    from hpctrain.data.source import Batch, Source
    from hpctrain.data.staging import stage
    from hpctrain.data.storage import files, name_files, open_named
    from hpctrain.data.storage.inspecting import inspect
    from hpctrain.data.storage.manifest import read_manifest
    from hpctrain.data.storage.numpy_files import open_npy
    from hpctrain.data.storage.shards import check_shard
    from hpctrain.data.storage.writing import write_shards
    from hpctrain.data.structure import leaves

__all__ = [
    "CHUNK_BYTES",
    "Arguments",
    "Batch",
    "Batching",
    "Loader",
    "Seat",
    "Shard",
    "Shared",
    "Source",
    "check_shard",
    "cyclic",
    "files",
    "gather",
    "inspect",
    "is_stream",
    "leaves",
    "name_files",
    "open_named",
    "open_npy",
    "part_of",
    "plan_parts",
    "read_manifest",
    "reshuffle",
    "scatter",
    "settle",
    "share",
    "split_bytes",
    "stage",
    "write_shards",
]

__getattr__ = lazy(
    __name__,
    {
        ".adopting": ("is_stream",),
        ".batches": (
            "Batching",
            "part_of",
        ),
        ".chunks": ("split_bytes",),
        ".gathering": ("gather",),
        ".loader": ("Loader",),
        ".partition": ("cyclic",),
        ".plan": (
            "Seat",
            "plan_parts",
        ),
        ".reshuffling": ("reshuffle",),
        ".scattering": (
            "CHUNK_BYTES",
            "scatter",
        ),
        ".settling": (
            "Arguments",
            "settle",
        ),
        ".shard": ("Shard",),
        ".sharing": (
            "Shared",
            "share",
        ),
        ".source": (
            "Batch",
            "Source",
        ),
        ".staging": ("stage",),
        ".storage": (
            "files",
            "name_files",
            "open_named",
        ),
        ".storage.inspecting": ("inspect",),
        ".storage.manifest": ("read_manifest",),
        ".storage.numpy_files": ("open_npy",),
        ".storage.shards": ("check_shard",),
        ".storage.writing": ("write_shards",),
        ".structure": ("leaves",),
    },
)
